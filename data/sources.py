"""sources.py: the inputs of prepare.py: what kind a file is, and its documents, read as a stream.

    parts = sources_of(path, field, suffixes)    {"train": [Source, ...]}, "val" and "test" where the input has them
    for unit in source.units(begin, end)         what is handed to a worker: about UNIT_BYTES of the file
    pieces_of(unit)                              in the worker: [(text, begins a document, ends it), ...]

Kinds of files (a suffix may be followed by .gz or .zst, which are recognized by their first bytes):
    text      one document a file
    json      .jsonl .ndjson .json, an object a line, its field `text` (--field) a document
    chat      the same, where the objects are conversations (chat.py)
    csv       .csv .tsv with a header line, a column is the field
    parquet   .parquet, a column is the field
    arrow     .arrow, and folders as `datasets` saves them (state.json and dataset_info.json, or dataset_dict.json)
    megatron  .bin with .idx: token ids; documents and type as the index says
Every other kind is refused by name. Positions in a file (`begin`, `end`) are bytes of text for `text`, lines for `json`
and documents for the others; the end of the training part is one of them.
"""
import codecs
import csv
import gzip
import json
import os
import re
import struct
import zlib
from dataclasses import dataclass

UNIT_BYTES = 1 << 18
PIECE_CHARS = 1 << 14                    # text is tokenized in pieces of about this size
MAX_WITHOUT_CUT = 1 << 26                # characters without a place to cut
CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")


class Refused(Exception):
    """One sentence for the user."""


# ---------------------------------------------------------------- what kind a file is

TEXT_SUFFIXES = set("""
    .txt .text .md .markdown .rst .tex .org .adoc .htm .html .xhtml .xml .srt .vtt .log .wiki .raw .tokens
    .c .cc .cpp .cu .cuh .cs .css .go .h .hpp .java .js .jl .kt .lua .m .php .pl .py .r .rb .rs .scala .sh .sql .swift
    .ts .yaml .yml .toml .ini .cfg""".split())
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
         ".arrow": "arrow", ".bin": "megatron", ".idx": "megatron"}
COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
REFUSED_SUFFIXES = {                     # kinds whose content may look like text
    ".pkl": "a Python pickle", ".pickle": "a Python pickle", ".pt": "a PyTorch file", ".pth": "a PyTorch file",
    ".ckpt": "a PyTorch checkpoint", ".ipynb": "a Jupyter notebook", ".rtf": "an RTF document",
    ".ps": "a PostScript document", ".svg": "an SVG image", ".pdf": "a PDF document", ".npy": "a NumPy array",
    ".safetensors": "a safetensors file", ".gguf": "a GGUF model", ".lock": "a lock file"}
MAGIC = [                                # (offset, bytes, kind, what to do)
    (0, b"%PDF-", "a PDF document", "convert it, for example with pdftotext"),
    (0, b"PK\x03\x04", "a zip archive (docx, epub, npz and PyTorch files are zip archives too)", "unpack it"),
    (0, b"BZh", "bzip2 data", "unpack it with bunzip2"), (0, b"\xfd7zXZ", "xz data", "unpack it with xz -d"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-zip archive", "unpack it"), (0, b"Rar!\x1a", "a RAR archive", "unpack it"),
    (257, b"ustar", "a tar archive", "unpack it and name the folder"),
    (0, b"\x89PNG", "a PNG image", ""), (0, b"\xff\xd8\xff", "a JPEG image", ""), (0, b"GIF8", "a GIF image", ""),
    (0, b"II*\0", "a TIFF image", ""), (8, b"WEBP", "a WebP image", ""), (4, b"ftyp", "a video or audio file", ""),
    (0, b"OggS", "an Ogg file", ""), (0, b"ID3", "an MP3 file", ""), (0, b"fLaC", "a FLAC file", ""),
    (0, b"RIFF", "a RIFF file (WAV, AVI)", ""), (0, b"\x7fELF", "a program", ""),
    (0, b"SQLite format 3", "an SQLite database", "write its text to a CSV or JSONL file"),
    (0, b"\x93NUMPY", "a NumPy array", ""), (0, b"\x89HDF", "an HDF5 file", ""), (0, b"GGUF", "a GGUF model", ""),
    (0, b"\xd0\xcf\x11\xe0", "an old Office document", "convert it to text"), (0, b"{\\rtf", "an RTF document", ""),
    (0, b"Obj\x01", "an Avro file", "write it as JSONL or parquet"),
    (0, b"\xff\xfe", "UTF-16 text", "convert it: iconv -f utf-16 -t utf-8"),
    (0, b"\xfe\xff", "UTF-16 text", "convert it: iconv -f utf-16 -t utf-8"),
    (0, struct.pack("<I", 20240520), "a token shard", "give it to ./train_gpt -d as it is"),
    (0, struct.pack("<I", 20240801), "a token shard", "give it to ./train_gpt -d as it is")]
MAGIC += [(0, b"\x80" + bytes([protocol]), "a Python pickle", "") for protocol in range(2, 6)]
KNOWN = ("text, .jsonl, .json, .csv, .tsv, .parquet, .arrow (each but the last two also as .gz or .zst), folders of "
         "one of these, folders of `datasets`, Megatron's .bin with .idx")


def kind_name(head):
    """What data beginning like this is, and advice; None if it may be text."""
    binary = is_binary(head)
    for offset, magic, kind, advice in MAGIC:
        if head[offset:offset + len(magic)] == magic and (binary or magic in (b"%PDF-", b"{\\rtf")):
            return kind, advice
    if head[8:10] == b'{"' and binary:
        return "a safetensors file", ""
    return None


def is_binary(head):
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return True
    return bool(re.search(rb"[\0-\x08\x0e-\x1a]", head))


def suffix_of(path):
    """(the suffix in small letters without .gz and .zst, is it compressed by its name)"""
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    if suffix in COMPRESSED:
        return os.path.splitext(stem)[1], True
    return suffix, False


def refuse_kind(path, kind, advice):
    raise Refused(f"{path}: is {kind}, which is not read as text; {advice or 'leave it out'} (read are: {KNOWN})")


def kind_of(path, as_text=False):
    """The kind of a file, by its suffix and its first bytes. as_text: an unknown suffix is text by the user's word."""
    suffix, _ = suffix_of(path)
    if suffix in REFUSED_SUFFIXES:
        refuse_kind(path, REFUSED_SUFFIXES[suffix], "")
    kind = KINDS.get(suffix, "text")
    raw = read_head(path)
    if kind == "megatron":
        if not os.path.exists(os.path.splitext(path)[0] + ".idx"):
            name = kind_name(raw) or ("a .bin without the .idx of Megatron beside it", "")
            refuse_kind(path, *name)
        return kind
    if kind == "parquet" or raw[:4] == b"PAR1":
        if raw[:4] != b"PAR1":
            raise Refused(f"{path}: is not parquet: it begins with {raw[:4]!r} and must begin with b'PAR1'")
        return "parquet"
    if kind == "arrow" or raw[:6] == b"ARROW1":
        return "arrow"
    head = raw
    if any(raw.startswith(magic) for magic in COMPRESSED.values()):
        head = next(blocks(path, 1 << 12), b"")
    unknown = suffix not in TEXT_SUFFIXES and suffix not in KINDS
    name = kind_name(head) or (unknown and is_binary(head) and ("binary data of an unknown kind", ""))
    if name:
        refuse_kind(path, *name)
    if kind == "text" and suffix not in TEXT_SUFFIXES and not as_text:
        raise Refused(f"{path}: the suffix {suffix or '(none)'} is not known to be text; if it is, say --suffix "
                      f"{suffix or '.txt'} or name the file itself (read are: {KNOWN})")
    return kind


# ---------------------------------------------------------------- bytes and text of a file, as streams

def open_file(path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from None


def read_head(path):
    with open_file(path) as file:
        return file.read(512)


def read_whole(path):
    with open_file(path) as file:
        return file.read()


def decode(data_blocks, name):
    return "".join(strings(data_blocks, name))


def blocks(path, size_bytes=None):
    """The bytes of a file, unpacked if its first bytes are those of gzip or zstd."""
    size_bytes = size_bytes or UNIT_BYTES
    with open_file(path) as file:
        head = file.read(4)
        file.seek(0)
        if head.startswith(COMPRESSED[".gz"]):
            unpacked = read_blocks(gzip.GzipFile(fileobj=file), size_bytes)
        elif head == COMPRESSED[".zst"]:
            unpacked = zstd_blocks(file, path)
        else:
            unpacked = read_blocks(file, size_bytes)
        done = 0
        try:
            for block in unpacked:
                done += len(block)
                yield block
        except (EOFError, zlib.error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise Refused(f"{path}: cannot be read after {done} bytes of its content: {reason}; it is damaged or was "
                          f"cut short: get it again") from None


def read_blocks(file, size_bytes):
    return iter(lambda: file.read(size_bytes), b"")


def zstd_blocks(file, path):
    """Frame after frame. The library's own stream reader takes a frame that was cut short for its end."""
    try:
        import zstandard
    except ImportError:
        raise Refused(f"{path}: .zst is read by the Python package zstandard, which is missing; run: "
                      f".venv/bin/pip install zstandard") from None
    frame, data = None, b""
    while data or (data := file.read(1 << 17)):
        frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            block = frame.decompress(data)
        except zstandard.ZstdError as error:
            raise EOFError(error) from None
        data = b""
        if frame.eof:
            frame, data = None, frame.unused_data
        yield from (block[at:at + UNIT_BYTES] for at in range(0, len(block), UNIT_BYTES))
    if frame is not None:
        raise EOFError("its last zstd frame has no end")


def strings(data_blocks, name):
    """The text of blocks of UTF-8. A byte-order mark at the start is dropped; NUL and what is not UTF-8 is refused."""
    decoder, at, line = codecs.getincrementaldecoder("utf-8")(), 0, 1
    begin_at = 0                                               # where the bytes that the decoder still has begin
    for block in data_blocks:
        if at == 0 and block.startswith(codecs.BOM_UTF8):
            at = begin_at = len(codecs.BOM_UTF8)
            block = block[at:]
        text = decode_block(decoder, block, False, name, begin_at, line)
        if "\0" in text:
            before = text[:text.index("\0")].encode()
            raise Refused(f"{name}: line {line + before.count(10)}, byte {begin_at + len(before)} is NUL: it is not "
                          f"text, or not UTF-8; convert it, for example with iconv -f utf-16 -t utf-8")
        at += len(block)
        begin_at = at - len(decoder.getstate()[0])
        line += text.count("\n")
        yield text
    decode_block(decoder, b"", True, name, begin_at, line)


def decode_block(decoder, block, final, name, begin_at, line):
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise Refused(f"{name}: line {line}, byte {begin_at + error.start} is not UTF-8 ({error.reason}); convert the "
                      f"file, for example with iconv -f latin1 -t utf-8") from None


def pieces(texts, name, cut=CUT, size=PIECE_CHARS):
    """Cuts of a text that comes as a stream: each piece ends at the first place to cut after `size` characters. cut
    None: the text stays whole, since its tokenizer looks across every place."""
    buffer, searched, limit = "", size, MAX_WITHOUT_CUT if cut else MAX_WITHOUT_CUT >> 3
    for text in texts:
        buffer += text
        begin = 0
        while cut and len(buffer) - begin > size:
            found = cut.search(buffer, begin + searched)
            if found is None:
                searched = max(size, len(buffer) - begin - 2)              # a place needs two characters after it
                break
            yield buffer[begin:found.start()]
            begin, searched = found.start(), size
        buffer = buffer[begin:]
        if len(buffer) > limit:
            what = "no space or line end to cut at" if cut else "one document, which this tokenizer must see whole,"
            raise Refused(f"{name}: has {what} in {len(buffer)} characters, at most {limit} can be tokenized at once; "
                          f"break it up into lines or documents")
    yield buffer


# ---------------------------------------------------------------- sources

@dataclass
class Unit:
    """Part of a file as it travels to a worker."""
    kind: str                            # text, json, chat, texts (documents), ids (documents as arrays of token ids)
    name: str
    at: int                              # where it begins: line for json
    field: str
    data: object

    def size_bytes(self):
        return len(self.data) if self.kind in ("json", "chat") else sum(
            len(part[0] if self.kind == "text" else part) for part in self.data) * (4 if self.kind == "ids" else 1)


@dataclass
class Source:
    """A file of one kind. `content`: blocks of bytes or strings instead of the file's, for sets by name."""
    path: str
    kind: str
    field: str = "text"
    content: object = None

    def fingerprint(self):
        if self.content is not None:
            return [self.path, 0, 0]
        names = [self.path] + [os.path.splitext(self.path)[0] + ".idx"] * (self.kind == "megatron")
        stats = [os.stat(name) for name in names]
        return [os.path.abspath(self.path), sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)]

    def size_bytes(self):
        return os.path.getsize(self.path) if self.content is None else 0

    def blocks(self):
        return blocks(self.path) if self.content is None else self.content()

    def strings(self):
        data = self.blocks()
        return strings(data, self.path) if self.content is None else content_strings(data, self.path)

    def units(self, begin=0, end=None, cut=CUT):
        if self.kind == "text":
            return self.text_units(begin, end, cut)
        return READERS[self.kind](self, begin, end)

    def text_units(self, begin, end, cut):
        whole = pieces(byte_range(self.strings(), begin, end), self.path, cut)
        first, before = True, next(whole)
        for piece in whole:
            yield Unit("text", self.path, 0, "", [(before, first, False)])
            first, before = False, piece
        if before or not first:
            yield Unit("text", self.path, 0, "", [(before, first, True)])


def content_strings(data, name):
    first = next(data, b"")
    chain = (part for parts in ([first], data) for part in parts)
    return chain if isinstance(first, str) else strings(chain, name)


def byte_range(texts, begin, end):
    """Bytes [begin, end) of the text; both are places between characters."""
    at = 0
    for text in texts:
        if begin <= at and end is None:
            yield text
            continue
        data = text.encode()
        yield data[max(0, begin - at):max(0, end - at) if end is not None else None].decode()
        at += len(data)
        if end is not None and at >= end:
            return


def json_units(source, begin, end):
    """Blocks of whole lines. Positions are lines from 0."""
    line, rest = 0, []
    for block in source.blocks():
        cut = block.rfind(b"\n") + 1
        rest.append(block[:cut] if cut else block)
        if cut:
            data, rest = b"".join(rest), [block[cut:]]
            yield from json_range(source, data, line, begin, end)
            line += data.count(b"\n")
            if end is not None and line >= end:
                return
    yield from json_range(source, b"".join(rest), line, begin, end)


def json_range(source, data, line, begin, end):
    if line == 0:
        data = data.removeprefix(codecs.BOM_UTF8)
        if data.lstrip()[:1] == b"[":
            raise Refused(f"{source.path}: line 1: is a JSON array, an object a line is read; convert it: "
                          f"jq -c '.[]' {source.path} > {os.path.splitext(source.path)[0]}.jsonl")
    if line < begin or end is not None:
        lines = data.split(b"\n")
        skip = max(0, begin - line)
        data = b"\n".join(lines[skip:None if end is None else max(0, end - line)])
        line += skip
    if data.strip():
        yield Unit(source.kind, source.path, line, source.field, data)


JSON_KINDS = {int: "a number", float: "a number", bool: "a truth value", list: "a list", dict: "an object",
              type(None): "null"}


def json_records(unit):
    """(line from 0, file and line for messages, the line, its object) of a block of lines."""
    for number, line in enumerate(unit.data.split(b"\n"), unit.at):
        if not line.strip():
            continue
        where = f"{unit.name}: line {number + 1}"
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise Refused(f"{where}, byte {error.start} of it is not UTF-8 ({error.reason}); convert the file, for "
                          f"example with iconv -f latin1 -t utf-8") from None
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if hasattr(error, "colno") else error
            raise Refused(f"{where}: is not JSON ({reason}); each line must be one whole object") from None
        if not isinstance(record, dict):
            raise Refused(f"{where}: is {JSON_KINDS.get(type(record), 'a text')}, each line must be an object")
        yield number, where, line, record


def json_texts(unit):
    """[(line from 0, text), ...] of a block of lines."""
    key = json.dumps(unit.field, ensure_ascii=False).encode()
    texts = []
    for number, where, line, record in json_records(unit):
        if line.count(key) > 1:
            json.loads(line, object_pairs_hook=lambda pairs: single_key(pairs, unit.field, where))
        texts.append((number, field_text(record, unit.field, where)))
    return texts


def single_key(pairs, field, where):
    if sum(key == field for key, _ in pairs) > 1:
        raise Refused(f'{where}: has the field "{field}" twice; one must go')


def field_text(record, field, where):
    if field not in record:
        have = ", ".join(map(str, list(record)[:8])) or "none"
        raise Refused(f'{where}: has no field "{field}" (it has: {have}); name the one with the text with --field')
    text = record[field]
    if not isinstance(text, str):
        raise Refused(f'{where}: the field "{field}" is {JSON_KINDS[type(text)]}, text is needed; name another with '
                      f'--field, or leave such lines out')
    return checked_text(text, where)


def checked_text(text, where):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{where}: has half of a surrogate pair ({ascii(error.object[error.start])}), which is no "
                      f"character; leave it out") from None
    return text


def batches(source, texts, begin, end):
    """Units of documents [begin, end)."""
    batch, size = [], 0
    for number, text in texts:
        if end is not None and number >= end:
            break
        if number < begin:
            continue
        batch.append(text)
        size += len(text)
        if size >= UNIT_BYTES:
            yield Unit("texts", source.path, number - len(batch) + 1, source.field, batch)
            batch, size = [], 0
    if batch:
        yield Unit("texts", source.path, 0, source.field, batch)


def text_lines(texts):
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def csv_texts(source):
    csv.field_size_limit(1 << 28)
    delimiter = "\t" if suffix_of(source.path)[0] == ".tsv" else ","
    rows = csv.reader(text_lines(source.strings()), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        if header.count(source.field) != 1:
            raise Refused(f"{source.path}: line 1: the header has {header.count(source.field)} columns "
                          f"\"{source.field}\" (it has: {', '.join(header[:8])}), one is needed; name it with --field")
        column, number = header.index(source.field), 0
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise Refused(f"{source.path}: line {rows.line_num}: has {len(row)} fields, the header has "
                              f"{len(header)}; put quotes around what holds the delimiter {delimiter!r}")
            yield number, row[column]
            number += 1
    except csv.Error as error:
        raise Refused(f"{source.path}: line {rows.line_num}: is not CSV: {error}") from None


# ---------------------------------------------------------------- columns: parquet and arrow

def arrow_library(path):
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
        return pyarrow
    except ImportError:
        raise Refused(f"{path}: parquet and arrow are read by the Python package pyarrow, which is missing; run: "
                      f".venv/bin/pip install pyarrow") from None


def checked_column(pyarrow, source, schema):
    if source.field not in schema.names:
        raise Refused(f'{source.path}: has no column "{source.field}" (it has: {", ".join(schema.names[:8])}); name '
                      f"the one with the text with --field")
    kind = schema.field(source.field).type
    value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value)
            or pyarrow.types.is_string_view(value)):
        raise Refused(f'{source.path}: the column "{source.field}" is {kind}, text is needed; name another with '
                      f"--field")


def parquet_batches(pyarrow, source, begin):
    """(first row, column) after (first row, column), from the row group on that holds row `begin`."""
    file = pyarrow.parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=1 << 20)
    checked_column(pyarrow, source, file.schema_arrow)
    groups, row = list(range(file.num_row_groups)), 0
    while groups and row + file.metadata.row_group(groups[0]).num_rows <= begin:
        row += file.metadata.row_group(groups.pop(0)).num_rows
    for batch in file.iter_batches(256, row_groups=groups, columns=[source.field], use_threads=False):
        yield row, batch.column(0)
        row += batch.num_rows


def arrow_batches(pyarrow, source, _begin):
    """A stream, as `datasets` writes it, or a file."""
    with open_file(source.path) as file:
        if read_head(source.path)[:6] == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            found = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            found = reader = pyarrow.ipc.open_stream(file)
        checked_column(pyarrow, source, reader.schema)
        row = 0
        for batch in found:
            yield row, batch.column(batch.schema.get_field_index(source.field))
            row += batch.num_rows


def column_texts(source, begin=0):
    pyarrow = arrow_library(source.path)
    read = {"parquet": parquet_batches, "arrow": arrow_batches}[source.kind]
    try:
        for row, column in read(pyarrow, source, begin):
            for number in range(0, len(column), 256):
                for i, text in enumerate(column.slice(number, 256).to_pylist(), row + number):
                    if text is None:
                        raise Refused(f'{source.path}: row {i + 1}: the column "{source.field}" is null, text is '
                                      f"needed; leave such rows out")
                    yield i, text
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Refused(f"{source.path}: is damaged, or not {source.kind}: {str(error).splitlines()[0]}") from None


# ---------------------------------------------------------------- Megatron's .bin and .idx

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def megatron_index(path):
    """(type of the ids, first token of each document and the end of the last)
    The index: magic 9 bytes, version u64, type u8, sequences u64, documents + 1 u64; then lengths int32 and byte
    offsets int64 of the sequences, and for each document its first sequence, int64, with their number at the end."""
    import numpy as np
    idx, stem = os.path.splitext(path)[0] + ".idx", os.path.splitext(path)[0]
    with open_file(idx) as file:
        head = file.read(34)
        if len(head) < 34 or head[:9] != MEGATRON_MAGIC:
            raise Refused(f"{idx}: is not the index of a Megatron data set: it must begin with {MEGATRON_MAGIC!r}")
        version, code, sequences, ends = struct.unpack("<QBQQ", head[9:])
        if version != 1 or code not in MEGATRON_TYPES:
            raise Refused(f"{idx}: version {version} (byte 9), type {code} (byte 17): only version 1 with whole "
                          f"numbers is read, types {', '.join(map(str, MEGATRON_TYPES))}")
        have, need = os.path.getsize(idx), 34 + 12 * sequences + 8 * ends
        if have < need or ends == 0:
            raise Refused(f"{idx}: has {have} bytes, {sequences} sequences and {ends} document ends need {need}; it "
                          f"was cut short")
        lengths = np.fromfile(file, "<i4", sequences).astype(np.int64)
        offsets = np.fromfile(file, "<i8", sequences)
        firsts = np.fromfile(file, "<i8", ends)
    dtype = np.dtype(MEGATRON_TYPES[code])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    have, need = os.path.getsize(stem + ".bin"), int(starts[-1]) * dtype.itemsize
    if have != need or (lengths < 0).any() or not np.array_equal(offsets, starts[:-1] * dtype.itemsize):
        raise Refused(f"{stem}.bin: has {have} bytes, its index says {need} ({starts[-1]} tokens of {dtype.itemsize} "
                      f"bytes, one after another); they do not belong together, or one was cut short")
    if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise Refused(f"{idx}: its documents do not cover the {sequences} sequences in order; make it again")
    return dtype, starts[firsts]


def megatron_units(source, begin, end):
    import numpy as np
    dtype, starts = megatron_index(source.path)
    end = len(starts) - 1 if end is None else end
    with open_file(os.path.splitext(source.path)[0] + ".bin") as file:
        file.seek(int(starts[begin]) * dtype.itemsize)
        while begin < end:
            after = int(np.searchsorted(starts, starts[begin] + UNIT_BYTES // 4, "right")) - 1
            after = min(end, max(begin + 1, after))
            ids = np.fromfile(file, dtype, int(starts[after] - starts[begin]))
            if len(ids) and (ids.min() < 0 or int(ids.max()) > 0x7fffffff):
                at = int(np.argmax((ids < 0) | (ids.astype(np.int64) > 0x7fffffff)))
                raise Refused(f"{source.path}: token {starts[begin] + at} is {ids[at]}, which is no token id")
            cuts = (starts[begin + 1:after] - starts[begin]).astype(np.int64)
            yield Unit("ids", source.path, begin, "", np.split(ids.astype("<u4"), cuts))
            begin = after


READERS = {
    "json": json_units,
    "chat": json_units,
    "csv": lambda source, begin, end: batches(source, csv_texts(source), begin, end),
    "parquet": lambda source, begin, end: batches(source, column_texts(source, begin), begin, end),
    "arrow": lambda source, begin, end: batches(source, column_texts(source), begin, end),
    "megatron": megatron_units,
}


def documents_of(unit):
    """[(position, document), ...] of a unit that is not `text`. Positions are those that units() takes."""
    if unit.kind == "json":
        return json_texts(unit)
    if unit.kind == "chat":
        return [(number, (record, where)) for number, where, _, record in json_records(unit)]
    return list(enumerate(unit.data, unit.at))


def pieces_of(unit, cut=CUT):
    """[(text or ids, begins a document, ends it), ...]. A document without text is none."""
    if unit.kind == "text":
        return unit.data
    found = []
    for _, document in documents_of(unit):
        if len(document) == 0:
            continue
        parts = [document] if unit.kind in ("ids", "chat") else list(pieces([document], unit.name, cut))
        found += [(part, i == 0, i == len(parts) - 1) for i, part in enumerate(parts)]
    return found


# ---------------------------------------------------------------- what the user named

HUB_PART = re.compile(r"(train|validation|valid|val|dev|test)-\d{5}-of-\d{5}(-\w+)?\.\w+$")
PARTS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}


def sources_of(path, field, suffixes):
    """{"train": [Source, ...], ...} of a file or folder."""
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "dataset_dict.json")):
            return saved_parts(path, field)
        if os.path.exists(os.path.join(path, "state.json")) and os.path.exists(os.path.join(path, "dataset_info.json")):
            return {"train": saved_dataset(path, field)}
        return folder_sources(path, field, suffixes)
    stem, suffix = os.path.splitext(path)
    if suffix == ".idx" and os.path.exists(stem + ".bin"):
        path = stem + ".bin"
    if os.path.getsize(path) == 0:
        raise Refused(f"{path}: its train part is empty: the file has 0 bytes; give more text")
    return {"train": [Source(path, kind_of(path, as_text=True), field)]}


def read_json(path):
    try:
        return json.loads(read_whole(path))
    except ValueError as error:
        raise Refused(f"{path}: is not JSON: {error}") from None


def saved_dataset(folder, field):
    """What datasets.Dataset.save_to_disk writes."""
    state = read_json(os.path.join(folder, "state.json"))
    files = [entry["filename"] for entry in state.get("_data_files", [])]
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise Refused(f"{folder}: its rows are chosen by a table of indices; save it again after .flatten_indices()")
    if not files:
        raise Refused(f"{folder}: its state.json names no files; save it again with save_to_disk")
    return [Source(os.path.join(folder, name), "arrow", field) for name in files]


def saved_parts(folder, field):
    """What datasets.DatasetDict.save_to_disk writes."""
    splits = read_json(os.path.join(folder, "dataset_dict.json")).get("splits", [])
    parts = {}
    for split in splits:
        if split not in PARTS:
            raise Refused(f"{folder}: its part {split} is none of {', '.join(PARTS)}; name the folder of one part: "
                          f"{os.path.join(folder, split)}")
        parts[PARTS[split]] = saved_dataset(os.path.join(folder, split), field)
    if "train" not in parts:
        raise Refused(f"{folder}: has the parts {', '.join(splits)} and no train; name the folder of one part")
    return parts


def files_below(folder):
    """Every file below the folder, sorted by path. Hidden ones are left out, links are followed."""
    found, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = sorted(f for f in folders if f[0] != "." and os.path.realpath(os.path.join(place, f)) not in seen)
        found += [os.path.join(place, name) for name in names if name[0] != "."]
    return sorted(found)


def folder_sources(folder, field, suffixes):
    paths = files_below(folder)
    if suffixes:
        paths = [path for path in paths if path.lower().endswith(tuple(suffixes))]
    empty = [path for path in paths if os.path.getsize(path) == 0]
    if empty:
        print(f"left out, since they are empty: {len(empty)} files, the first is {empty[0]}", flush=True)
    paths = [path for path in paths if path not in set(empty)]
    paths = [path for path in paths if not (path.endswith(".idx") and os.path.splitext(path)[0] + ".bin" in paths)]
    if not paths:
        raise Refused(f"{folder}: the folder has no file "
                      + (f"ending in {', '.join(suffixes)}" if suffixes else "with text; name one that has (*.txt, "
                         "*.jsonl, *.parquet ...)"))
    found = [Source(path, kind_of(path, bool(suffixes)), field) for path in paths]
    kinds = {source.kind: source for source in found}
    if len(kinds) > 1:
        examples = ", ".join(f"{kind} ({source.path})" for kind, source in sorted(kinds.items()))
        raise Refused(f"{folder}: has files of {len(kinds)} kinds: {examples}; choose one with --suffix, for example "
                      f"--suffix {suffix_of(found[0].path)[0]}")
    named = [HUB_PART.match(os.path.basename(path)) for path in paths]
    if found[0].kind == "text" or not all(named) or not any(m[1] == "train" for m in named):
        return {"train": found}
    parts = {}
    for source, match in zip(found, named):
        parts.setdefault(PARTS[match[1]], []).append(source)
    return parts
