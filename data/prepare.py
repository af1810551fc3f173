#!/usr/bin/env python3
"""prepare.py: turns text into what train_gpt reads, in one command.

    python3 data/prepare.py kjv                           a data set by name: kjv tinyshakespeare wikitext2 wikitext103
    python3 data/prepare.py book.txt --vocab-size 8192    a UTF-8 text file of your own
    python3 data/prepare.py texts/ --tokenizer tokenizer.json     a folder: each *.txt in it is a document
    python3 data/prepare.py kjv --gpt2                    with GPT-2's vocabulary

It writes into data/sets/NAME, or --out:
    train_000000.bin ...   token shards (format: data/tokens.h), each document led by the end-of-text token
    val_000000.bin         the last 5 % of the text (--val-fraction), from a line's start on, or the set's own part
    tokenizer.json         the tokenizer as Hugging Face reads it, with tokenizer_config.json; trained on the training
                           part alone if none is given
    meta.json              bytes, words, tokens of each part, and gzip -9's bits per byte as a mark to compare with

Needs numpy and tokenizers. The whole text is in memory.
"""
import argparse
import glob
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>")   # in other vocabularies; the first found leads documents
CHUNK_CHARS = 1 << 14                                          # text is tokenized in pieces of about this size
BATCH_CHUNKS = 256
HEADER_INT32S = 256                                            # see data/tokens.h

URLS = {
    "tinyshakespeare": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "wikitext2": "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
    "wikitext103": "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
    "gpt2": "https://huggingface.co/openai-community/gpt2/resolve/main/tokenizer.json",
}


class Refused(Exception):
    """One sentence for the user."""


# ---------------------------------------------------------------- where texts come from
# A source returns {"train": [document, ...], "val": ..., ...}; with "train" alone, the end of it becomes "val".

def decode(data, name):
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"{name}: byte {error.start} is not UTF-8 ({error.reason}); convert the file, for example with "
                      f"iconv -f latin1 -t utf-8") from None


def read_file(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from None


def fetch(name, advice):
    url = URLS[name]
    print(f"fetching {url}", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.read()
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        raise Refused(f"{url} cannot be fetched ({reason}); {advice}") from None


def source_bytes(name, source):
    if source:
        return read_file(source)
    return fetch(name, f"get that file elsewhere and run: python3 data/prepare.py {name} --source FILE")


def kjv(_source):
    """The King James Bible, one verse a line, as Debian's package bible-kjv has it: `bible -f` prints "Ge1:1 In the
    beginning ..."; the references are dropped."""
    program = shutil.which("bible")
    if program is None:
        raise Refused("kjv comes from the program `bible`, which is not installed; run: apt-get install bible-kjv, or "
                      "give a text file of your own")
    printed = subprocess.run([program, "-f", "Gen1:1-Rev22:21"], stdout=subprocess.PIPE, check=True).stdout
    verses = [line.split(" ", 1) for line in decode(printed, program).splitlines()]
    if len(verses) != 31102 or not all(len(verse) == 2 for verse in verses):
        raise Refused(f"{program}: printed {len(verses)} verses, the King James Bible has 31102; reinstall "
                      f"bible-kjv-text")
    return {"train": ["".join(text + "\n" for _, text in verses)]}


def tinyshakespeare(source):
    return {"train": [decode(source_bytes("tinyshakespeare", source), source or "tinyshakespeare")]}


def parquet_text(paths):
    """The column `text` of parquet files, a line a row, as the hub has WikiText."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise Refused(f"{paths[0]}: parquet is read by the Python package pyarrow, which is not installed; run: "
                      f".venv/bin/pip install pyarrow") from None
    try:
        return "".join(row or "" for path in paths
                       for row in pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise Refused(f"{paths[0]}: is not parquet with a column \"text\": {str(error).splitlines()[0]}") from None


def wikitext_folder(source):
    """wiki.train.raw (or .tokens) beside wiki.valid.* and wiki.test.*; or train-*.parquet, validation-*, test-*."""
    parts = {}
    for part, stem, hub_stem in (("train", "wiki.train", "train"), ("val", "wiki.valid", "validation"),
                                 ("test", "wiki.test", "test")):
        raw = sorted(glob.glob(os.path.join(source, stem + ".*")))
        parquet = sorted(glob.glob(os.path.join(source, hub_stem + "*.parquet")))
        if not raw and not parquet:
            raise Refused(f"{source}: has neither {stem}.raw nor {hub_stem}-*.parquet")
        parts[part] = [decode(read_file(raw[0]), raw[0]) if raw else parquet_text(parquet)]
    return parts


def wikitext(name, source):
    if source and os.path.isdir(source):
        return wikitext_folder(source)
    data = source_bytes(name, source)
    parts = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for part, stem in (("train", "wiki.train"), ("val", "wiki.valid"), ("test", "wiki.test")):
                member = next((m for m in archive.namelist() if os.path.basename(m).startswith(stem)), None)
                if member is None:
                    raise Refused(f"{source or URLS[name]}: has no {stem}.raw; it must be {URLS[name]}")
                parts[part] = [decode(archive.read(member), member)]
    except zipfile.BadZipFile:
        raise Refused(f"{source or URLS[name]}: is not a zip archive; it must hold wiki.train.raw, wiki.valid.raw and "
                      f"wiki.test.raw") from None
    return parts


SETS = {
    "kjv": kjv,
    "tinyshakespeare": tinyshakespeare,
    "wikitext2": lambda source: wikitext("wikitext2", source),
    "wikitext103": lambda source: wikitext("wikitext103", source),
}


def read_source(what, source):
    """The parts of what the user named, and a short name for them."""
    if what in SETS and not (os.path.isfile(what) or os.path.isdir(what)):
        return SETS[what](source), what
    if source:
        raise Refused(f"--source goes with a data set by name ({', '.join(SETS)}), not with {what}")
    stem = os.path.splitext(os.path.basename(os.path.normpath(what)))[0]
    if os.path.isdir(what):
        paths = sorted(glob.glob(os.path.join(what, "*.txt")))
        if not paths:
            raise Refused(f"{what}: the folder has no *.txt; name a folder with text files")
        return {"train": [decode(read_file(path), path) for path in paths]}, stem
    if not os.path.exists(what):
        raise Refused(f"{what}: is no file, no folder and none of the data sets {', '.join(SETS)}")
    return {"train": [decode(read_file(what), what)]}, stem


def split_off_val(documents, fraction):
    """The last `fraction` of the bytes, from a line's start on: (training documents, validation documents)."""
    sizes = [len(text.encode()) for text in documents]
    keep = int(sum(sizes) * (1 - fraction))                    # bytes that stay
    for i, size in enumerate(sizes):
        if keep < size:
            break
        keep -= size
    else:
        return documents, []
    data = documents[i].encode()
    cut = data.rfind(b"\n", 0, keep) + 1 or data.rfind(b" ", 0, keep) + 1
    head, tail = data[:cut].decode(), data[cut:].decode()
    return documents[:i] + [head] * bool(head), [tail] * bool(tail) + documents[i + 1:]


# ---------------------------------------------------------------- tokenizing

def chunks(text):
    """Cuts where every pattern in use cuts too, so that the pieces give the ids of the whole: before a single space, or
    after a single newline, between characters that are not white space."""
    border = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
    begin = 0
    while len(text) - begin > CHUNK_CHARS:
        found = border.search(text, begin + CHUNK_CHARS)
        if found is None:
            break
        yield text[begin:found.start()]
        begin = found.start()
    yield text[begin:]


def train_tokenizer(documents, vocab_size):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    if vocab_size < 257:
        raise Refused(f"--vocab-size is {vocab_size}, at least 257 are needed: 256 bytes and {END_OF_TEXT}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((chunk for text in documents for chunk in chunks(text)), trainer)
    return tokenizer


def load_tokenizer(path):
    from tokenizers import Tokenizer
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    text = decode(read_file(path), path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:                                 # the library raises bare Exception
        raise Refused(f"{path}: is not a tokenizer.json: {error}") from None


def load_gpt2(folder):
    """GPT-2's tokenizer from tokenizer.json, or vocab.json and merges.txt, in the folder; else from the hub."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    for candidate in [folder] if folder else ["gpt2", os.path.join("data", "gpt2")]:
        if os.path.isfile(os.path.join(candidate, "tokenizer.json")):
            return load_tokenizer(candidate)
        vocab, merges = (os.path.join(candidate, name) for name in ("vocab.json", "merges.txt"))
        if os.path.isfile(vocab) and os.path.isfile(merges):
            tokenizer = Tokenizer(models.BPE.from_file(vocab, merges))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
            tokenizer.add_special_tokens([END_OF_TEXT])
            return tokenizer
    if folder:
        raise Refused(f"{folder}: has neither tokenizer.json nor vocab.json and merges.txt")
    data = fetch("gpt2", "put that file into the folder gpt2/, or say where it is with --gpt2-dir")
    return Tokenizer.from_str(decode(data, URLS["gpt2"]))


def vocab_size_of(tokenizer):
    return max(tokenizer.get_vocab().values()) + 1             # a vocabulary may have gaps


def cuts_at_spaces(tokenizer):
    """May the text be tokenized in pieces? Not if all of it is one word, or if each piece gets a space in front."""
    spec = json.loads(tokenizer.to_str())
    top = spec.get("pre_tokenizer") or {}
    steps = top.get("pretokenizers", [top])
    prefixed = any(step.get("add_prefix_space") for step in steps)
    cut = any(step.get("type") == "Split" or step.get("use_regex") for step in steps)
    return cut and not prefixed and not spec.get("normalizer")


def encoded(tokenizer, documents, end_of_text):
    """(ids, bytes, words) of piece after piece, in order. The end-of-text token belongs to no text."""
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    pieces = cuts_at_spaces(tokenizer)
    for text in documents:
        if end_of_text is not None:
            yield [end_of_text], 0, 0
        batch = []
        for chunk in chunks(text) if pieces else [text]:
            batch.append(chunk)
            if len(batch) == BATCH_CHUNKS:
                yield from encoded_batch(encode, batch)
                batch = []
        yield from encoded_batch(encode, batch)


def encoded_batch(encode, batch):
    for chunk, encoding in zip(batch, encode(batch, add_special_tokens=False)):
        data = chunk.encode()
        yield encoding.ids, len(data), len(data.split())


# ---------------------------------------------------------------- writing

def write_shard(path, ids, vocab_size, num_bytes, num_words):
    import numpy as np
    small = vocab_size <= 65536
    header = np.zeros(HEADER_INT32S, dtype="<u4")
    header[0] = 20240520 if small else 20240801
    header[1] = 1 if small else 7
    header[4] = vocab_size
    for at, count in ((2, len(ids)), (5, num_bytes), (7, num_words)):
        header[at], header[at + 1] = count & 0xFFFFFFFF, count >> 32
    with open(path + ".part", "wb") as file:                   # a shard appears whole or not at all
        file.write(header.tobytes())
        file.write(ids.astype("<u2" if small else "<u4").tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def write_part(out, part, tokenizer, documents, shard_tokens):
    """Shards of one part, closed at the first piece that takes them past shard_tokens. Returns their totals."""
    import numpy as np
    vocab_size = vocab_size_of(tokenizer)
    end_of_text = next((i for i in map(tokenizer.token_to_id, END_OF_TEXT_NAMES) if i is not None), None)
    total = {"bytes": 0, "words": 0, "tokens": 0, "shards": 0}
    arrays, sums = [], [0, 0, 0]                               # of the open shard: tokens, bytes, words

    def close_shard():
        path = os.path.join(out, f"{part}_{total['shards']:06d}.bin")
        write_shard(path, np.concatenate(arrays), vocab_size, *sums[1:])
        for key, count in zip(("tokens", "bytes", "words"), sums):
            total[key] += count
        total["shards"] += 1
        arrays.clear()
        sums[:] = 0, 0, 0

    for ids, num_bytes, num_words in encoded(tokenizer, documents, end_of_text):
        arrays.append(np.array(ids, dtype=np.uint32))
        sums[:] = sums[0] + len(ids), sums[1] + num_bytes, sums[2] + num_words
        if sums[0] >= shard_tokens:
            close_shard()
    if sums[0] > 0:
        close_shard()
    return total


def gzip_bits_per_byte(documents):
    """What `gzip -9` alone makes of the text; Python's zlib, a little different, where there is no gzip."""
    data = "".join(documents).encode()
    program = shutil.which("gzip")
    if program:
        packed = subprocess.run([program, "-9", "-n", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout
    else:
        packed = gzip.compress(data, 9, mtime=0)
    return round(8 * len(packed) / max(1, len(data)), 4)


def write_tokenizer(out, tokenizer):
    tokenizer.save(os.path.join(out, "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    name = next((n for n in END_OF_TEXT_NAMES if tokenizer.token_to_id(n) is not None), None)
    if name:
        config.update(bos_token=name, eos_token=name, unk_token=name)
    with open(os.path.join(out, "tokenizer_config.json"), "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def old_shards(out):
    return [path for part in ("train", "val", "test") for path in glob.glob(os.path.join(out, f"{part}_*.bin"))]


def make_room(out):
    """Called when nothing can be refused any more but by the disk."""
    try:
        os.makedirs(out, exist_ok=True)
        for path in old_shards(out):
            os.remove(path)
    except OSError as error:
        raise Refused(f"{out}: cannot be written to: {error.strerror}") from None


# ---------------------------------------------------------------- the command

def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description="Turns text into token shards for train_gpt.",
                                     epilog=f"Data sets by name: {', '.join(SETS)}.")
    parser.add_argument("what", metavar="NAME|FILE|DIR", help="a data set by name, a text file, or a folder of *.txt")
    parser.add_argument("--out", help="folder to write to (data/sets/NAME)")
    parser.add_argument("--vocab-size", type=int, help="tokens of the tokenizer that is trained (4096)")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of training one")
    parser.add_argument("--gpt2", action="store_true", help="use GPT-2's vocabulary of 50257 tokens")
    parser.add_argument("--gpt2-dir", metavar="DIR", help="where its tokenizer.json, or vocab.json and merges.txt, are")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="share of the text kept for validation (0.05)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens to a shard, about (100 million)")
    parser.add_argument("--source", metavar="FILE", help="a local copy of what a data set is fetched from; WikiText: "
                        "also a folder of wiki.*.raw or of the hub's parquet files")
    parser.add_argument("--force", action="store_true", help="replace the shards that are there")
    args = parser.parse_args(arguments)
    args.gpt2 = args.gpt2 or args.gpt2_dir is not None
    if (args.vocab_size is not None) + (args.tokenizer is not None) + args.gpt2 > 1:
        parser.error("--vocab-size, --tokenizer and --gpt2 exclude one another: choose one")
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val-fraction is {args.val_fraction}, must be between 0 and 1")
    if args.shard_tokens < 1:
        parser.error(f"--shard-tokens is {args.shard_tokens}, must be at least 1")
    return args


def prepare(args):
    begun = time.time()
    parts, name = read_source(args.what, args.source)
    out = args.out or os.path.join("data", "sets", name)
    if old_shards(out) and not args.force:
        raise Refused(f"{out}: already has {len(old_shards(out))} shards; choose another --out, or replace them with "
                      f"--force")
    if "val" not in parts:
        parts["train"], parts["val"] = split_off_val(parts["train"], args.val_fraction)
    for part, documents in parts.items():
        if not any(documents):
            raise Refused(f"{args.what}: its {part} part is empty; give more text"
                          + (", or another --val-fraction" if part in ("train", "val") else ""))
    if args.gpt2:
        tokenizer, kind = load_gpt2(args.gpt2_dir), "gpt2"
    elif args.tokenizer:
        tokenizer, kind = load_tokenizer(args.tokenizer), args.tokenizer
    else:
        tokenizer, kind = train_tokenizer(parts["train"], args.vocab_size or 4096), "trained on the training part"
    make_room(out)
    write_tokenizer(out, tokenizer)
    meta = {"name": name, "tokenizer": kind, "vocab_size": vocab_size_of(tokenizer)}
    for part, documents in parts.items():
        meta[part] = write_part(out, part, tokenizer, documents, args.shard_tokens)
    meta["val"]["gzip9_bits_per_byte"] = gzip_bits_per_byte(parts["val"])
    with open(os.path.join(out, "meta.json"), "w") as file:
        json.dump(meta, file, indent=2)
        file.write("\n")
    print_summary(out, meta, list(parts), time.time() - begun)


def print_summary(out, meta, parts, seconds):
    print(f"{'part':<6}{'bytes':>14}{'words':>13}{'tokens':>13}{'bytes/token':>13}{'shards':>8}")
    for part in parts:
        p = meta[part]
        print(f"{part:<6}{p['bytes']:>14,}{p['words']:>13,}{p['tokens']:>13,}{p['bytes'] / p['tokens']:>13.2f}"
              f"{p['shards']:>8}")
    print(f"vocabulary {meta['vocab_size']} ({meta['tokenizer']}); gzip -9 packs the val part to "
          f"{meta['val']['gzip9_bits_per_byte']:.2f} bits per byte")
    print(f"written to {out} in {seconds:.1f} s")


def main(arguments=None):
    args = parse_arguments(arguments)
    try:
        import numpy          # noqa: F401
        import tokenizers     # noqa: F401
    except ImportError as error:
        print(f"prepare.py: the Python package {error.name} is missing; run: pip install numpy tokenizers",
              file=sys.stderr)
        return 1
    try:
        prepare(args)
    except Refused as refused:
        print(f"prepare.py: {refused}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"prepare.py: {error.filename or args.out}: writing failed: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
