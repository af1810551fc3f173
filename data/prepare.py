#!/usr/bin/env python3
"""prepare.py: turns text into what train_gpt reads, in one command.

    python3 data/prepare.py kjv                           a data set by name: kjv tinyshakespeare wikitext2 wikitext103
    python3 data/prepare.py book.txt --vocab-size 8192    a UTF-8 text file of your own
    python3 data/prepare.py texts/ --tokenizer llama3/    a folder, nested or not: each text file in it is a document
    python3 data/prepare.py web.jsonl.zst --gpt2          a JSON object a line; its field "text" is a document
    python3 data/prepare.py qa.csv --field answer         a column of .csv, .tsv or .parquet; --field goes with JSON too
    python3 data/prepare.py chats.jsonl --tokenizer qwen3/   conversations, by the chat template of a model's folder
    python3 data/prepare.py saved/                        a folder that datasets.save_to_disk wrote
    python3 data/prepare.py set_text_document.bin         Megatron's .bin and .idx: token ids already
    ./train_gpt -d data/sets/web -m d4 -n 100             trains on it

It writes into data/sets/NAME, or --out:
    train_000000.bin ...   token shards (format: data/tokens.h)
    val_000000.bin         the last 5 % of the text (--val-share), or the input's own part: of a text from a line's
                           start on, of records whole documents
    train_000000.docs ...  of conversations: where each begins, and which tokens count in the loss (data/tokens.h)
    tokenizer.json         the tokenizer as Hugging Face reads it, with tokenizer_config.json; trained on the training
                           part alone if none is given
    meta.json              the data card: bytes, words, tokens and documents of each part, the ids before and after each
                           document, and gzip -9's bits per byte as a mark to compare with

Before each document comes what the tokenizer's post-processor puts there (Llama-3: <|begin_of_text|>; GPT-2, Qwen2 and
those trained here: nothing), after it the base model's end-of-text token (<|end_of_text|>, <|endoftext|>).

A JSON object with "messages" (or sharegpt's "conversations", "prompt" and "completion", "instruction" and "output") is
a conversation (data/chat.py). What the assistant says counts in the loss, to the end of its turn; the rest does not.

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
from chat import Template, conversation_of, flags_of, format_of, template_of            # noqa: E402
from named_sets import SETS, URLS, fetch, named_parts          # noqa: E402
from progress import PROGRESS, Gzip, Meter, Progress, sync_folder, write_json, write_synced      # noqa: E402
from sources import (CUT, PIECE_CHARS, Refused, decode, documents_of, json_records, pieces_of,  # noqa: E402,F401
                     sources_of, strings)
from vocabulary import (cutting, marks, tokenizer_config, tokenizer_load, tokenizer_of, tokenizer_train,  # noqa: E402
                        vocab_size_of)

HEADER_INT32S = 256                      # see data/tokens.h, as the next four
DOCS_MAGIC, DOCS_HEADER_BYTES = 0x73636F64, 64
COUNTS, BEGINS = 1, 2
BLOCK_BYTES = 1 << 19                    # what one worker gets at a time
INLINE_BYTES = 1 << 23                   # smaller inputs are not worth processes
TRAIN_BYTES = 1 << 27                    # a tokenizer is trained on a sample of this size of what is larger
CHECKPOINT_SECONDS = 10
PROGRESS_VERSION = 1


# ---------------------------------------------------------------- workers

class Work:
    """What workers know; they are forked, so that one copy of a vocabulary serves all."""
    tokenizer = encode = None
    cut, drops = CUT, False
    before, after = [], []
    vocab_size = 0                       # 0: not known
    small = True                         # uint16
    template = None                      # of conversations
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


def size_of(document):
    """Bytes of text, or number of ids."""
    if isinstance(document, tuple):
        return conversation_of(*document).size_bytes
    return len(document.encode() if isinstance(document, str) else document)


def sizes_of_block(block):
    """[(file, bytes of text or number of ids, largest id), ...]"""
    sizes = []
    for file, unit in block:
        documents, largest = documents_of(unit), 0
        if unit.kind == "ids":
            ids = [document for _, document in documents if len(document)]
            largest = max((int(document.max()) for document in ids), default=0)
            if Work.vocab_size and largest >= Work.vocab_size:
                raise Refused(f"{unit.name}: document {unit.at} or one soon after it has the id {largest}, the "
                              f"tokenizer's vocabulary has {Work.vocab_size}; give the tokenizer that made the ids")
        if unit.kind == "chat":
            for _, document in documents:                      # a refusal of the template comes before any shard
                Work.template.render(conversation_of(*document))
        sizes.append((file, sum(size_of(document) for _, document in documents), largest))
    return sizes


class Encoded:
    """What a worker makes of a block."""

    def __init__(self, arrays, counts, texts="", flags=b"", tally=None):
        self.ids = b"".join(array.tobytes() for array in arrays)
        self.counts = counts             # (ids, bytes, words, begins a document) of each piece
        self.texts = texts               # of the pieces, for gzip
        self.flags, self.tally = flags, tally or {}            # of conversations: a byte for each id; what happened


def encode_block(block):
    if block[0][1].kind == "chat":
        return encode_conversations([piece for _, unit in block for piece, _, _ in pieces_of(unit)])
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
    return Encoded(arrays, counts, "".join(texts))


def encode_conversations(documents):
    """Whole conversations as the template writes them, marks included: nothing is laid before or after them."""
    import numpy as np
    rendered = [Work.template.render(conversation_of(*document)) for document in documents]
    encodings = Work.tokenizer.encode_batch([text for text, _, _ in rendered], add_special_tokens=False)
    arrays, counts, flags = [], [], bytearray()
    tally = {"conversations": len(rendered), "tokens that count": 0, "trained on the last answer only": 0,
             "left out, since no answer counts": 0}
    for (text, spans, only_last), encoding in zip(rendered, encodings):
        flag = flags_of(encoding.offsets, spans)
        flag[:1] = b"\0"                                       # nothing predicts the first token
        tally["left out, since no answer counts"] += not any(flag)
        if not any(flag):
            continue
        tally["tokens that count"] += sum(flag)
        tally["trained on the last answer only"] += only_last
        flag[0] |= BEGINS
        flags += flag
        arrays.append(np.array(encoding.ids, "<u2" if Work.small else "<u4"))
        counts.append((len(flag), len(text.encode()), len(text.split()), True))
    return Encoded(arrays, counts, flags=bytes(flags), tally=tally)


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
    """(bytes or ids of each source, largest id). Every file is read once: faults in it are reported first."""
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
            keep -= size_of(document)
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

def shard_header(num_toks, num_bytes, num_words):
    """Of conversations without bytes and words: the loss is of the answers alone, and no measure of the text."""
    import numpy as np
    if Work.template:
        num_bytes = num_words = 0
    header = np.zeros(HEADER_INT32S, dtype="<u4")
    header[0] = 20240520 if Work.small else 20240801
    header[1] = 1 if Work.small else 7
    header[4] = Work.vocab_size
    for at, count in ((2, num_toks), (5, num_bytes), (7, num_words)):
        header[at], header[at + 1] = count & 0xFFFFFFFF, count >> 32
    return header.tobytes()


def docs_header(path, num_toks):
    """Of the bytes that follow it in the file, one for each token."""
    import numpy as np
    flags = np.fromfile(path, "u1", offset=DOCS_HEADER_BYTES)
    header = np.zeros(DOCS_HEADER_BYTES // 8, "<u8")
    header[:4] = DOCS_MAGIC | 1 << 32, num_toks, np.count_nonzero(flags & BEGINS), np.count_nonzero(flags & COUNTS)
    return header.tobytes()


class ShardWriter:
    """The shards of one part. Each is closed at the first piece that takes it past shard_tokens. Shards of
    conversations have a second file, a byte for each token."""

    def __init__(self, out, part, state, shard_tokens):
        self.out, self.part, self.state, self.shard_tokens = out, part, state, shard_tokens
        self.token_bytes = 2 if Work.small else 4
        self.file = self.docs = None
        state.setdefault("tally", {})
        known = {path for number in range(len(state["closed"]) + 1) for path in self.paths(number)}
        for path in glob.glob(os.path.join(glob.escape(out), f"{part}_*.tmp")):
            if path not in known:
                os.remove(path)

    def paths(self, number):
        return [os.path.join(self.out, f"{self.part}_{number:06d}.{kind}.tmp") for kind in ("bin", "docs")]

    def open(self):
        path, docs = self.paths(len(self.state["closed"]))
        self.file = open_at(path, 4 * HEADER_INT32S + self.token_bytes * self.state["open"][0])
        self.docs = open_at(docs, DOCS_HEADER_BYTES + self.state["open"][0]) if Work.template else None

    def put(self, encoded):
        at = 0
        for tokens, num_bytes, words, begins in encoded.counts:
            if self.file is None:
                self.open()
            end = at + tokens
            self.file.write(encoded.ids[at * self.token_bytes:end * self.token_bytes])
            if self.docs:
                self.docs.write(encoded.flags[at:end])
            at = end
            self.state["open"] = [a + b for a, b in zip(self.state["open"], (tokens, num_bytes, words))]
            self.state["documents"] += begins
            if self.state["open"][0] >= self.shard_tokens:
                self.close()
        tally = self.state["tally"]
        tally.update((key, tally.get(key, 0) + count) for key, count in encoded.tally.items())

    def close(self):
        if self.file is None and self.state["open"][0] > 0:
            self.open()
        if self.file is not None:
            self.file.seek(0)
            self.file.write(shard_header(*self.state["open"]))
            if self.docs:
                self.docs.flush()
                header = docs_header(self.docs.name, self.state["open"][0])
                self.docs.seek(0)
                self.docs.write(header)
            self.sync()
            for file in self.files():
                file.close()
            self.file = self.docs = None
            self.state["closed"].append(self.state["open"])
            self.state["open"] = [0, 0, 0]

    def files(self):
        return [file for file in (self.file, self.docs) if file]

    def sync(self):
        for file in self.files():
            file.flush()
            os.fsync(file.fileno())

    def total(self):
        if not self.state["closed"]:     # of conversations, of which none is left
            raise Refused(f"{self.out}: no answer of the {self.part} part counts, so that nothing is left of it; give "
                          f"more conversations, or another --val-share")
        sums = [sum(column) for column in zip(*self.state["closed"])]
        return {"bytes": sums[1], "words": sums[2], "tokens": sums[0], "documents": self.state["documents"],
                "shards": len(self.state["closed"]), **({"answers": self.state["tally"]} if Work.template else {})}


def open_at(path, size_bytes):
    """A file to go on with behind its first bytes."""
    file = open(path, "r+b" if os.path.exists(path) else "w+b")
    file.truncate(size_bytes)
    file.seek(0, os.SEEK_END)
    return file


def write_part(progress, part, sources, ranges, args, meter):
    """The shards of one part, from where the state says on; the validation part from its start, since gzip sees it."""
    state = progress.state
    text = sources[0].kind != "megatron"
    packed = Gzip() if part == "val" and text and not Work.template else None
    if packed:
        state["position"], state["parts"][part] = [part, 0, 0], empty_part()
    writer = ShardWriter(progress.out, part, state["parts"][part], args.shard_tokens)
    saved = time.time()
    begin = tuple(state["position"][1:])
    meter.done += writer.state["open"][1] + sum(shard[1] for shard in writer.state["closed"])
    for position, encoded in ordered(encode_block, blocks_of(sources, ranges, begin), args.processes):
        writer.put(encoded)
        if packed:
            packed.put(encoded.texts.encode())
        meter.put(sum(count[1 if text else 0] for count in encoded.counts))
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


def old_shards(out, kind="bin"):
    return [path for part in ("train", "val", "test")
            for path in glob.glob(os.path.join(glob.escape(out), f"{part}_*.{kind}"))]


def give_names(progress):
    """The last step: every file gets its name, meta.json last. It can be killed and done again at any moment."""
    out, names = progress.out, progress.state["names"]
    template = glob.glob(os.path.join(glob.escape(out), "chat_template.jinja"))
    for path in old_shards(out) + old_shards(out, "docs") + template:
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
    parser.add_argument("--field", metavar="NAME", help="the field or column with the text, in JSON, CSV, parquet and "
                        "arrow (text); JSON is then read as text where it could be conversations too")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja2 template for conversations, instead of that "
                        "of the folder of --tokenizer")
    parser.add_argument("--suffix", metavar=".A,.B", help="of a folder only files that end so, comma-separated; what "
                        "has an unknown suffix is read as text")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="tokens of the tokenizer that is trained (4096)")
    parser.add_argument("--tokenizer", metavar="FILE|DIR", help="a tokenizer.json, or a model's folder, to use instead")
    parser.add_argument("--gpt2", action="store_true", help="use GPT-2's vocabulary of 50257 tokens")
    parser.add_argument("--gpt2-dir", metavar="DIR", help="where its tokenizer.json, or vocab.json and merges.txt, are")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="the token between documents, instead of the base "
                        "model's that is found by name (<|endoftext|>, <|end_of_text|>, </s> ...)")
    parser.add_argument("--val-share", "--val-fraction", dest="val_fraction", type=float, default=0.05, metavar="F",
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
        parser.error(f"--val-share is {args.val_fraction}, must be between 0 and 1")
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
    parts = sources_of(what, args.field or "text", args.suffixes)
    find_conversations(parts, args)
    return parts, os.path.splitext(stem)[0] if suffix in (".gz", ".zst") else stem


def find_conversations(parts, args):
    """JSON whose first object is a conversation has conversations, unless --field says where its text is."""
    sources = [source for part in parts for source in parts[part]]
    found = None
    if sources[0].kind == "json" and args.field is None:
        first = next((record for unit in sources[0].units() for _, _, _, record in json_records(unit)), None)
        found = format_of(first)
    if found:
        print(f"conversations, by the fields {', '.join(sorted(found[0]))} of the first line (--field text reads a "
              f"field as text)", flush=True)
        for source in sources:
            source.kind = "chat"
    elif args.chat_template:
        raise Refused(f"--chat-template is for conversations, and {args.what} has none: leave it out, and --field too")


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


def use_template(args, tokenizer, path, date):
    """date: of the start of the preparation, for templates that write the day."""
    if tokenizer is None:
        raise Refused("conversations need the tokenizer and the chat template of a model: give its folder with "
                      "--tokenizer DIR")
    Work.template = Template(*template_of(path, args.chat_template), args.chat_template or path, date)


def state_key(args, sources, tokenizer):
    """What must be the same for an unfinished preparation to go on: by name, so that the difference can be said."""
    import tokenizers
    text = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16] if tokenizer else f"{args.vocab_size or 4096}"
    files = hashlib.sha256(json.dumps([source.fingerprint() for source in sources]).encode()).hexdigest()[:16]
    return {"input": args.what, "content of the input": files, "--field": args.field or "text", "tokenizer": text,
            "--end-of-text": args.end_of_text, "--val-fraction": args.val_fraction, "--shard-tokens": args.shard_tokens,
            "tokenizers": tokenizers.__version__, "version": PROGRESS_VERSION,
            **({"chat template": hashlib.sha256(Work.template.source.encode()).hexdigest()[:16]} if Work.template
               else {})}


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
                          + (", or another --val-share" if part in ("train", "val") else ""))
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
    before, after = ([], []) if Work.template else (Work.before, Work.after)       # a template lays marks of its own
    spell = [tokenizer.id_to_token(i) for i in before + after] if tokenizer else []
    meta = {"name": name, "tokenizer": kind, "vocab_size": Work.vocab_size,
            "documents": {"before": spell[:len(before)], "before_ids": before,
                          "after": spell[len(before):], "after_ids": after}}
    state = {"key": key, "plan": plan, "parts": {part: empty_part() for part in plan},
             "position": [next(iter(plan)), 0, 0], "meta": meta, "small": Work.small}
    if Work.template:
        state["date"], meta["chat_template"] = Work.template.date, Work.template.name
    os.makedirs(args.out, exist_ok=True)
    lock_folder(args.out)
    for stale in glob.glob(os.path.join(glob.escape(args.out), "*.tmp")):
        os.remove(stale)
    if tokenizer:
        write_synced(os.path.join(args.out, "tokenizer.json.tmp"), tokenizer.to_str(pretty=True).encode())
        config = tokenizer_config(tokenizer, Work.before, Work.after)
        if Work.template:
            config.update(Work.template.tokens)
            write_synced(os.path.join(args.out, "chat_template.jinja.tmp"), Work.template.source.encode())
        write_json(os.path.join(args.out, "tokenizer_config.json"), config)
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
    Work.template = None
    if sources[0].kind == "chat":
        use_template(args, tokenizer, path, begun)
    key = state_key(args, sources, tokenizer)
    state = unfinished(args.out, key, args.force)
    if state and Work.template:
        use_template(args, tokenizer, path, state["date"])
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
    kinds = ("docs", "bin") if Work.template else ("bin",)     # a shard has its name last: it is never without .docs
    shards = [f"{part}_{i:06d}.{kind}" for part in reversed(names) for i in range(len(state["parts"][part]["closed"]))
              for kind in kinds]
    template = ["chat_template.jinja"] if Work.template else []
    state["names"] = shards + ["tokenizer.json", "tokenizer_config.json", *template, "meta.json"]
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
    for part in parts if Work.template else ():
        print(f"{part}: " + "; ".join(f"{count:,} {what}" for what, count in meta[part]["answers"].items() if count))
    before, after = (" ".join(map(str, meta["documents"][key])) or "nothing" for key in ("before", "after"))
    print(f"chat template: {meta['chat_template']}" if Work.template else
          f"before each document: {before}; after it: {after}")
    if before == after == "nothing" and meta["vocab_size"] and not Work.template:
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
