#!/usr/bin/env python3
"""prepare.py: turns text into what train_gpt reads, in one command.

    python3 data/prepare.py kjv                           a data set by name: kjv tinyshakespeare wikitext2 wikitext103
    python3 data/prepare.py book.txt --vocab-size 8192    a UTF-8 text file of your own
    python3 data/prepare.py texts/ --tokenizer llama3/    a folder, nested or not: each text file in it is a document
    python3 data/prepare.py web.jsonl.zst --gpt2          a JSON object a line; its field "text" is a document
    python3 data/prepare.py qa.csv --field answer         a column of .csv, .tsv or .parquet; --field goes with JSON too
    python3 data/prepare.py saved/                        a folder that datasets.save_to_disk wrote
    python3 data/prepare.py set_text_document.bin         Megatron's .bin and .idx: token ids already
    ./train_gpt -d data/sets/web -m d4 -n 100             trains on it

It writes into data/sets/NAME, or --out:
    train_000000.bin ...   token shards (format: data/tokens.h)
    val_000000.bin         the last 5 % of the text (--val-fraction), or the input's own part: of a text from a line's
                           start on, of records whole documents
    tokenizer.json         the tokenizer as Hugging Face reads it, with tokenizer_config.json; trained on the training
                           part alone if none is given
    meta.json              the data card: bytes, words, tokens and documents of each part, the ids before and after each
                           document, and gzip -9's bits per byte as a mark to compare with

Before each document comes what the tokenizer's post-processor puts there (Llama-3: <|begin_of_text|>; GPT-2, Qwen2 and
those trained here: nothing), after it the base model's end-of-text token (<|end_of_text|>, <|endoftext|>).

Text is read as a stream, in less than 1 GB of memory, and tokenized by --workers processes; the shards do not depend on
their number. The input is read once before, to check it and to find the last 5 %. Until all is written, every file is
called NAME.tmp. After a kill the same command goes on where it was. Needs numpy and tokenizers; .zst needs zstandard,
parquet, arrow and folders of `datasets` need pyarrow.
"""
import argparse
import collections
import concurrent.futures
import fcntl
import glob
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures.process import BrokenProcessPool

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from named_sets import SETS, URLS, fetch, named_parts          # noqa: E402
from sources import CUT, PIECE_CHARS, Refused, decode, documents_of, pieces_of, sources_of, strings  # noqa: E402,F401
from vocabulary import (cutting, marks, tokenizer_config, tokenizer_load, tokenizer_of, tokenizer_train,  # noqa: E402
                        vocab_size_of)

HEADER_INT32S = 256                      # see data/tokens.h
BLOCK_BYTES = 1 << 19                    # what one worker gets at a time
INLINE_BYTES = 1 << 23                   # smaller inputs are not worth processes
TRAIN_BYTES = 1 << 27                    # a tokenizer is trained on a sample of this size of what is larger
CHECKPOINT_SECONDS = 10
PROGRESS = "prepare.progress"            # there while a preparation is unfinished; what it knows, as JSON
PROGRESS_VERSION = 1


# ---------------------------------------------------------------- workers

class Work:
    """What workers know; they are forked, so that one copy of a vocabulary serves all."""
    tokenizer = encode = None
    cut, drops = CUT, False
    before, after = [], []
    vocab_size = 0                       # 0: not known
    small = True                         # uint16
    lock = None                          # of the output folder: only the parent holds it


def worker_begin(parent):
    signal.signal(signal.SIGINT, signal.SIG_IGN)               # Ctrl-C goes to all; the parent says what became of it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if Work.lock is not None:
        os.close(Work.lock)

    def leave_with_parent():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def ordered(function, blocks, workers):
    """(position, function(block)) of each (position, block), in order; few blocks are under way at a time."""
    if workers <= 1:
        yield from ((position, function(block)) for position, block in blocks)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"             # before the fork, of which the library warns otherwise
    waiting = collections.deque()
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), worker_begin,
                                                (os.getpid(),)) as pool:
        try:
            for position, block in blocks:
                waiting.append((position, pool.submit(function, block)))
                if len(waiting) > 2 * workers:
                    position, future = waiting.popleft()
                    yield position, future.result()
            while waiting:
                position, future = waiting.popleft()
                yield position, future.result()
        except BrokenProcessPool:
            raise Refused("a worker process was ended from outside, perhaps for want of memory; run the same command "
                          "again, with fewer --workers: it goes on where it was") from None
        finally:
            for _, future in waiting:
                future.cancel()


def blocks_of(sources, ranges, begin=(0, 0)):
    """((file, units of it that are done), [(file, unit), ...]) after another: units of about BLOCK_BYTES together."""
    block, size_bytes = [], 0
    for file, (source_idx, first, end) in enumerate(ranges):
        if file < begin[0]:
            continue
        for done, unit in enumerate(sources[source_idx].units(first, end, Work.cut), 1):
            if file == begin[0] and done <= begin[1]:
                continue
            block.append((file, unit))
            size_bytes += unit.size_bytes()
            if size_bytes >= BLOCK_BYTES:
                yield (file, done), block
                block, size_bytes = [], 0
    if block:
        yield (len(ranges), 0), block


def sizes_of_block(block):
    """[(file, bytes of text or number of ids, largest id), ...]"""
    sizes = []
    for file, unit in block:
        documents = documents_of(unit)
        if unit.kind == "ids":
            ids = [document for _, document in documents if len(document)]
            largest = max((int(document.max()) for document in ids), default=0)
            if Work.vocab_size and largest >= Work.vocab_size:
                raise Refused(f"{unit.name}: document {unit.at} or one soon after it has the id {largest}, the "
                              f"tokenizer's vocabulary has {Work.vocab_size}; give the tokenizer that made the ids")
            sizes.append((file, sum(map(len, ids)), largest))
        else:
            sizes.append((file, sum(len(text.encode()) for _, text in documents), 0))
    return sizes


def encode_block(block):
    """(ids as bytes, [(ids, bytes, words, begins a document) of each piece], the text)"""
    import numpy as np
    found = [piece for _, unit in block for piece in pieces_of(unit, Work.cut)]
    if found and not isinstance(found[0][0], str):
        texts, ids = [""] * len(found), [without_marks(piece[0]) for piece in found]
    else:
        texts = [text for text, _, _ in found]
        inputs = [text[1:] if Work.drops and not first else text for text, first, _ in found]
        ids = [encoding.ids for encoding in Work.encode(inputs, add_special_tokens=False)]
    arrays, counts = [], []
    for text, (_, first, last), body in zip(texts, found, ids):
        body = np.concatenate([np.array(part, "<u2" if Work.small else "<u4")
                               for part in (Work.before * first, body, Work.after * last)])
        data = text.encode()
        arrays.append(body)
        counts.append((len(body), len(data), len(data.split()), first))
    return b"".join(array.tobytes() for array in arrays), counts, "".join(texts)


def without_marks(ids):
    """A document of Megatron's without the marks it may have: they are laid as for text."""
    for mark in (Work.before, Work.after, Work.before):        # as some writers lay them: before it, after it, both
        if mark and ids[:len(mark)].tolist() == mark:
            ids = ids[len(mark):]
        if mark and ids[-len(mark):].tolist() == mark:
            ids = ids[:-len(mark)]
    return ids


# ---------------------------------------------------------------- how large, and where the validation part begins

def measure(sources, workers):
    """(bytes or ids of each source, largest id). Every file is read once: what is wrong in it is said now."""
    sizes, largest = [0] * len(sources), 0
    if sources[0].kind == "text":
        for i, source in enumerate(sources):
            sizes[i] = sum(len(text.encode()) for text in source.strings())
        return sizes, 0
    for _, found in ordered(sizes_of_block, blocks_of(sources, [(i, 0, None) for i in range(len(sources))]), workers):
        for file, size, most in found:
            sizes[file] += size
            largest = max(largest, most)
    return sizes, largest


def split_off_val(sources, sizes, fraction):
    """(ranges of the training part, of the validation part): the last `fraction` of the bytes, of a text from a line's
    start on, of records whole documents. A range is (source, begin, end)."""
    keep = int(sum(sizes) * (1 - fraction))                    # bytes that stay
    for i, size in enumerate(sizes):
        if keep < size:
            break
        keep -= size
    else:
        return [(i, 0, None) for i in range(len(sizes))], []
    cut = text_cut(sources[i], keep) if sources[i].kind == "text" else document_cut(sources[i], keep)
    before, after = [(k, 0, None) for k in range(i)], [(k, 0, None) for k in range(i + 1, len(sizes))]
    return before + [(i, 0, cut)] * (cut > 0), [(i, cut, None)] + after


def text_cut(source, keep):
    """After the last line end in the first `keep` bytes; after the last space if there is none."""
    at, line, space = 0, 0, 0
    for text in source.strings():
        data = text.encode()[:keep - at]
        line = at + data.rfind(b"\n") + 1 if b"\n" in data else line
        space = at + data.rfind(b" ") + 1 if b" " in data else space
        at += len(data)
        if at == keep:
            break
    return line or space


def document_cut(source, keep):
    """The document that goes past `keep` bytes."""
    for unit in source.units():
        for position, document in documents_of(unit):
            keep -= len(document.encode() if isinstance(document, str) else document)
            if keep < 0:
                return position
    return 0


def training_texts(sources, ranges, total_bytes):
    """The pieces that the tokenizer is trained on: of a large input every so-manieth unit."""
    stride = 1 if sources[0].content else -(-total_bytes // TRAIN_BYTES)
    number = 0
    for source_idx, begin, end in ranges:
        for unit in sources[source_idx].units(begin, end):
            if number % stride == 0:
                yield from (text for text, _, _ in pieces_of(unit))
            number += 1


# ---------------------------------------------------------------- writing

def sync_folder(folder):
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path, data):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path, value):
    write_synced(path + ".tmp", (json.dumps(value, indent=2) + "\n").encode())


def shard_header(num_toks, num_bytes, num_words):
    import numpy as np
    header = np.zeros(HEADER_INT32S, dtype="<u4")
    header[0] = 20240520 if Work.small else 20240801
    header[1] = 1 if Work.small else 7
    header[4] = Work.vocab_size
    for at, count in ((2, num_toks), (5, num_bytes), (7, num_words)):
        header[at], header[at + 1] = count & 0xFFFFFFFF, count >> 32
    return header.tobytes()


class Progress:
    """What is known of a preparation, in OUT/prepare.progress, so that it can go on after a kill.
    state: key (arguments and input), plan (ranges and sizes of the parts), parts (of each: the shards that are closed,
    the open one), position (part, file, units), meta; `names` when only the renames are left."""

    def __init__(self, out, state):
        self.out, self.state = out, state

    def save(self):
        path = os.path.join(self.out, PROGRESS)
        write_json(path, self.state)
        os.replace(path + ".tmp", path)
        sync_folder(self.out)


class ShardWriter:
    """The shards of one part. Each is closed at the first piece that takes it past shard_tokens."""

    def __init__(self, out, part, state, shard_tokens):
        self.out, self.part, self.state, self.shard_tokens = out, part, state, shard_tokens
        self.token_bytes = 2 if Work.small else 4
        self.file = None
        for path in glob.glob(os.path.join(out, f"{part}_*.bin.tmp")):
            if path not in map(self.path, range(len(state["closed"]) + 1)):
                os.remove(path)

    def path(self, number):
        return os.path.join(self.out, f"{self.part}_{number:06d}.bin.tmp")

    def open(self):
        path, size_bytes = self.path(len(self.state["closed"])), 4 * HEADER_INT32S
        self.file = open(path, "r+b" if os.path.exists(path) else "w+b")
        self.file.truncate(size_bytes + self.token_bytes * self.state["open"][0])
        self.file.seek(0, os.SEEK_END)

    def put(self, data, counts):
        at = 0
        for tokens, num_bytes, words, begins in counts:
            if self.file is None:
                self.open()
            end = at + tokens * self.token_bytes
            self.file.write(data[at:end])
            at = end
            self.state["open"] = [a + b for a, b in zip(self.state["open"], (tokens, num_bytes, words))]
            self.state["documents"] += begins
            if self.state["open"][0] >= self.shard_tokens:
                self.close()

    def close(self):
        if self.file is None and self.state["open"][0] > 0:
            self.open()
        if self.file is not None:
            self.file.seek(0)
            self.file.write(shard_header(*self.state["open"]))
            self.sync()
            self.file.close()
            self.file = None
            self.state["closed"].append(self.state["open"])
            self.state["open"] = [0, 0, 0]

    def sync(self):
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def total(self):
        sums = [sum(column) for column in zip(*self.state["closed"])]
        return {"bytes": sums[1], "words": sums[2], "tokens": sums[0], "documents": self.state["documents"],
                "shards": len(self.state["closed"])}


class Gzip:
    """How small `gzip -9` makes a text; Python's zlib, a little different, where there is no gzip."""

    def __init__(self):
        self.size_bytes, self.packed_bytes = 0, 0
        self.zlib = None if shutil.which("gzip") else zlib.compressobj(9, zlib.DEFLATED, 31)
        if self.zlib is None:
            self.process = subprocess.Popen("gzip -9 -n -c | wc -c", shell=True, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE)

    def put(self, data):
        self.size_bytes += len(data)
        if self.zlib is None:
            self.process.stdin.write(data)
        else:
            self.packed_bytes += len(self.zlib.compress(data))

    def bits_per_byte(self):
        if self.zlib is None:
            self.packed_bytes = int(self.process.communicate()[0])
        else:
            self.packed_bytes += len(self.zlib.flush())
        return round(8 * self.packed_bytes / max(1, self.size_bytes), 4)


class Meter:
    """How far it is, on standard output: a line that is rewritten on a terminal, one every 30 s elsewhere."""

    def __init__(self, total_bytes, unit):
        self.total_bytes, self.unit, self.done, self.here = total_bytes, unit, 0, 0
        self.begun = self.said = time.time()
        self.tty = sys.stdout.isatty()

    def put(self, size_bytes):
        self.done, self.here = self.done + size_bytes, self.here + size_bytes
        now = time.time()
        if now - self.said < (0.5 if self.tty else 30):
            return
        self.said = now
        rate = self.here / (now - self.begun)
        left = max(0, self.total_bytes - self.done) / rate if rate > 0 else 0
        done, total, rate = (f"{count / 1e6:,.1f}" for count in (self.done, self.total_bytes, rate))
        line = (f"{100 * self.done / max(1, self.total_bytes):5.1f} %  {done} of {total} M{self.unit}  "
                f"{rate} M{self.unit}/s  {left / 60:.0f} min left")
        print(f"\r{line:<78}" if self.tty else line, end="" if self.tty else "\n", flush=True)

    def end(self):
        if self.tty:
            print("\r" + " " * 78 + "\r", end="", flush=True)


def write_part(progress, part, sources, ranges, args, meter):
    """The shards of one part, from where the state says on; the validation part from its start, since gzip sees it."""
    state = progress.state
    text = sources[0].kind != "megatron"
    packed = Gzip() if part == "val" and text else None
    if packed:
        state["position"], state["parts"][part] = [part, 0, 0], empty_part()
    writer = ShardWriter(progress.out, part, state["parts"][part], args.shard_tokens)
    saved = time.time()
    begin = tuple(state["position"][1:])
    meter.done += writer.state["open"][1] + sum(shard[1] for shard in writer.state["closed"])
    for position, (data, counts, texts) in ordered(encode_block, blocks_of(sources, ranges, begin), args.processes):
        writer.put(data, counts)
        if packed:
            packed.put(texts.encode())
        meter.put(sum(count[1 if text else 0] for count in counts))
        if time.time() - saved >= CHECKPOINT_SECONDS:
            writer.sync()
            state["position"] = [part, *position]
            progress.save()
            saved = time.time()
    writer.close()
    state["meta"][part] = writer.total()
    if packed:
        state["meta"][part]["gzip9_bits_per_byte"] = packed.bits_per_byte()


def empty_part():
    return {"closed": [], "open": [0, 0, 0], "documents": 0}


def old_shards(out):
    return [path for part in ("train", "val", "test") for path in glob.glob(os.path.join(out, f"{part}_*.bin"))]


def give_names(progress):
    """The last step: every file gets its name, meta.json last. It can be killed and done again at any moment."""
    out, names = progress.out, progress.state["names"]
    for path in old_shards(out):
        if os.path.basename(path) not in names:
            os.remove(path)
    for name in names:
        if os.path.exists(os.path.join(out, name + ".tmp")):
            os.replace(os.path.join(out, name + ".tmp"), os.path.join(out, name))
    sync_folder(out)
    os.remove(os.path.join(out, PROGRESS))


# ---------------------------------------------------------------- the command

def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", metavar="NAME|FILE|DIR",
                        help=f"a data set by name ({', '.join(SETS)}), a file or a folder")
    parser.add_argument("--out", metavar="DIR", help="folder to write to (data/sets/NAME)")
    parser.add_argument("--field", metavar="NAME", default="text", help="the field or column with the text, in JSON, "
                        "CSV, parquet and arrow (text)")
    parser.add_argument("--suffix", metavar=".A,.B", help="of a folder only files that end so, comma-separated; what "
                        "has an unknown suffix is read as text")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="tokens of the tokenizer that is trained (4096)")
    parser.add_argument("--tokenizer", metavar="FILE|DIR", help="a tokenizer.json, or a model's folder, to use instead")
    parser.add_argument("--gpt2", action="store_true", help="use GPT-2's vocabulary of 50257 tokens")
    parser.add_argument("--gpt2-dir", metavar="DIR", help="where its tokenizer.json, or vocab.json and merges.txt, are")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="the token between documents, instead of the base "
                        "model's that is found by name (<|endoftext|>, <|end_of_text|>, </s> ...)")
    parser.add_argument("--val-fraction", type=float, default=0.05, metavar="F",
                        help="share of the text kept for validation (0.05)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                        help="tokens to a shard, about (100 million)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (one for each core)")
    parser.add_argument("--source", metavar="FILE", help="a local copy of what a data set is fetched from; WikiText: "
                        "also a folder of wiki.*.raw or of the hub's parquet files")
    parser.add_argument("--force", action="store_true", help="replace the shards that are there, or an unfinished "
                        "preparation with other arguments")
    args = parser.parse_args(arguments)
    args.gpt2 = args.gpt2 or args.gpt2_dir is not None
    if (args.vocab_size is not None) + (args.tokenizer is not None) + args.gpt2 > 1:
        parser.error("--vocab-size, --tokenizer and --gpt2 exclude one another: choose one")
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val-fraction is {args.val_fraction}, must be between 0 and 1")
    if args.shard_tokens < 1:
        parser.error(f"--shard-tokens is {args.shard_tokens}, must be at least 1")
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers is {args.workers}, must be at least 1")
    args.suffixes = [s.strip().lower() for s in args.suffix.split(",")] if args.suffix else []
    if not all(re.fullmatch(r"\.\S+", s) for s in args.suffixes):
        parser.error(f"--suffix is {args.suffix}, must be suffixes with their dots, for example .txt,.md")
    return args


def read_source(args):
    """The parts of what the user named, and a short name for them."""
    what = args.what
    if what in SETS and not (os.path.isfile(what) or os.path.isdir(what)):
        return named_parts(what, args.source), what
    if args.source:
        raise Refused(f"--source goes with a data set by name ({', '.join(SETS)}), not with {what}")
    if not os.path.exists(what):
        raise Refused(f"{what}: is no file, no folder and none of the data sets {', '.join(SETS)}")
    stem, suffix = os.path.splitext(os.path.basename(os.path.normpath(what)))
    return sources_of(what, args.field, args.suffixes), os.path.splitext(stem)[0] if suffix in (".gz", ".zst") else stem


def given_tokenizer(args):
    """(the tokenizer that the arguments name, what meta.json calls it, where it is); None: it is to be trained."""
    if args.gpt2:
        places = [args.gpt2_dir] if args.gpt2_dir else ["gpt2", os.path.join("data", "gpt2")]
        found = next((p for p in places if args.gpt2_dir or os.path.isfile(os.path.join(p, "tokenizer.json"))
                      or os.path.isfile(os.path.join(p, "vocab.json"))), None)
        if found:
            return tokenizer_load(found), "gpt2", found
        data = fetch("gpt2", "put that file into the folder gpt2/, or say where it is with --gpt2-dir")
        return tokenizer_of(decode([data], URLS["gpt2"]), URLS["gpt2"]), "gpt2", None
    if args.tokenizer:
        return tokenizer_load(args.tokenizer), args.tokenizer, args.tokenizer
    if args.vocab_size is not None and args.vocab_size < 257:
        raise Refused(f"--vocab-size is {args.vocab_size}, at least 257 are needed: 256 bytes and <|endoftext|>")
    return None, "trained on the training part", None


def use_tokenizer(tokenizer, path, end_of_text):
    Work.tokenizer = tokenizer
    Work.encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    Work.vocab_size = vocab_size_of(tokenizer)
    Work.small = Work.vocab_size <= 65536
    Work.cut, Work.drops = cutting(tokenizer)
    Work.before, Work.after = marks(tokenizer, path, end_of_text)


def state_key(args, sources, tokenizer):
    """What must be the same for an unfinished preparation to go on: by name, so that the difference can be said."""
    import tokenizers
    text = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16] if tokenizer else f"{args.vocab_size or 4096}"
    files = hashlib.sha256(json.dumps([source.fingerprint() for source in sources]).encode()).hexdigest()[:16]
    return {"input": args.what, "content of the input": files, "--field": args.field, "tokenizer": text,
            "--end-of-text": args.end_of_text, "--val-fraction": args.val_fraction, "--shard-tokens": args.shard_tokens,
            "tokenizers": tokenizers.__version__, "version": PROGRESS_VERSION}


def unfinished(out, key, force):
    """The state of an unfinished preparation with this key; None if there is none."""
    try:
        with open(os.path.join(out, PROGRESS), "rb") as file:
            state = json.loads(file.read())
        differs = [name for name in key if state["key"].get(name) != key[name]]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        differs = ["its own file of progress, which is damaged"]
    if not differs:
        return state
    if not force:
        raise Refused(f"{out}: has an unfinished preparation that differs in: {', '.join(differs)}; finish it with its "
                      f"own arguments, choose another --out, or begin anew with --force")
    return None


def plan_parts(args, parts, sources):
    """{part: {ranges, size}} and the largest id."""
    sizes, largest = measure(sources, args.processes)
    plan, at = {}, 0
    for part, own in parts.items():
        here = range(at, at + len(own))
        plan[part] = {"ranges": [(i, 0, None) for i in here], "size": sum(sizes[i] for i in here)}
        at += len(own)
    if "val" not in plan:
        count = len(parts["train"])                            # the first sources
        total = plan["train"]["size"]
        train, val = split_off_val(sources[:count], sizes[:count], args.val_fraction)
        rest = {part: plan[part] for part in plan if part != "train"}
        plan = {"train": {"ranges": train, "size": int(total * (1 - args.val_fraction))},
                "val": {"ranges": val, "size": int(total * args.val_fraction)}, **rest}
    for part in plan:
        if not plan[part]["ranges"] or not sum(sizes[i] for i, _, _ in plan[part]["ranges"]):
            raise Refused(f"{args.what}: its {part} part is empty; give more text"
                          + (", or another --val-fraction" if part in ("train", "val") else ""))
    return plan, largest


def lock_folder(out):
    """One preparation at a time in a folder; the lock ends with the process."""
    Work.lock = os.open(out, os.O_RDONLY)
    for _ in range(20):                                        # workers of one that was killed take a moment to end
        try:
            fcntl.flock(Work.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            return                                             # a file system without locks
    raise Refused(f"{out}: another prepare.py is writing there; wait for it, or choose another --out")


def begin_state(args, parts, sources, key, name, kind, tokenizer, path):
    """Measures, trains the tokenizer if none is given, and writes what a later run needs to go on."""
    plan, largest = plan_parts(args, parts, sources)
    ids = sources[0].kind == "megatron"
    if tokenizer is None and not ids:
        texts = training_texts(sources, plan["train"]["ranges"], plan["train"]["size"])
        tokenizer = tokenizer_train(texts, args.vocab_size or 4096)
        use_tokenizer(tokenizer, path, args.end_of_text)
    if tokenizer is None:
        Work.vocab_size, Work.small, kind = 0, largest < 65536, "not known: the input has token ids"
    spell = [tokenizer.id_to_token(i) for i in Work.before + Work.after] if tokenizer else []
    meta = {"name": name, "tokenizer": kind, "vocab_size": Work.vocab_size,
            "documents": {"before": spell[:len(Work.before)], "before_ids": Work.before,
                          "after": spell[len(Work.before):], "after_ids": Work.after}}
    state = {"key": key, "plan": plan, "parts": {part: empty_part() for part in plan},
             "position": [next(iter(plan)), 0, 0], "meta": meta, "small": Work.small}
    os.makedirs(args.out, exist_ok=True)
    lock_folder(args.out)
    for stale in glob.glob(os.path.join(glob.escape(args.out), "*.tmp")):
        os.remove(stale)
    if tokenizer:
        write_synced(os.path.join(args.out, "tokenizer.json.tmp"), tokenizer.to_str(pretty=True).encode())
        write_json(os.path.join(args.out, "tokenizer_config.json"),
                   tokenizer_config(tokenizer, Work.before, Work.after))
    progress = Progress(args.out, state)
    progress.save()
    return progress


def go_on(args, state, path):
    """A preparation that was ended before it was done."""
    lock_folder(args.out)
    file = os.path.join(args.out, "tokenizer.json.tmp")
    if "names" not in state and state["meta"]["vocab_size"]:
        use_tokenizer(tokenizer_of(decode([open(file, "rb").read()], file), file), path, args.end_of_text)
    Work.small = state["small"]
    print(f"going on with an unfinished preparation in {args.out}: part {state['position'][0]}, "
          f"{sum(sum(s[0] for s in p['closed']) + p['open'][0] for p in state['parts'].values()):,} tokens are there",
          flush=True)
    return Progress(args.out, state)


def prepare(args):
    begun = time.time()
    parts, name = read_source(args)
    sources = [source for part in parts for source in parts[part]]
    args.out = args.out or os.path.join("data", "sets", name)
    args.processes = args.workers or len(os.sched_getaffinity(0))
    if sources[0].content or sum(source.size_bytes() for source in sources) < INLINE_BYTES and not args.workers:
        args.processes = 1
    tokenizer, kind, path = given_tokenizer(args)
    key = state_key(args, sources, tokenizer)
    state = unfinished(args.out, key, args.force)
    if state is None and old_shards(args.out) and not args.force:
        raise Refused(f"{args.out}: already has {len(old_shards(args.out))} shards; choose another --out, or replace "
                      f"them with --force")
    if tokenizer:
        use_tokenizer(tokenizer, path, args.end_of_text)
    try:
        progress = (go_on(args, state, path) if state else
                    begin_state(args, parts, sources, key, name, kind, tokenizer, path))
    except OSError as error:
        raise Refused(f"{args.out}: cannot be written to: {error.strerror}") from None
    state = progress.state
    if "names" not in state:
        write_parts(progress, sources, args)
    give_names(progress)
    print_summary(args.out, state["meta"], list(state["plan"]), time.time() - begun, args.processes)


def write_parts(progress, sources, args):
    state, plan = progress.state, progress.state["plan"]
    names = list(plan)
    meter = Meter(sum(plan[part]["size"] for part in plan), "tokens" if sources[0].kind == "megatron" else "B")
    for part in names:
        if names.index(part) < names.index(state["position"][0]):
            meter.done += plan[part]["size"]
            continue
        if part != state["position"][0]:
            state["position"] = [part, 0, 0]
            progress.save()
        write_part(progress, part, sources, plan[part]["ranges"], args, meter)
    meter.end()
    write_json(os.path.join(progress.out, "meta.json"), state["meta"])
    shards = [f"{part}_{i:06d}.bin" for part in reversed(names) for i in range(len(state["parts"][part]["closed"]))]
    state["names"] = shards + ["tokenizer.json", "tokenizer_config.json", "meta.json"]
    progress.save()


def print_summary(out, meta, parts, seconds, processes):
    print(f"{'part':<6}{'bytes':>14}{'words':>13}{'tokens':>13}{'documents':>11}{'bytes/token':>13}{'shards':>8}")
    for part in parts:
        p = meta[part]
        print(f"{part:<6}{p['bytes']:>14,}{p['words']:>13,}{p['tokens']:>13,}{p['documents']:>11,}"
              f"{p['bytes'] / max(1, p['tokens']):>13.2f}{p['shards']:>8}")
    packed = meta["val"].get("gzip9_bits_per_byte")
    print(f"vocabulary {meta['vocab_size']} ({meta['tokenizer']})"
          + (f"; gzip -9 packs the val part to {packed:.2f} bits per byte" if packed is not None else ""))
    before, after = (" ".join(map(str, meta["documents"][key])) or "nothing" for key in ("before", "after"))
    print(f"before each document: {before}; after it: {after}")
    if before == after == "nothing" and meta["vocab_size"]:
        print("no end-of-text token was found: nothing is between documents; name one with --end-of-text")
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"written to {out} in {seconds:.1f} s; at most {peak_kib() >> 10} MiB of memory"
          + (f" and {workers} MiB in each of {processes} workers" if processes > 1 else ""))


def peak_kib():
    """Of this process. getrusage would also count the memory of the program that started it."""
    try:
        with open("/proc/self/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])
    except (OSError, TypeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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
        print(f"prepare.py: {error.filename or args.out}: reading or writing failed: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prepare.py: stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
