"""named_sets.py: the data sets that prepare.py knows by name.

    named_parts(name, source)      {"train": [Source], ...}; with "train" alone, the end of it becomes "val"

A set is fetched, or comes from a Debian package (kjv), or from a local copy (`source`)."""
import glob
import io
import os
import shutil
import subprocess
import urllib.error
import urllib.request
import zipfile

from sources import Refused, Source, column_texts, decode, read_whole

URLS = {
    "tinyshakespeare": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "wikitext2": "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
    "wikitext103": "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
    "gpt2": "https://huggingface.co/openai-community/gpt2/resolve/main/tokenizer.json",
}


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
        return read_whole(source)
    return fetch(name, f"get that file elsewhere and run: python3 data/prepare.py {name} --source FILE")


def kjv(_name, _source):
    """The King James Bible, one verse a line, as Debian's package bible-kjv has it: `bible -f` prints "Ge1:1 In the
    beginning ..."; the references are dropped."""
    program = shutil.which("bible")
    if program is None:
        raise Refused("kjv comes from the program `bible`, which is not installed; run: apt-get install bible-kjv, or "
                      "give a text file of your own")
    printed = subprocess.run([program, "-f", "Gen1:1-Rev22:21"], stdout=subprocess.PIPE, check=True).stdout
    verses = [line.split(" ", 1) for line in decode([printed], program).splitlines()]
    if len(verses) != 31102 or not all(len(verse) == 2 for verse in verses):
        raise Refused(f"{program}: printed {len(verses)} verses, the King James Bible has 31102; reinstall "
                      f"bible-kjv-text")
    text = "".join(text + "\n" for _, text in verses)
    return {"train": [Source("kjv", "text", content=lambda: iter([text]))]}


def tinyshakespeare(name, source):
    data = source_bytes(name, source)
    return {"train": [Source(source or name, "text", content=lambda: iter([data]))]}


WIKITEXT_STEMS = (("train", "wiki.train", "train"), ("val", "wiki.valid", "validation"), ("test", "wiki.test", "test"))


def wikitext_folder(source):
    """wiki.train.raw (or .tokens) beside wiki.valid.* and wiki.test.*; or train-*.parquet, validation-*, test-*, whose
    rows are the lines of one text."""
    parts = {}
    for part, stem, hub_stem in WIKITEXT_STEMS:
        raw = sorted(glob.glob(os.path.join(source, stem + ".*")))
        parquet = sorted(glob.glob(os.path.join(source, hub_stem + "*.parquet")))
        if not raw and not parquet:
            raise Refused(f"{source}: has neither {stem}.raw nor {hub_stem}-*.parquet")
        parts[part] = [Source(raw[0], "text") if raw else Source(parquet[0], "text", content=row_lines(parquet))]
    return parts


def row_lines(paths):
    return lambda: (text for path in paths for _, text in column_texts(Source(path, "parquet")))


def wikitext(name, source):
    if source and os.path.isdir(source):
        return wikitext_folder(source)
    data = source_bytes(name, source)
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile:
        raise Refused(f"{source or URLS[name]}: is not a zip archive; it must hold wiki.train.raw, wiki.valid.raw and "
                      f"wiki.test.raw") from None
    parts = {}
    for part, stem, _ in WIKITEXT_STEMS:
        member = next((m for m in archive.namelist() if os.path.basename(m).startswith(stem)), None)
        if member is None:
            raise Refused(f"{source or URLS[name]}: has no {stem}.raw; it must be {URLS[name]}")
        parts[part] = [Source(member, "text", content=member_blocks(archive, member))]
    return parts


def member_blocks(archive, member):
    def read():
        try:
            with archive.open(member) as file:
                yield from iter(lambda: file.read(1 << 18), b"")
        except zipfile.BadZipFile as error:
            raise Refused(f"{member}: the zip archive is damaged: {error}; get it again") from None
    return read


SETS = {"kjv": kjv, "tinyshakespeare": tinyshakespeare, "wikitext2": wikitext, "wikitext103": wikitext}


def named_parts(name, source):
    return SETS[name](name, source)
