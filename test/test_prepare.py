"""Tests of data/prepare.py, and of the C readers against the Python libraries that others write the files with.

Needs numpy, tokenizers, pytest and a C++ compiler with cJSON and PCRE2; what needs safetensors, torch or transformers
is skipped without them.   python3 -m pytest test/test_prepare.py
"""
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FULL = os.environ.get("TRAIN_GPT_FULL") == "1"
PREPARE = os.path.join(ROOT, "data", "prepare.py")

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,  # noqa: E402
                        trainers)

spec = importlib.util.spec_from_file_location("prepare", PREPARE)
prepare = sys.modules["prepare"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare)


@pytest.fixture(scope="session")
def test_data(tmp_path_factory):
    """The C++ test program, whose modes read and write files for us."""
    program = str(tmp_path_factory.mktemp("build") / "test_data")
    source = os.path.join(ROOT, "test", "test_data.cpp")
    subprocess.run(["g++", "-x", "c++", "-std=c++17", "-O1", "-I", ROOT, source, "-o", program, "-lcjson", "-lpcre2-8",
                    "-pthread"], check=True)

    def run(*arguments, data=b""):
        return subprocess.run([program, *map(str, arguments)], input=data, stdout=subprocess.PIPE, check=True).stdout
    return run


def run_prepare(*arguments, code=0):
    done = subprocess.run([sys.executable, PREPARE, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    if code == 1:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("prepare.py: "), done.stderr
    return done.stdout if code == 0 else done.stderr


def make_text(num_lines, seed=1):
    """Lines of made-up words with numbers, punctuation, blank lines and letters of more than one byte."""
    r = random.Random(seed)
    words = ["".join(r.choice("abcdeilmnorstuvé") for _ in range(r.randint(1, 9))) for _ in range(500)]
    lines = []
    for _ in range(num_lines):
        line = " ".join(r.choice(words) for _ in range(r.randint(0, 14)))
        lines.append(line + r.choice([".", ",", "", "!  ", " 1234", "'s", " \t", " naïve 東京"]))
    return "\n".join(lines) + "\n"


def read_shard(path):
    header = np.fromfile(path, dtype="<u4", count=256)
    assert header[0] in (20240520, 20240801)
    tokens = np.fromfile(path, dtype="<u2" if header[0] == 20240520 else "<u4", offset=1024)
    u64 = [int(header[at]) | int(header[at + 1]) << 32 for at in (2, 5, 7)]
    assert u64[0] == len(tokens)
    return tokens.tolist(), {"vocab_size": int(header[4]), "bytes": u64[1], "words": u64[2]}


def part_tokens(out, part):
    paths = sorted(p for p in os.listdir(out) if p.startswith(part) and p.endswith(".bin"))
    return [read_shard(os.path.join(out, p)) for p in paths]


# ---------------------------------------------------------------- prepare.py

@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    text = make_text(6000)
    (folder / "book.txt").write_text(text)
    said = run_prepare(folder / "book.txt", "--out", folder / "out", "--vocab-size", 600)
    return text, str(folder / "out"), said


def test_parts(prepared):
    text, out, said = prepared
    meta = json.load(open(os.path.join(out, "meta.json")))
    tokenizer = Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
    (train, train_header), = part_tokens(out, "train")
    (val, val_header), = part_tokens(out, "val")
    end = tokenizer.token_to_id("<|endoftext|>")
    assert train[-1] == end and val[-1] == end
    train_text, val_text = (tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in (train, val))
    assert train_text + val_text == text and train_text.endswith("\n")
    fraction = len(val_text.encode()) / len(text.encode())
    assert 0.05 <= fraction < 0.052
    # The text was tokenized in pieces; the ids are those of the whole.
    assert train[:-1] == tokenizer.encode(train_text).ids and val[:-1] == tokenizer.encode(val_text).ids
    for header, part, part_text in ((train_header, "train", train_text), (val_header, "val", val_text)):
        assert header["bytes"] == meta[part]["bytes"] == len(part_text.encode())
        assert header["words"] == meta[part]["words"] == len(part_text.encode().split())
        assert header["vocab_size"] == meta["vocab_size"] == 600
    if shutil.which("gzip"):
        packed = len(subprocess.run(["gzip", "-9"], input=val_text.encode(), stdout=subprocess.PIPE).stdout)
        assert meta["val"]["gzip9_bits_per_byte"] == round(8 * packed / len(val_text.encode()), 4)
    assert re.search(r"^train +[\d,]+ ", said, re.M) and "bits per byte" in said


def test_tokenizer_sees_training_part_alone(tmp_path):
    (tmp_path / "t.txt").write_text("aa bb\n" * 500 + "zqzqzq\n" * 40)
    run_prepare(tmp_path / "t.txt", "--out", tmp_path / "o", "--vocab-size", 300, "--val-fraction", 0.1)
    vocab = json.load(open(tmp_path / "o" / "tokenizer.json"))["model"]["vocab"]
    assert "aa" in vocab and not any("zq" in word for word in vocab)


def test_read_by_c(prepared, test_data):
    _, out, _ = prepared
    (tokens, _), = part_tokens(out, "train")
    lines = test_data("--stream", out, 0, 64, 600).decode().splitlines()
    assert [int(i) for line in lines for i in line.split()] == tokens[:-1]       # the last one is a target only
    assert len(lines) == -(-(len(tokens) - 1) // 64)


def test_raw_files_read_by_c(tmp_path, test_data):
    np.arange(300, dtype="<u2").tofile(tmp_path / "train.bin")
    lines = test_data("--stream", tmp_path, 1, 100, 300).decode().splitlines()
    assert [int(i) for line in lines for i in line.split()] == list(range(299))


def test_text_where_shards_belong(tmp_path, test_data, capfd):
    """The C reader knows the kinds that prepare.py reads, and says the command that makes shards of them."""
    sources = sys.modules["sources"]
    kinds = [*(set(sources.KINDS) - {".bin"}), *sources.COMPRESSED, ".txt", ".text", ".md", ".bin"]
    (tmp_path / "docs.idx").write_bytes(b"")
    for suffix in kinds:
        path = tmp_path / f"docs{suffix}"
        path.write_bytes(b"text")
        with pytest.raises(subprocess.CalledProcessError):
            test_data("--stream", path, 0, 64, 600)
        assert (f"{path}: is not a token shard; make shards of it with: python3 data/prepare.py {path} --out "
                "data/sets/docs, and train with -d data/sets/docs\n") in capfd.readouterr().err
    with pytest.raises(subprocess.CalledProcessError):
        test_data("--stream", tmp_path, 0, 64, 600)
    assert f"make token shards of what it has with: python3 data/prepare.py {tmp_path} --out" in capfd.readouterr().err


def test_shards(prepared, tmp_path):
    text, out, _ = prepared
    (tmp_path / "book.txt").write_text(text)
    run_prepare(tmp_path / "book.txt", "--out", tmp_path / "o", "--shard-tokens", 40000, "--tokenizer",
                os.path.join(out, "tokenizer.json"))
    whole, header = part_tokens(out, "train")[0]
    shards = part_tokens(tmp_path / "o", "train")
    assert len(shards) > 2 and sum((ids for ids, _ in shards), []) == whole
    for key in ("bytes", "words"):
        assert sum(h[key] for _, h in shards) == header[key]


def test_folder_of_documents(tmp_path):
    (tmp_path / "d").mkdir()
    for i in range(3):
        (tmp_path / "d" / f"{i}.txt").write_text(make_text(100, seed=i))
    run_prepare(tmp_path / "d", "--out", tmp_path / "o", "--vocab-size", 300, "--val-fraction", 0.5)
    (train, _), = part_tokens(tmp_path / "o", "train")
    (val, _), = part_tokens(tmp_path / "o", "val")
    assert train.count(0) == 2 and val.count(0) == 2                            # the second document was cut in two


def test_wikitext_from_a_local_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        for part in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2-raw/wiki.{part}.raw", f" \n = {part} = \n \n It is @-@ {part} . \n" * 50)
    run_prepare("wikitext2", "--source", tmp_path / "w.zip", "--out", tmp_path / "o", "--vocab-size", 300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "o" / "tokenizer.json"))
    for part, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        (ids, header), = part_tokens(tmp_path / "o", part)
        assert tokenizer.decode(ids[:-1]) == f" \n = {name} = \n \n It is @-@ {name} . \n" * 50
        assert header["words"] == 50 * 8


def test_gpt2_files(prepared, tmp_path):
    text, out, _ = prepared
    model = json.load(open(os.path.join(out, "tokenizer.json")))["model"]
    json.dump(model["vocab"], open(tmp_path / "vocab.json", "w"))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    (tmp_path / "book.txt").write_text(text)
    run_prepare(tmp_path / "book.txt", "--gpt2-dir", tmp_path, "--out", tmp_path / "o")
    assert part_tokens(tmp_path / "o", "train") == part_tokens(out, "train")


def test_refusals(tmp_path, prepared):
    _, out, _ = prepared
    book = tmp_path / "book.txt"
    book.write_text(make_text(50))
    shards = part_tokens(out, "train")
    assert "--force" in run_prepare(book, "--out", out, code=1)
    assert part_tokens(out, "train") == shards
    assert "none of the data sets kjv" in run_prepare("nosuch", code=1)
    (tmp_path / "latin.txt").write_bytes(b"abc \xe9t\xe9")
    assert "byte 4 is not UTF-8" in run_prepare(tmp_path / "latin.txt", "--out", tmp_path / "o", code=1)
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "part is empty" in run_prepare(tmp_path / "empty.txt", "--out", tmp_path / "o", code=1)
    assert "at least 257" in run_prepare(book, "--out", tmp_path / "o", "--vocab-size", 256, code=1)
    assert "not a tokenizer.json" in run_prepare(book, "--out", tmp_path / "o", "--tokenizer", book, code=1)
    assert "not a zip" in run_prepare("wikitext2", "--source", book, "--out", tmp_path / "o", code=1)
    assert "vocab.json" in run_prepare(book, "--out", tmp_path / "o", "--gpt2-dir", tmp_path, code=1)
    assert not os.path.exists(tmp_path / "o")
    run_prepare(book, "--gpt2", "--vocab-size", 300, code=2)
    run_prepare(book, "--val-fraction", 1, code=2)


def test_force_replaces_all_shards(tmp_path):
    (tmp_path / "b.txt").write_text(make_text(1500))
    arguments = (tmp_path / "b.txt", "--out", tmp_path / "o", "--vocab-size", 300)
    run_prepare(*arguments, "--shard-tokens", 10000)
    assert len(part_tokens(tmp_path / "o", "train")) > 1
    run_prepare(*arguments, "--force")
    assert len(part_tokens(tmp_path / "o", "train")) == 1


@pytest.mark.skipif(shutil.which("bible") is None, reason="bible-kjv is not installed")
def test_kjv(tmp_path, test_data):
    run_prepare("kjv", "--out", tmp_path)
    meta = json.load(open(tmp_path / "meta.json"))
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == 4137850 and meta["vocab_size"] == 4096
    assert meta["train"]["words"] + meta["val"]["words"] == 789634
    assert 2.5 < meta["val"]["gzip9_bits_per_byte"] < 2.6
    (val, _), = part_tokens(tmp_path, "val")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = tokenizer.decode(val)
    assert text.endswith("The grace of our Lord Jesus Christ be with you all. Amen.\n")
    assert encode_by_c(test_data, tmp_path / "tokenizer.json", [text])[0] == (val[:-1], text.encode())


def test_loaded_by_transformers(prepared):
    transformers = pytest.importorskip("transformers")
    _, out, _ = prepared
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = part_tokens(out, "val")[0][0][1:500]
    assert tokenizer.decode(ids) == Tokenizer.from_file(os.path.join(out, "tokenizer.json")).decode(ids)
    assert tokenizer.eos_token == "<|endoftext|>" and len(tokenizer) == 600


# ---------------------------------------------------------------- the loader's order, from its description

def test_permutation(test_data):
    def mix(x):
        x = (x + np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def permute(n, seed, epoch):
        x = np.arange(n, dtype=np.uint64)
        h = np.uint64(next(h for h in range(1, 33) if 4 ** h >= n))
        key = mix(mix(np.uint64(seed)) + np.uint64(epoch))
        todo = np.ones(n, dtype=bool)
        while todo.any():
            a, b = x[todo] >> h, x[todo] & (np.uint64(1) << h) - np.uint64(1)
            for i in range(8):
                a, b = b, a ^ (mix(key + (np.uint64(i) << np.uint64(56)) + b) >> (np.uint64(64) - h))
            x[todo] = a << h | b
            todo = x >= n
        return x.tolist()

    with np.errstate(over="ignore"):
        for n, seed, epoch in ((1, 0, 0), (2, 1, 0), (16, 42, 1), (1000, 1337, 3), (5000, 2 ** 63 + 5, 7)):
            assert list(map(int, test_data("--permute", n, seed, epoch).split())) == permute(n, seed, epoch)


# ---------------------------------------------------------------- tokenizer.h against the tokenizers library

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
WITHOUT_REGEX = {"add_prefix_space": False, "use_regex": False}
KINDS = {
    "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), {}),
    "prefix_space": (pre_tokenizers.ByteLevel(add_prefix_space=True), {}),
    "llama3": (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                        pre_tokenizers.ByteLevel(**WITHOUT_REGEX)]), {"ignore_merges": True}),
    "qwen2": (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"),
                                       pre_tokenizers.ByteLevel(**WITHOUT_REGEX)]), {}),
    "removed": (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "removed", invert=True),
                                         pre_tokenizers.ByteLevel(**WITHOUT_REGEX)]), {}),
    "both": (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                      pre_tokenizers.ByteLevel(add_prefix_space=True)]), {}),
    "no_regex": (pre_tokenizers.ByteLevel(**WITHOUT_REGEX), {}),
}
ADDED = ["  ", "   ", "hello ", "Lord", "é x", "o\u0308 y", AddedToken("Lord G", normalized=False)]


def encode_by_c(test_data, path, texts):
    """(ids, decoded bytes) of each text."""
    frames = b"".join(len(data).to_bytes(8, "little") + data for data in (text.encode() for text in texts))
    out, at, results = test_data("--encode", path, data=frames), 0, []

    def take(num_bytes):
        nonlocal at
        at += num_bytes
        return out[at - num_bytes:at]

    for _ in texts:
        ids = np.frombuffer(take(4 * int.from_bytes(take(8), "little")), dtype="<i4").tolist()
        results.append((ids, take(int.from_bytes(take(8), "little"))))
    assert at == len(out)
    return results


def random_char(r):
    kind = r.random()
    if kind < 0.35:
        return r.choice("abcdefghijklmnopqrstuvwxyzABCst'lverd")
    if kind < 0.50:
        return r.choice(" \t\n\r\u00a0\u3000\u2028\u0085\x0b\x0c\u180e\u200b\u1680\u2009\u202f\u205f\ufeff\x1c\x1f\0")
    if kind < 0.60:
        return r.choice("0123456789\u0661\u00b2\u2167\u4e00\u00bd")
    if kind < 0.70:
        return r.choice(".,;:!?'\"-()[]{}<|>_/\\\u2019'\u017fK\u212a")
    if kind < 0.75:
        return r.choice("\u0301\u0308\u200d\U0001f600\U0001f1e9")
    while True:                          # any other but surrogates, and letters and marks younger than PCRE2 10.42
        code = r.randrange(0, 0x10000 if kind < 0.9 else 0x3000)
        if not (0xD800 <= code < 0xE000 or 0x1C89 <= code <= 0x1C8A or 0xA7CB <= code <= 0xA7DC or
                code in (0x897, 0xCF3, 0xECE)):
            return chr(code)


@pytest.mark.parametrize("added", [False, True], ids=["plain", "added"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_as_tokenizers(kind, added, tmp_path, test_data):
    pre_tokenizer, options = KINDS[kind]
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(make_text(2000).splitlines(keepends=True), trainer)
    for token in ADDED if added else []:
        tokenizer.add_tokens([token])
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    if not added:                                # merges in the older form, "a b" instead of ["a", "b"]
        file = json.load(open(path))
        file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
        json.dump(file, open(path, "w"))
    r = random.Random(f"{kind} {added}")
    specials = ["<|endoftext|>", "<|pad|>", "  ", "   ", "Lord", "Lord G", "hello ", "é x", "e\u0301 x", "o\u0308 y",
                "ö y", "\u1112\u1161\u11ab", "\u0344"]
    texts = [make_text(20, seed=3), "", " ", "\n"]
    for _ in range(10000 if FULL else 1500):
        length = r.choice([1, 2, 3, 5, 10, 30, 100])
        texts.append("".join(r.choice(specials) if r.random() < 0.05 else random_char(r) for _ in range(length)))
    for text, (ids, decoded) in zip(texts, encode_by_c(test_data, path, texts)):
        want = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == want, repr(text)
        assert decoded.decode() == tokenizer.decode(want, skip_special_tokens=False)


@pytest.mark.parametrize("config,id", [({}, 600), ({"eos_token": {"content": "!"}, "add_prefix_space": True}, 700)])
def test_vocab_and_merges(prepared, tmp_path, test_data, config, id):
    """Read as one tokenizer by the program and by prepare.py, as transformers reads them: with the tokens that the
    files beside them add. Another class than GPT-2's would cut a text in another way."""
    text, out, _ = prepared
    Tokenizer.from_file(os.path.join(out, "tokenizer.json")).model.save(str(tmp_path))
    added = {"content": "<|end|>", "special": True, "normalized": False}
    if config:
        config = {**config, "tokenizer_class": "GPT2TokenizerFast", "added_tokens_decoder": {"700": added}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        (tmp_path / "added_tokens.json").write_text('{"<|end|>": 600}')
    (tmp_path / "book.txt").write_text(make_text(300))
    texts = ["It's the 12th <|endoftext|> of\n\n many  words, naïve 東京", " a <|end|>b"]
    program = [ids for ids, _ in encode_by_c(test_data, tmp_path, texts)]
    assert id in program[1] and 0 in program[0]
    tokenizer = prepare.tokenizer_load(str(tmp_path))
    assert [[600 if i == id else i for i in ids] for ids in program] == [tokenizer.encode(t).ids for t in texts]
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    said = run_prepare(tmp_path / "book.txt", "--tokenizer", tmp_path, "--out", tmp_path / "o", code=1)
    assert "Qwen2Tokenizer" in said


# ---------------------------------------------------------------- safetensors.h against the safetensors library

def test_resave_gives_the_same_bytes(tmp_path, test_data):
    numpy_format = pytest.importorskip("safetensors.numpy")
    r = np.random.default_rng(1)
    tensors = {}
    for dtype in ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
                  "uint64", "bool", "complex64"):
        for name in ("h.10.w", "h.2.w", 'odd "name"\\\n\u00e9\x01'):
            tensors[f"{name}.{dtype}"] = r.integers(0, 2, size=(3, 5)).astype(dtype)
    tensors["scalar"] = np.array(1.5, dtype="float32")
    tensors["empty"] = np.zeros((0, 4), dtype="float32")
    numpy_format.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    test_data("--resave", tmp_path / "a.safetensors", tmp_path / "b.safetensors", 5 * 10 ** 9)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    test_data("--resave", tmp_path / "a.safetensors", tmp_path / "c.safetensors", 100)
    index = json.load(open(tmp_path / "c.safetensors.index.json"))
    for name, file in index["weight_map"].items():
        assert np.array_equal(numpy_format.load_file(tmp_path / file)[name], tensors[name])
    test_data("--resave", tmp_path / "c.safetensors", tmp_path / "d.safetensors", 5 * 10 ** 9)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "d.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_resave_a_transformers_model(tmp_path, test_data, dtype, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=127, n_positions=16,
                                     tie_word_embeddings=tied)
    model = transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "a")
    os.mkdir(tmp_path / "b")
    test_data("--resave", tmp_path / "a", tmp_path / "b" / "model.safetensors", 5 * 10 ** 9)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    os.mkdir(tmp_path / "c")
    test_data("--resave", tmp_path / "a", tmp_path / "c" / "model.safetensors", 2000)
    assert len(os.listdir(tmp_path / "c")) > 3
    config.save_pretrained(tmp_path / "c")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "c", dtype=getattr(torch, dtype))
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters()):
        assert torch.equal(a, b), name
    os.mkdir(tmp_path / "d")                     # files that transformers has split, read by us
    model.save_pretrained(tmp_path / "d", max_shard_size=2000)
    test_data("--resave", tmp_path / "d", tmp_path / "d.safetensors", 5 * 10 ** 9)
    assert (tmp_path / "d.safetensors").read_bytes() == (tmp_path / "a/model.safetensors").read_bytes()
