"""progress.py: what prepare.py writes beside the shards, how it goes on after a kill, and how far it is.

    Progress(out, state).save()     OUT/prepare.progress
    write_json(path, value)         on the disk when it returns
    Gzip()                          the size of a text after gzip -9
    Meter(total_bytes, unit)        a line of progress
"""
import json
import os
import shutil
import subprocess
import sys
import time
import zlib

PROGRESS = "prepare.progress"            # there while a preparation is unfinished; what it knows, as JSON


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
