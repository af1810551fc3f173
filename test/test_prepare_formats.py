"""Formats of data/prepare.py: every kind that it reads, about 20 MB of each, and every kind that it refuses; the marks
of documents; the same shards for any number of workers and after a kill at any moment; memory.

python3 -m pytest test/test_prepare_formats.py    .parquet, .arrow and .zst are skipped without pyarrow and zstandard"""
import csv
import gzip
import hashlib
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
from test_prepare import KINDS, PREPARE, part_tokens, prepare, run_prepare

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MB = 1_000_000
V = 5000
SAID = re.compile(r"at most (\d+) MiB of memory(?: and (\d+) MiB in each of (\d+) workers)?")


# ---------------------------------------------------------------- tokenizers of the families

def byte_level(kind, texts, specials, vocab_size=600):
    pre_tokenizer, options = KINDS[kind]
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def llama3(texts):
    """An instruct folder's: <|eot_id|> is there, and is not what ends a document."""
    tokenizer = byte_level("llama3", texts, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def llama2(texts):
    """SentencePiece's BPE over the whole text, a space put in front, bytes where the vocabulary has no letter."""
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False,
                                  special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))])
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


FAMILIES = {
    "gpt2": lambda texts: byte_level("gpt2", texts, ["<|endoftext|>"]),
    "qwen2": lambda texts: byte_level("qwen2", texts, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "llama3": llama3,
    "llama2": llama2,
}
MARKS = {"gpt2": ([], ["<|endoftext|>"]), "qwen2": ([], ["<|endoftext|>"]), "llama2": (["<s>"], ["</s>"]),
         "llama3": (["<|begin_of_text|>"], ["<|end_of_text|>"])}


# ---------------------------------------------------------------- one corpus in every format

def make_documents(total_bytes, seed=1):
    """Documents of about a thousand bytes in long made-up words, with quotes, tabs and line ends."""
    r = random.Random(seed)
    words = ["".join(r.choice("abcdeilmnorstuvé") for _ in range(r.randint(20, 40))) for _ in range(120)]
    ends = [".", "!\n\n\"a\", b", "\t5\n", "s' 東京"]
    lines = [" ".join(r.choice(words) for _ in range(r.randint(8, 30))) + r.choice(ends) for _ in range(1000)]
    documents, size = [], 0
    while size < total_bytes:
        text = f"{len(documents)} {r.choice(lines)} {r.choice(lines)}"
        documents.append(text)
        size += len(text.encode())
    return documents


def megatron_write(stem, documents, dtype, code):
    sequences = [np.array(document, dtype) for document in documents]
    lengths = np.array([len(s) for s in sequences], "<i4")
    with open(f"{stem}.bin", "wb") as file:
        file.write(np.concatenate(sequences).tobytes())
    with open(f"{stem}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(sequences) + 1))
        file.write(lengths.tobytes())
        file.write((np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize)
                   .astype("<i8").tobytes())
        file.write(np.arange(len(sequences) + 1, dtype="<i8").tobytes())


def write_format(kind, path, documents, ids=()):
    """A file or folder of this kind with the documents; its path."""
    table = kind in ("parquet", "arrow", "datasets", "dict")
    pyarrow = pytest.importorskip("pyarrow") if table else None
    target = path / f"docs.{kind}"
    lines = "".join(json.dumps({"id": i, "text": d}, ensure_ascii=i % 2 == 0) + "\n" for i, d in enumerate(documents)
                    ) if "json" in kind else ""
    if kind in ("jsonl", "json"):
        target.write_text(lines)
    elif kind == "jsonl.gz":
        target.write_bytes(gzip.compress(lines.encode(), 1))
    elif kind == "jsonl.zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(lines) // 2                                 # two frames, as of parts put one after another
        target.write_bytes(b"".join(zstandard.compress(part.encode(), 1) for part in (lines[:half], lines[half:])))
    elif kind in ("csv", "tsv"):
        with open(target, "w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
            writer.writerows([["id", "text"], *([i, d] for i, d in enumerate(documents))])
    elif kind == "parquet":
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(documents)), "text": documents}), target)
    elif kind == "arrow":
        with pyarrow.OSFile(str(target), "wb") as file, pyarrow.ipc.new_file(
                file, pyarrow.schema([("text", pyarrow.string())])) as writer:
            writer.write_table(pyarrow.table({"text": documents}), 1000)
    elif kind == "datasets":
        saved_dataset_write(pyarrow, target, documents)
    elif kind == "megatron":
        target = path / "docs.bin"
        megatron_write(path / "docs", [i + [0] for i in ids], "<u2", 8)        # <|endoftext|>, as --append-eod does
    return target


def saved_dataset_write(pyarrow, folder, documents):
    """The files of datasets.Dataset.save_to_disk, two of data."""
    folder.mkdir()
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (documents[:len(documents) // 2], documents[len(documents) // 2:])):
        table = pyarrow.table({"label": [0] * len(part), "text": part})
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, 1000)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def bytes_of(out):
    """What training reads; meta.json has names of the input."""
    names = sorted(n for n in os.listdir(out) if n != "meta.json")
    return {n: hashlib.sha256((pathlib.Path(out) / n).read_bytes()).hexdigest() for n in names}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(folder, documents, their ids, what was said about the shards of its .jsonl): 20 MB."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = make_documents(20 * MB)
    tokenizer = byte_level("gpt2", documents[:2000], ["<|endoftext|>"], V)
    tokenizer.save(str(folder / "tokenizer.json"))
    source = write_format("jsonl", folder, documents)
    said = run_prepare(source, "--tokenizer", folder / "tokenizer.json", "--out", folder / "jsonl", "--workers", 2)
    ids = [e.ids for e in tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
    return folder, documents, ids, said


def memory_is_small(said, workers=2):
    """The text alone is 20 MB; as Python has it, with ids and pieces, it would be a hundred more."""
    parent, worker, number = map(int, SAID.search(said).groups())
    assert number == workers and parent < 150 and worker < 150, said


def test_shards_are_the_documents(corpus):
    """In ids, order, marks, bytes and words; the last 5 % are whole documents."""
    folder, documents, ids, said = corpus
    memory_is_small(said)
    meta = json.load(open(folder / "jsonl" / "meta.json"))
    first = meta["train"]["documents"]
    for part, want in (("train", ids[:first]), ("val", ids[first:])):
        assert part_tokens(folder / "jsonl", part)[0][0] == [i for document in want for i in document + [0]]
    assert meta["val"]["documents"] == len(documents) - first
    sizes = [len(d.encode()) for d in documents]
    assert sum(sizes[:first]) <= 0.95 * sum(sizes) < sum(sizes[:first + 1])
    assert meta["train"]["bytes"] == sum(sizes[:first]) and meta["val"]["bytes"] == sum(sizes[first:])
    assert meta["val"]["words"] == sum(len(d.split()) for d in documents[first:])
    assert meta["documents"] == {"before": [], "before_ids": [], "after": ["<|endoftext|>"], "after_ids": [0]}


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "csv", "tsv", "parquet", "arrow", "datasets", "megatron"])
def test_format(corpus, kind, tmp_path):
    """Each format of the same documents gives the same shards; Megatron's know no bytes of text."""
    folder, documents, ids, _ = corpus
    source = write_format(kind, tmp_path, documents, ids)
    said = run_prepare(source, "--tokenizer", folder / "tokenizer.json", "--out", tmp_path / "o", "--workers", 2)
    memory_is_small(said)
    if kind != "megatron":
        assert bytes_of(tmp_path / "o") == bytes_of(folder / "jsonl")
        return
    for name in ("train", "val"):                              # split by tokens there
        (ids, header), = part_tokens(tmp_path / "o", name)
        assert header["bytes"] == header["words"] == 0 and header["vocab_size"] > 256 and ids[-1] == 0
    joined = [i for part in ("train", "val") for i in part_tokens(tmp_path / "o", part)[0][0]]
    assert joined == [i for part in ("train", "val") for i in part_tokens(folder / "jsonl", part)[0][0]]


def test_nested_folder_of_20_mb(corpus, tmp_path):
    """Text files of several suffixes at several depths, each a document, in the order of their paths; some packed."""
    folder, documents, _, _ = corpus
    texts = ["\n".join(documents[i:i + 200]) + "\n" for i in range(0, len(documents), 200)]
    paths = []
    for i, text in enumerate(texts):
        path = tmp_path / "d" / f"{i:04d}" / ("b" if i % 2 else "") / f"x{('.txt', '.md', '.py', '.rst.gz')[i % 4]}"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(text.encode(), 1) if i % 4 == 3 else text.encode())
        paths.append(path)
    (tmp_path / "d" / ".hidden").write_bytes(b"\0\1")
    said = run_prepare(tmp_path / "d", "--tokenizer", folder / "tokenizer.json", "--out", tmp_path / "o", "--workers",
                       2)
    memory_is_small(said)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (train, _), = part_tokens(tmp_path / "o", "train")
    (val, header), = part_tokens(tmp_path / "o", "val")
    assert train.count(0) + val.count(0) == len(texts) + 1     # one was cut in two
    ends = [i for i, token in enumerate(val) if token == 0]
    assert val[-1] == train[-1] == 0
    for text, before, end in zip(texts[-3:], ends[-4:-1], ends[-3:]):
        assert val[before + 1:end] == tokenizer.encode(text).ids


# ---------------------------------------------------------------- the same bytes as before

EXPECTED = {"book.txt": "7fc67fd2d600e4bc", "d": "20158376c110a00d"}


def test_shards_of_a_text_are_the_bytes_they_were(tmp_path):
    """Hashes of what the first prepare.py wrote, which held everything in memory; the end-of-text token moved since."""
    r = random.Random(7)
    words = ["".join(r.choice("abcdeilmnorstuvé") for _ in range(r.randint(1, 9))) for _ in range(900)]
    ends = [".", ",", ":", "\t", " ;  "]
    lines = [" ".join(r.choice(words) for _ in range(r.randint(0, 30))) + r.choice(ends) for _ in range(9000)]
    (tmp_path / "d").mkdir()
    for i in range(3):
        encoding = "utf-8-sig" if i == 1 else "utf-8"
        (tmp_path / "d" / f"{i}.txt").write_text("\n".join(lines[i::3]) + "\n", encoding=encoding)
    (tmp_path / "book.txt").write_text("\n".join(lines) + "\n")
    found = {}
    for what in ("book.txt", "d"):
        run_prepare(tmp_path / what, "--vocab-size", 700, "--shard-tokens", 70000, "--out", tmp_path / f"o{what}",
                    "--workers", 2 if what == "d" else 1)
        hashes = bytes_of(tmp_path / f"o{what}")
        assert len([n for n in hashes if n.startswith("train")]) > 3
        found[what] = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]
    assert found == EXPECTED



# ---------------------------------------------------------------- marks, and cutting a text into pieces

@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_documents(family, tmp_path):
    """As the tokenizer's own post-processor has them, and the base model's end-of-text token; said in the data card.
    Long documents are cut into pieces and have the ids of the whole."""
    documents = make_documents(60_000, seed=3)
    documents = ["short", documents[0], " ".join(documents[1:40]) + "\n\nx", "naïve e\u0301 \u4e1c\u4eac\n" * 3000,
                 *documents[40:]]
    tokenizer = FAMILIES[family](documents)
    tokenizer.enable_truncation(5)                             # as some files have it: not for training data
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    tokenizer.no_truncation()
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    run_prepare(tmp_path / "d.jsonl", "--tokenizer", tmp_path, "--out", tmp_path / "o", "--val-fraction", 0.2)
    card = json.load(open(tmp_path / "o" / "meta.json"))
    before, after = MARKS[family]
    assert (card["documents"]["before"], card["documents"]["after"]) == (before, after)
    end = [tokenizer.token_to_id(name) for name in after]
    want = [tokenizer.encode(document).ids + end for document in documents]    # before it: the post-processor
    found = [i for part in ("train", "val") for ids, _ in part_tokens(tmp_path / "o", part) for i in ids]
    assert found == sum(want, [])
    config = json.load(open(tmp_path / "o" / "tokenizer_config.json"))
    assert (config["bos_token"], config["eos_token"]) == ((before or after)[0], after[0])
    places, _ = prepare.cutting(tokenizer)
    assert places is not None and len(list(prepare.pieces_of(unit_of(documents[2]), places))) > 1


def unit_of(text):
    sources = sys.modules["sources"]
    return sources.Unit("texts", "", 0, "text", [text])


def test_end_of_text_by_name(tmp_path):
    documents = make_documents(30_000)
    FAMILIES["llama3"](documents).save(str(tmp_path / "t.json"))
    (tmp_path / "d.txt").write_text("\n".join(documents))
    arguments = (tmp_path / "d.txt", "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "o", "--end-of-text")
    assert "no token of the vocabulary" in run_prepare(*arguments, "<nothing>", code=1)
    run_prepare(*arguments, "<|eot_id|>")
    assert part_tokens(tmp_path / "o", "train")[0][0][-1] == 2


@pytest.mark.parametrize("kind", ["apart", "spans"])
def test_pieces_only_where_the_tokenizer_cuts(kind, tmp_path):
    """A token that goes from a word into the next, or over a space, forbids to cut there: the text stays whole."""
    texts = ["of the " * 50, "in the end of it"]
    tokenizer = FAMILIES["gpt2"](texts)
    if kind == "spans":
        tokenizer.add_tokens([AddedToken("e of", normalized=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.train_from_iterator(["of the " * 50], trainers.BpeTrainer(vocab_size=300, show_progress=False,
                                      special_tokens=["<|endoftext|>"],
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert prepare.cutting(tokenizer) == (None, False)
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "d.txt").write_text("of the " * 9000 + "\n" + "of the " * 900 + "\n")
    run_prepare(tmp_path / "d.txt", "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "o")
    assert part_tokens(tmp_path / "o", "train")[0][0][:-1] == tokenizer.encode("of the " * 9000 + "\n").ids


# ---------------------------------------------------------------- what is refused, in one sentence

def said_by(capsys, *arguments, code=1):
    """What prepare.py says in this process. A refusal is one line and leaves no folder."""
    before = os.environ.pop("TOKENIZERS_PARALLELISM", None)
    try:
        assert prepare.main(list(map(str, arguments))) == code
    finally:
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    out, error = capsys.readouterr()
    if code == 1:
        assert error.startswith("prepare.py: ") and error.count("\n") == 1, error
        assert "--out" not in arguments or not os.path.exists(arguments[arguments.index("--out") + 1])
    return error if code else out


def gzip_cut(text):
    data = gzip.compress(text.encode())
    return data[:len(data) // 2]


LINES = "".join(json.dumps({"text": f"line {i} " * 9}) + "\n" for i in range(40))
SHARD = struct.pack("<II", 20240520, 1) + b"\0" * 1016
SAFETENSORS = struct.pack("<Q", 40) + b'{"a":{"dtype":"F32","shape":[1]}}       ' + b"\0\1\2\3"
REFUSED_KINDS = {
    "a.pdf": (b"%PDF-1.7\nabc", "a PDF document"), "named.txt": (b"%PDF-1.7\nabc", "a PDF document"),
    "a.docx": (b"PK\x03\x04\x14\0\0\0", "a zip archive"), "m.bin": (b"PK\x03\x04\x14\0\0\0", "a zip archive"),
    "a.png": (b"\x89PNG\r\n\x1a\n\0\0", "a PNG image"), "a.jpg": (b"\xff\xd8\xff\xe0\0", "a JPEG image"),
    "p.pkl": (b"(lp0\nI1\na.", "a Python pickle"), "p.dat": (pickle.dumps([1, 2, 3], 4), "a Python pickle"),
    "m.safetensors": (SAFETENSORS, "a safetensors file"), "m.dat": (SAFETENSORS, "a safetensors file"),
    "a.xz": (b"\xfd7zXZ\0\0\4", "xz data"), "a.bz2": (b"BZh91AY&SY\xff\0", "bzip2 data"),
    "a.tar": (b"x.txt" + b"\0" * 252 + b"ustar\0" + b"\0" * 300, "a tar archive"),
    "a.tar.gz": (gzip.compress(b"x.txt" + b"\0" * 252 + b"ustar\0" + b"\0" * 300), "a tar archive"),
    "u.txt": ("text".encode("utf-16"), "UTF-16 text"), "s.bin": (SHARD, "a token shard"),
    "r.bin": (bytes(range(250)) * 3, "a .bin without the .idx"), "x.npy": (b"\x93NUMPY\1\0", "a NumPy array"),
    "r.dat": (bytes(range(250)), "binary data of an unknown kind"),
    "n.ipynb": (b"{}", "a Jupyter notebook"), "e": (b"\x7fELF\2\1\1\0", "a program"),
    "not.parquet": (b"text", "is not parquet"), "d.sqlite": (b"SQLite format 3\0", "an SQLite database"),
    "array.json": (b'[{"text": "a"}]', "jq -c '.[]'"), "whole.json": (b'{\n"text": "a"\n}\n', "line 1: is not JSON"),
}


@pytest.mark.parametrize("name", REFUSED_KINDS)
def test_refused_by_kind(name, tmp_path, capsys):
    data, words = REFUSED_KINDS[name]
    (tmp_path / name).write_bytes(data)
    said = said_by(capsys, tmp_path / name, "--out", tmp_path / "o")
    assert words in said and name in said
    (tmp_path / "d").mkdir()                                   # and in a folder beside text
    (tmp_path / "d" / name).write_bytes(data)
    (tmp_path / "d" / "good.txt").write_text("a b c\n" * 20)
    assert name in said_by(capsys, tmp_path / "d", "--out", tmp_path / "o")


ROWS = [f"{i},text {i} abc" for i in range(30)]
BAD_CONTENT = {
    "missing.jsonl": (LINES + '{"txt": "a", "b": 1}\n', 'line 41: has no field "text" (it has: txt, b)', "--field"),
    "number.jsonl": (LINES + '{"text": 5}\n', 'line 41: the field "text" is a number', "--field"),
    "null.jsonl": (LINES + '\n{"text": null}\n', 'line 42: the field "text" is null', ""),
    "twice.jsonl": ('{"text": "a", "text": "b"}\n' + LINES, 'line 1: has the field "text" twice', ""),
    "list.jsonl": (LINES + '["text"]\n', "line 41: is a list", ""),
    "cut.jsonl": (LINES + '{"text": "a', "line 41: is not JSON", ""),
    "half.jsonl": (LINES + '{"text": "a\\ud83d"}\n', "line 41: has half of a surrogate pair", ""),
    "latin.jsonl": (LINES.encode() + b'{"text": "\xe9"}\n', "line 41, byte 10 of it is not UTF-8", "iconv"),
    "nul.jsonl": (LINES.encode() + b'{"text": "\0"}\n', "line 41: is not JSON", ""),
    "latin.txt": (b"abc\ncaf\xe9 b\n", "line 2, byte 7 is not UTF-8", "iconv"),
    "bom.txt": (b"\xef\xbb\xbfabc\ncaf\xe9 b\n", "line 2, byte 10 is not UTF-8", "iconv"),
    "end.txt": (b"abc\ncaf\xc3", "line 2, byte 7 is not UTF-8", "iconv"),
    "nul.txt": (b"abc\nde\0f\n", "line 2, byte 6 is NUL", "iconv"),
    "empty.txt": (b"", "its train part is empty", "more text"),
    "empty.jsonl": (b"\n\n", "its train part is empty", "more text"),
    "cut.txt.gz": (gzip_cut("abc def\n" * 9000), "cannot be read after", "get it again"),
    "cut.jsonl.gz": (gzip_cut(LINES), "cannot be read after", "get it again"),
    "short.csv": ("\n".join(["id,text", *ROWS, "31"]), "line 32: has 1 fields, the header has 2", "quotes"),
    "open.csv": ("\n".join(["id,text", *ROWS, '31,"a']), "line 32: is not CSV: unexpected end of data", ""),
    "other.csv": ("\n".join(["id,body", *ROWS]), '0 columns "text" (it has: id, body), one is needed', "--field"),
    "two.csv": ("\n".join(["text,text", *ROWS]), 'has 2 columns "text"', "--field"),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_bad_content_is_refused_with_its_place(name, tmp_path, capsys):
    data, words, advice = BAD_CONTENT[name]
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    said = said_by(capsys, tmp_path / name, "--out", tmp_path / "o")
    assert words in said and name in said and advice in said, said


def test_bad_line_in_a_worker_reaches_the_user(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(LINES * 300 + '{"text": 5}\n')
    for workers in (1, 2):
        said = said_by(capsys, tmp_path / "a.jsonl", "--out", tmp_path / "o", "--workers", workers)
        assert "a.jsonl: line 12001: the field" in said


def test_bad_zst(tmp_path, capsys):
    zstandard = pytest.importorskip("zstandard")
    data = zstandard.ZstdCompressor(write_checksum=True).compress(LINES.encode() * 50)
    for name, content in (("cut", data[:-20]), ("flipped", data[:30] + b"\xff" * 30 + data[60:])):
        (tmp_path / f"{name}.jsonl.zst").write_bytes(content)
        said = said_by(capsys, tmp_path / f"{name}.jsonl.zst", "--out", tmp_path / "o")
        assert "cannot be read after" in said and "get it again" in said


def test_bad_columns(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    for name, table, words in (
            ("number", {"text": [1, 2]}, 'the column "text" is int64'),
            ("null", {"text": ["a", None]}, "row 2: the column"),
            ("other", {"body": ["a"]}, 'no column "text" (it has: body)')):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        said = said_by(capsys, path, "--out", tmp_path / "o")
        assert words in said and f"{name}.parquet" in said
    path.write_bytes(path.read_bytes()[:-30])
    assert "is damaged, or not parquet" in said_by(capsys, path, "--out", tmp_path / "o")
    saved_dataset_write(pyarrow, tmp_path / "saved", ["a b c"] * 40)
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    (tmp_path / "saved" / "state.json").write_text(json.dumps(dict(state, _indices_files=[{"filename": "i.arrow"}])))
    assert "flatten_indices" in said_by(capsys, tmp_path / "saved", "--out", tmp_path / "o")


@pytest.mark.parametrize("package", ["pyarrow", "zstandard"])
def test_missing_package_is_named(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / ("a.parquet" if package == "pyarrow" else "a.jsonl.zst")
    path.write_bytes(b"PAR1" if package == "pyarrow" else b"\x28\xb5\x2f\xfd\0\0")
    assert f"pip install {package}" in said_by(capsys, path, "--out", tmp_path / "o")


def test_bad_megatron(tmp_path, capsys):
    FAMILIES["gpt2"](["a b"] * 9).save(str(tmp_path / "t.json"))
    documents = [[5, 6, 7], [8] * 40, [9, 10]] * 9
    out = ("--out", tmp_path / "o")
    megatron_write(tmp_path / "d", documents, "<i4", 4)
    run_prepare(tmp_path / "d.idx", *out)                      # without a tokenizer: ids as they are
    (ids, header), = part_tokens(tmp_path / "o", "train")
    assert ids == sum(documents, [])[:len(ids)] and header["vocab_size"] == 0
    assert not os.path.exists(tmp_path / "o" / "tokenizer.json")
    shutil.rmtree(tmp_path / "o")
    megatron_write(tmp_path / "d", [*documents, [70000]], "<i4", 4)
    said = said_by(capsys, tmp_path / "d.bin", "--tokenizer", tmp_path / "t.json", *out)
    assert "has the id 70000" in said and "vocabulary has" in said
    whole = (tmp_path / "d.idx").read_bytes()
    for index, words in ((whole[:60], "it was cut short"), (b"x" * 40, "is not the index"),
                         (whole[:17] + b"\6" + whole[18:], "only version 1 with whole numbers")):
        (tmp_path / "d.idx").write_bytes(index)
        assert words in said_by(capsys, tmp_path / "d.bin", *out)
    (tmp_path / "d.idx").write_bytes(whole)
    (tmp_path / "d.bin").write_bytes((tmp_path / "d.bin").read_bytes()[:-4])
    assert "do not belong together" in said_by(capsys, tmp_path / "d.bin", *out)


def test_folders(tmp_path, capsys):
    """One kind a folder; --suffix chooses; parts of the hub's files and of DatasetDict are kept apart."""
    d = tmp_path / "d"
    d.mkdir()
    (d / "a.txt").write_text("abc def\n" * 40)
    (d / "b.jsonl").write_text(LINES)
    (d / "c.odd").write_text("odd text\n" * 40)
    said = said_by(capsys, d, "--out", tmp_path / "o")
    assert "c.odd: the suffix .odd is not known to be text" in said and "--suffix .odd" in said
    os.remove(d / "c.odd")
    assert "has files of 2 kinds" in said_by(capsys, d, "--out", tmp_path / "o")
    said_by(capsys, d, "--suffix", ".jsonl", "--vocab-size", 300, "--out", tmp_path / "o", code=0)
    assert json.load(open(tmp_path / "o" / "meta.json"))["train"]["documents"] == 38
    hub = tmp_path / "hub"
    hub.mkdir()
    for part, count in (("train", 30), ("validation", 5), ("test", 7)):
        (hub / f"{part}-00000-of-00001.jsonl").write_text("".join(LINES.splitlines(True)[:count]))
    said_by(capsys, hub, "--vocab-size", 300, "--out", tmp_path / "h", code=0)
    card = json.load(open(tmp_path / "h" / "meta.json"))
    assert [card[part]["documents"] for part in ("train", "val", "test")] == [30, 5, 7]


def test_crlf_and_bom(tmp_path, capsys):
    """Line ends of Windows and a byte-order mark are no part of a record."""
    for name, text in (("a", LINES), ("b", "\ufeff" + LINES.replace("\n", "\r\n"))):
        (tmp_path / f"{name}.jsonl").write_bytes(text.encode())
        said_by(capsys, tmp_path / f"{name}.jsonl", "--vocab-size", 300, "--out", tmp_path / name, code=0)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


# ---------------------------------------------------------------- workers and kills

SMALL_BLOCKS = {"BLOCK_BYTES": 3000, "CHECKPOINT_SECONDS": 0}


def in_child(arguments, kill_at=None):
    """prepare.main in a fork with small blocks and a checkpoint after each; killed before the n-th call that changes
    the disk. Its exit status, -9 if it was killed."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        sys.stdout = open(os.devnull, "w")
        for name, value in SMALL_BLOCKS.items():
            setattr(prepare, name, value)
        sys.modules["sources"].UNIT_BYTES = 1000
        calls = 0
        for name in ("fsync", "replace", "remove", "makedirs"):
            def call(*args, real=getattr(os, name), **kwargs):
                nonlocal calls
                calls += 1
                if calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            setattr(os, name, call)
        os._exit(prepare.main(list(map(str, arguments))))
    finally:
        os._exit(99)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_killed_at_any_moment(kind, tmp_path):
    """Before every call that changes the disk, the first time and while it goes on: never a name that is complete
    before all is, and in the end the bytes of the unbroken run."""
    documents = make_documents(25_000 if kind == "jsonl" else 110_000, seed=5)
    FAMILIES["llama3"](documents).save(str(tmp_path / "t.json"))
    text = "".join(json.dumps({"text": d}) + "\n" for d in documents)
    (tmp_path / f"d.{kind}").write_text(text if kind == "jsonl" else "\n".join(documents) + "\n")
    arguments = [tmp_path / f"d.{kind}", "--tokenizer", tmp_path / "t.json", "--shard-tokens", 2500, "--out"]
    assert in_child([*arguments, tmp_path / "whole"]) == 0
    want = {**bytes_of(tmp_path / "whole"), "meta.json": (tmp_path / "whole" / "meta.json").read_text()}
    assert len([n for n in want if n.startswith("train")]) > 2
    kills = 0
    for first in range(1, 200, 2 if kind == "jsonl" else 5):
        out = tmp_path / f"o{first}"
        if in_child([*arguments, out], first) == 0:
            break
        if (out / "meta.json").exists():
            assert bytes_of(out).keys() >= want.keys() - {"meta.json"}
        elif (out / "prepare.progress").exists() and "names" not in json.loads((out / "prepare.progress").read_text()):
            assert not list(out.glob("*.bin"))
        if in_child([*arguments, out], 1 + first % 7) != 0:    # a second kill while it goes on
            assert in_child([*arguments, out]) == 0
        found = {**bytes_of(out), "meta.json": (out / "meta.json").read_text()}
        assert found == want, first
        shutil.rmtree(out)
        kills += 1
    assert kills >= 5


def test_resume_only_with_the_same_arguments(tmp_path, capsys):
    documents = make_documents(25_000)
    FAMILIES["gpt2"](documents).save(str(tmp_path / "t.json"))
    (tmp_path / "d.txt").write_text("\n".join(documents) + "\n")
    arguments = [tmp_path / "d.txt", "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "o"]
    assert in_child(arguments, 12) == -signal.SIGKILL
    assert (tmp_path / "o" / "prepare.progress").exists()
    said = prepare.main(list(map(str, [*arguments, "--val-fraction", 0.2])))
    assert said == 1 and "differs in: --val-fraction" in capsys.readouterr().err
    with open(tmp_path / "d.txt", "a") as file:
        file.write("more\n")
    assert prepare.main(list(map(str, arguments))) == 1 and "content of the input" in capsys.readouterr().err
    said_by(capsys, *arguments, "--force", code=0)
    assert not (tmp_path / "o" / "prepare.progress").exists() and not list((tmp_path / "o").glob("*.tmp"))


def test_killed_with_workers(corpus, tmp_path):
    """20 MB with two workers, killed after a checkpoint: no worker stays, and the bytes are those of one piece."""
    folder, _, _, _ = corpus
    arguments = [folder / "docs.jsonl", "--tokenizer", folder / "tokenizer.json", "--out", tmp_path / "o", "--workers",
                 2]
    program = (f"import sys; sys.path.insert(0, {os.path.dirname(PREPARE)!r}); import prepare; "
               "prepare.CHECKPOINT_SECONDS = 0.1; sys.exit(prepare.main(sys.argv[1:]))")
    run = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.DEVNULL)
    progress = tmp_path / "o" / "prepare.progress"
    deadline = time.time() + 120
    while not (progress.exists() and json.loads(progress.read_text())["position"][2] > 9):
        assert run.poll() is None and time.time() < deadline
        time.sleep(0.02)
    children = (pathlib.Path("/proc") / str(run.pid) / "task" / str(run.pid) / "children").read_text().split()
    assert len(children) >= 2
    run.kill()
    run.wait()
    said = run_prepare(*arguments)
    assert "going on with an unfinished preparation" in said
    assert bytes_of(tmp_path / "o") == bytes_of(folder / "jsonl")
    assert not any(os.path.exists(f"/proc/{child}/exe") for child in children)


def test_two_at_once_are_refused(tmp_path, capsys):
    import fcntl
    (tmp_path / "d.txt").write_text("\n".join(make_documents(9000)))
    (tmp_path / "o").mkdir()
    fd = os.open(tmp_path / "o", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert prepare.main([str(tmp_path / "d.txt"), "--vocab-size", "300", "--out", str(tmp_path / "o")]) == 1
    assert "another prepare.py is writing there" in capsys.readouterr().err
    os.close(fd)


def test_tokenizer_is_trained_on_a_sample_of_a_large_text(tmp_path, monkeypatch):
    """Spread over the whole text, of about the size that is allowed."""
    (tmp_path / "d.txt").write_text("\n".join(make_documents(800_000)) + "\n")
    source = sys.modules["sources"].Source(str(tmp_path / "d.txt"), "text")
    whole = "".join(prepare.training_texts([source], [(0, 0, None)], 800_000))
    assert whole == (tmp_path / "d.txt").read_text()
    monkeypatch.setattr(prepare, "TRAIN_BYTES", 100_000)
    sample = list(prepare.training_texts([source], [(0, 0, None)], 800_000))
    assert 60_000 < sum(map(len, sample)) < 140_000 and all(piece in whole for piece in sample)
    assert whole.index(sample[-1]) > 600_000
