#!/usr/bin/env python3
"""tensorboard.py: a run's log as TensorBoard event files.

    scripts/tensorboard.py RUN [RUN ...] [-o FOLDER]       then: tensorboard --logdir FOLDER (runs/tensorboard)

One sub-folder per run; every number of the log is a scalar under its own name, by step, with the losses under loss/.
The format is two messages and a frame, written here so that no library with protobuf is needed:
  file    records: length (uint64), its checksum, data, its checksum; little-endian
          checksum: CRC-32C, rotated right by 15, plus 0xa282ead8
  Event   1 wall_time (double), 2 step (int64), 3 file_version (string, first record), 5 summary
  Summary 1 value { 1 tag (string), 2 simple_value (float) }
"""
import argparse
import pathlib
import struct

from runlog import open_runs

TAGS = {"loss": "loss/train", "val_loss": "loss/val", "bits_per_byte": "loss/bits_per_byte"}
NOT_SCALARS = {"step", "state_hash", "tokens_so_far"}


def crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = crc_table()


def checksum(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(x):
    out = bytearray()
    while x >= 128:
        out.append(x & 127 | 128)
        x >>= 7
    return bytes(out) + bytes([x])


def message(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(wall_time, step, scalars=(), version=None):
    data = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + varint(step)
    if version:
        return data + message(3, version.encode())
    values = b"".join(message(1, message(1, tag.encode()) + b"\x15" + struct.pack("<f", x)) for tag, x in scalars)
    return data + message(5, values)


def write_events(path, log):
    """Wall time: not in the log, so it is computed back from the file's last change by the time of each step."""
    times, at = [], log.path.stat().st_mtime
    for entry in reversed(log.steps):
        times.append(at)
        at -= (entry.get("step_ms") or 0) / 1e3
    records = [event(at, 0, version="brain.Event:2")]
    for entry, wall_time in zip(log.steps, reversed(times)):
        scalars = [(TAGS.get(key, key), float(x)) for key, x in entry.items()
                   if isinstance(x, (int, float)) and key not in NOT_SCALARS]
        records.append(event(wall_time, entry["step"], scalars))
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + checksum(length) + record + checksum(record))
    return len(records) - 1


def main():
    parser = argparse.ArgumentParser(description="run logs of train_gpt as TensorBoard event files")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or its log")
    parser.add_argument("-o", "--out", type=pathlib.Path, default=pathlib.Path("runs/tensorboard"),
                        help="folder to write to (%(default)s)")
    args = parser.parse_args()
    for log in open_runs(args.runs):
        folder = args.out / log.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "events.out.tfevents.0000000000.train_gpt"      # one name: a second export replaces the first
        print(f"wrote {path}: {write_events(path, log)} steps")


if __name__ == "__main__":
    main()
