"""Formats of data/prepare.py: every kind that it reads, about 20 MB of each, and every kind that it refuses; the marks of
documents; the same shards for any number of workers and after a kill at any moment; memory.

python3 -m pytest test/test_prepare_formats.py      .parquet, .arrow and .zst are skipped without pyarrow and zstandard"""
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
MARKS = {"gpt2": (["<|endoftext|>"], []), "qwen2": (["<|endoftext|>"], []), "llama2": (["<s>"], ["</s>"]),
         "llama3": (["<|begin_of_text|>"], ["<|end_of_text|>"])}


# ---------------------------------------------------------------- one corpus in every format

def make_documents(total_bytes, seed=1):
    """Documents of about a thousand bytes in long made-up words, with quotes, tabs and line ends."""
    r = random.Random(seed)
    words = ["".join(r.choice("abcdeilmnorstuvé") for _ in range(r.randint(6, 16))) for _ in range(400)]
    lines = [" ".join(r.choice(words) for _ in range(r.randint(20, 80))) + r.choice([".", "!\n\n\"a\", b", "\t5\n", "s' 東京"])
             for _ in range(1000)]
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
        assert part_tokens(folder / "jsonl", part)[0][0] == [i for document in want for i in [0] + document]
    assert meta["val"]["documents"] == len(documents) - first
    sizes = [len(d.encode()) for d in documents]
    assert sum(sizes[:first]) <= 0.95 * sum(sizes) < sum(sizes[:first + 1])
    assert meta["train"]["bytes"] == sum(sizes[:first]) and meta["val"]["bytes"] == sum(sizes[first:])
    assert meta["val"]["words"] == sum(len(d.split()) for d in documents[first:])
    assert meta["documents"] == {"before": ["<|endoftext|>"], "before_ids": [0], "after": [], "after_ids": []}


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
        assert header["bytes"] == header["words"] == 0 and header["vocab_size"] > 256 and ids[0] == 0
    joined = [i for part in ("train", "val") for i in part_tokens(tmp_path / "o", part)[0][0]]
    assert joined == [i for part in ("train", "val") for i in part_tokens(folder / "jsonl", part)[0][0]]


def test_nested_folder_of_20_mb(corpus, tmp_path):
    """Text files of several suffixes at several depths, each a document, in the order of their paths; compressed too."""
    folder, documents, _, _ = corpus
    texts = ["\n".join(documents[i:i + 200]) + "\n" for i in range(0, len(documents), 200)]
    paths = []
    for i, text in enumerate(texts):
        path = tmp_path / "d" / f"{i:04d}" / ("b" if i % 2 else "") / f"x{('.txt', '.md', '.py', '.rst.gz')[i % 4]}"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(text.encode(), 1) if i % 4 == 3 else text.encode())
        paths.append(path)
    (tmp_path / "d" / ".hidden").write_bytes(b"\0\1")
    said = run_prepare(tmp_path / "d", "--tokenizer", folder / "tokenizer.json", "--out", tmp_path / "o", "--workers", 2)
    memory_is_small(said)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (train, _), = part_tokens(tmp_path / "o", "train")
    (val, header), = part_tokens(tmp_path / "o", "val")
    assert train.count(0) + val.count(0) == len(texts) + 1     # one was cut in two
    starts = [i for i, token in enumerate(val) if token == 0]
    for text, begin, end in zip(texts[-3:], starts[-3:], [*starts[-2:], len(val)]):
        assert val[begin + 1:end] == tokenizer.encode(text).ids


# ---------------------------------------------------------------- the same bytes as before

def test_shards_of_a_text_are_the_bytes_they_were(tmp_path):
    """Hashes of what the first prepare.py wrote, which held everything in memory."""
    r = random.Random(7)
    words = ["".join(r.choice("abcdeilmnorstuvé") for _ in range(r.randint(1, 9))) for _ in range(900)]
    lines = [" ".join(r.choice(words) for _ in range(r.randint(0, 30))) + r.choice([".", ",", ":", "\t", " ;  "]) for _ in range(9000)]
    (tmp_path / "d").mkdir()
    for i in range(3):
        (tmp_path / "d" / f"{i}.txt").write_text("\n".join(lines[i::3]) + "\n", encoding="utf-8-sig" if i == 1 else "utf-8")
    (tmp_path / "book.txt").write_text("\n".join(lines) + "\n")
    found = {}
    for what in ("book.txt", "d"):
        run_prepare(tmp_path / what, "--vocab-size", 700, "--shard-tokens", 70000, "--out", tmp_path / f"o{what}",
                    "--workers", 2 if what == "d" else 1)
        hashes = bytes_of(tmp_path / f"o{what}")
        assert len([n for n in hashes if n.startswith("train")]) > 3
        found[what] = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]
    assert found == EXPECTED


EXPECTED = {"book.txt": "6f37931a0809b63c", "d": "8ee6cc468f23d9fa"}


# ---------------------------------------------------------------- marks, and cutting a text into pieces

@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_documents(family, tmp_path):
    """As the tokenizer's own post-processor has them, and the base model's end-of-text token; said in the data card.
    Long documents are cut into pieces and have the ids of the whole."""
    documents = make_documents(60_000, seed=3)
    documents = ["short", documents[0], " ".join(documents[1:40]) + "\n\nx", "naïve e\u0301 \u4e1c\u4eac\n" * 3000, *documents[40:]]
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
    begin = [] if after else [tokenizer.token_to_id(name) for name in before]      # else the post-processor puts it
    want = [begin + tokenizer.encode(document).ids + end for document in documents]
    found = [i for part in ("train", "val") for ids, _ in part_tokens(tmp_path / "o", part) for i in ids]
    assert found == sum(want, [])
    config = json.load(open(tmp_path / "o" / "tokenizer_config.json"))
    assert (config["bos_token"], config["eos_token"]) == (before[0], (after or before)[0])
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
    assert part_tokens(tmp_path / "o", "train")[0][0][1:] == tokenizer.encode("of the " * 9000 + "\n").ids
