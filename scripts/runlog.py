"""runlog.py: reads run logs (log.jsonl of a run folder; its format is in data/run_log.h)."""
import json
import pathlib
import re
import sys


class RunLog:
    """A log, also of a running run. `header`: settings; `steps`: step objects, merged by step, in order; `samples`."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.name = self.path.parent.name or self.path.name
        self.header, self.samples, steps = {}, [], {}
        lines = self.path.read_text(errors="replace").splitlines()
        for line_idx, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                if line_idx == len(lines) - 1:              # incomplete: the run is writing it, or was killed
                    break
                sys.exit(f"{program()}: {plain(path)}, line {line_idx + 1}: not JSON: {line[:60]!r}")
            if not isinstance(entry, dict):
                continue
            if "run" in entry:
                self.header.update(entry["run"])
            elif "sample" in entry:
                self.samples.append(entry)
            elif "step" in entry:                           # a resumed run repeats steps: the last one counts
                steps.setdefault(entry["step"], {}).update(entry)
        self.steps = [steps[step] for step in sorted(steps)]
        tokens = sum_tokens = before = 0
        for step in self.steps:                             # a step that is not in the log had as many as the next
            tokens = step.get("tokens", tokens)
            sum_tokens += tokens * (step["step"] - before)
            before = step["step"]
            step["tokens_so_far"] = sum_tokens

    def series(self, key, x_key="step"):
        points = [(s[x_key], s[key]) for s in self.steps if s.get(key) is not None and x_key in s]
        return [x for x, _ in points], [y for _, y in points]

    def last(self, key):
        return next((s[key] for s in reversed(self.steps) if s.get(key) is not None), None)


def plain(text):
    """As a terminal may have it: control characters, which names and values in files may hold, as \\x1b."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", str(text))


def program():
    return pathlib.Path(sys.argv[0]).stem


def find_log(run):
    path = pathlib.Path(run)
    if path.is_dir():
        logs = sorted(path.glob("*.jsonl"))
        if len(logs) != 1:
            sys.exit(f"{program()}: {plain(path)} holds {len(logs)} logs (*.jsonl), expected one")
        path = logs[0]
    if not path.exists():
        sys.exit(f"{program()}: there is no {plain(path)}")
    return path


def open_runs(runs, need_loss=True):
    logs = [RunLog(find_log(run)) for run in runs]
    for log in logs:
        if need_loss and not log.series("loss")[0]:
            sys.exit(f"{program()}: {plain(log.path)} holds no step with a loss yet")
    return logs


def pyplot():
    """matplotlib.pyplot, which takes a second to come up, to draw into files."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError:
        sys.exit(f"{program()}: pictures need matplotlib, which {sys.executable} does not have: run scripts/setup.sh "
                 f"once, then .venv/bin/python scripts/{program()}.py")
    return matplotlib.pyplot


def smooth(values, weight=0.9):
    """Exponential mean, corrected for its start."""
    smoothed, mean = [], 0.0
    for n, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        smoothed.append(mean / (1 - weight**n))
    return smoothed


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def short(x, unit=""):
    """1234567 -> 1.23M; 0.00031 -> 3.1e-04"""
    if x is None:
        return "–"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{letter}{unit}"
    return f"{x:.4g}{unit}" if x == 0 or abs(x) >= 1e-3 else f"{x:.1e}{unit}"


def duration(seconds):
    seconds = int(seconds + 0.5)
    if seconds >= 86400:
        return f"{seconds // 86400}d{seconds // 3600 % 24:02d}h"
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds // 60 % 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s"
