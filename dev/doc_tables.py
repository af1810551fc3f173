#!/usr/bin/env python3
"""doc_tables.py: the tables of docs/optimizers.md from the rows of the program, as --help prints them.

  dev/doc_tables.py [PROGRAM]     writes docs/optimizers.md; PROGRAM: build/cpu/train_gpt

It replaces what is between "<!-- --optimizer -->" or "<!-- --schedule -->" and the next empty line."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "optimizers.md"


def rows(help_text, flag):
    """The rows of one table of --help: a name, and the cells between bars."""
    table = re.search(rf"^{flag}: .*\n((?:  .*\n)+)", help_text, re.M)[1]
    return [re.match(r"  (\S+): (.*)", line).groups() for line in table.splitlines()]


def code_flags(text):
    return re.sub("--[a-z][a-z0-9-]*", r"`\g<0>`", text)


def optimizer_row(name, text):
    update, states, flags = map(str.strip, text.split("|"))
    flags = code_flags(", ".join(flag.replace("=", " ") for flag in flags.split()))
    return f"| `{name}` | {update} | {', '.join(states.split()) or 'none'} | {flags} |"


def tables(help_text):
    optimizers = [optimizer_row(*row) for row in rows(help_text, "--optimizer")]
    schedules = [f"| `{name}` | {code_flags(text)} |".replace(" | none |", " | |")
                 for name, text in rows(help_text, "--schedule")]
    return {"--optimizer": ["| | update | states | its flags and their defaults |", "|---|---|---|---|", *optimizers],
            "--schedule": ["| | | DeepSpeed |", "|---|---|---|", *schedules]}


def page(text, help_text):
    for flag, table in tables(help_text).items():
        mark = f"<!-- {flag} -->\n"
        text = re.sub(rf"{mark}.*?\n\n", lambda _: mark + "\n".join(table) + "\n\n", text, flags=re.S)
    return text


if __name__ == "__main__":
    program = sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "cpu" / "train_gpt"
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    PAGE.write_text(page(PAGE.read_text(), said))
