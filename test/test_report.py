"""Reports: the page of report.py in a browser, the pictures, TensorBoard's files, the live view."""
import html
import json
import math
import re
import shutil
import struct
import subprocess
import sys

import init
import pytest
from util import ROOT, gpt2_config, model_write, shard_write, train_gpt

V, C, T = 61, 16, 16
# Moves the pointer over each chart and notes what the tip says; then counts what was drawn.
PROBE = """<script>
const found = [];
for (const chart of document.querySelectorAll('.chart')) {
  const svg = chart.querySelector('svg'), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 50}));
  const words = name => chart.querySelector(name).textContent;
  const paths = [...chart.querySelectorAll('path[data-series]')];
  found.push({title: words('figcaption'), tip: words('.tip'),
              series: paths.map(path => [path.dataset.series, path.getTotalLength()])});
}
document.documentElement.dataset.found = JSON.stringify(found);
</script></body>"""


def tool(name, *words, ok=True):
    run = subprocess.run([sys.executable, ROOT / "scripts" / name, *map(str, words)], capture_output=True, text=True)
    assert (run.returncode == 0) == ok, run.stdout + run.stderr
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the program, and a log with all that a log can hold: fp16, phases, samples, a skipped step."""
    folder = tmp_path_factory.mktemp("report")
    config = gpt2_config(V, C, T, L=2, NH=2)
    model_write(folder / "model", config, init.gpt2_weights(config, 1))
    for split, count, seed in (("train", 3000, 1), ("val", 400, 2)):
        shard_write(folder / "data" / f"{split}_000000.bin", init.tokens(count, V, seed), V)
    train_gpt("-m", folder / "model", "-d", folder / "data", "-n", 30, "-b", 2, "--eval-every", 10, out=folder / "real")
    (folder / "full").mkdir()
    lines = [{"run": {"version": "0.1.0", "device": "H100", "num_ranks": 8, "model_name": "gpt2 <124M>",
                      "num_steps": 3000, "num_params": 124e6, "lr": 0.001, "zero": 2, "auto_": False,
                      "precision": "fp16",
                      "global_batch": 512,
                      "memory": {"device": {"parameters": 240.0, "activations": 900.5}, "host": {"batches": 1.0}}}}]
    for step in range(1, 2001):
        loss = 3 + 8 * math.exp(-step / 300) + 0.1 * math.sin(step)
        entry = {"step": step, "loss": None if step == 700 else loss, "norm": 1 + 1 / step, "tokens": 524288,
                 "lr": 1e-3 * min(1, step / 100), "step_ms": 50 + step % 7, "tok_per_s": 1e6 + step,
                 "skipped": int(step == 700), "loss_scale": 65536 / (2 if step > 700 else 1), "host_mib": 900.0,
                 "forward_ms": 20.0, "backward_ms": 25.0}
        lines.append(entry)
        if step % 500 == 0:
            lines.append({"step": step, "val_loss": loss + 0.1, "val_tokens": 1000, "bits_per_byte": loss / 3})
            lines.append({"step": step, "sample": "Once and <b>so</b> on"})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "full" / "log.jsonl").write_text(text + '{"step": 2001, "lo')          # it is being written
    return folder


def in_browser(page):
    """The page's document after its scripts ran, and what its console said; a screenshot in build/."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt-get install chromium")
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", PROBE))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
             f"--user-data-dir={page.parent}/chromium", "--window-size=1360,2600", "--virtual-time-budget=2000"]
    dom = subprocess.run([browser, *flags, "--dump-dom", f"file://{probe}"], capture_output=True, text=True, timeout=60)
    assert dom.returncode == 0, dom.stderr
    picture = ROOT / "build" / "report.png"
    picture.parent.mkdir(exist_ok=True)
    subprocess.run([browser, *flags, f"--screenshot={picture}", f"file://{page}"], capture_output=True, timeout=60)
    assert picture.stat().st_size > 50000
    return dom.stdout, [line for line in dom.stderr.splitlines() if "CONSOLE" in line]


def test_page_in_a_browser(runs):
    tool("report.py", runs / "full", runs / "real", "-o", runs / "out")
    page = runs / "out" / "report.html"
    text = page.read_text()
    assert not re.search(r'(?:src|href)=|https?://|@import|url\((?!#)', text)         # asks for nothing else
    document, console = in_browser(page)
    assert console == []
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', document)[1]))
    assert f'data-ready="{len(found)}"' in document
    charts = {chart["title"]: chart for chart in found}
    want = {"Loss": ["full training", "full validation", "real training", "real validation"],
            "Gradient norm": ["full", "real"], "Learning rate": ["full", "real"], "Throughput": ["full", "real"],
            "Time of a step": ["full", "real"], "Memory of rank 0": ["full", "real"], "Loss scale": ["full"],
            "Validation": ["full"], "Phases of a step: full": ["forward", "backward"],
            "Phases of a step: real": ["data", "forward", "head", "backward", "optimizer"]}
    for title, names in want.items():
        chart = next(chart for shown, chart in charts.items() if shown.startswith(title))
        drawn = {name: length for name, length in chart["series"] if not name.endswith(" raw")}
        assert sorted(drawn) == sorted(names), title
        assert all(length > 2 for length in drawn.values()), title                   # a line, not a dot
        assert all(name in chart["tip"] for name in names), title                     # and the pointer finds it
    assert len(charts) == len(want)
    for words in ("gpt2 &lt;124M&gt;", "and &lt;b&gt;so&lt;/b&gt; on", "900.5 MiB"):
        assert words in text
    assert "<td>false</td>" in text and "False" not in text                          # as the command line takes it
    assert "<124M>" not in text and "<b>so" not in text


def test_pictures(runs):
    tool("report.py", runs / "real", "--tokens")
    tool("plot.py", runs / "real", runs / "full", "-o", runs / "both.png", "--log")
    for picture in (runs / "real" / "loss.png", runs / "real" / "speed.png", runs / "both.png"):
        assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20000


@pytest.mark.parametrize("name, page", [("plot.py", False), ("report.py", True)])
def test_without_matplotlib(runs, tmp_path, monkeypatch, name, page):
    """One sentence that says what to run; the page, which needs no picture, is written before."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    run = tool(name, runs / "real", "-o", out if page else out / "loss.png", ok=False)
    assert run.stderr.count("\n") == 1 and f"then .venv/bin/python scripts/{name}" in run.stderr
    assert (out / "report.html").exists() == page


def test_smoothing_has_no_bias():
    """Of equal values it is that value, from the first on."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import runlog
    assert runlog.smooth([3.0] * 40) == pytest.approx([3.0] * 40, rel=1e-12)
    assert runlog.smooth([1.0, 2.0], 0.5) == pytest.approx([1.0, 5 / 3])


def test_what_is_no_run(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "log.jsonl").write_text('{"step": 1, "loss": 2}\nnot json\n{"step": 2}\n')
    for words, complaint in ((["nowhere"], "there is no"), (["empty"], "0 logs"), (["bad"], "line 2: not JSON")):
        run = tool("report.py", tmp_path / words[0], ok=False)
        assert complaint in run.stderr and len(run.stderr.splitlines()) == 1


# ---- TensorBoard ------------------------------------------------------------------------------------------------
def crc32c(data):
    """Bit by bit, unlike the table of the writer."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(data):
    """(number, value) of a protobuf message."""
    at = 0

    def varint():
        nonlocal at
        x = shift = 0
        while True:
            at += 1
            x |= (data[at - 1] & 127) << shift
            shift += 7
            if data[at - 1] < 128:
                return x
    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            yield key >> 3, data[at:at + size]
            at += size


def read_events(path):
    data, at, scalars = path.read_bytes(), 0, {}
    assert crc32c(b"123456789") == 0xE3069283                                         # the standard's check value
    while at < len(data):
        size, crc = struct.unpack_from("<QI", data, at)
        assert crc == masked(data[at:at + 8])
        record = data[at + 12:at + 12 + size]
        assert struct.unpack_from("<I", data, at + 12 + size)[0] == masked(record)
        event = dict(fields(record))
        if at == 0:
            assert event[3] == b"brain.Event:2"
        for _, value in fields(event.get(5, b"")):
            value = dict(fields(value))
            scalars.setdefault(value[1].decode(), []).append((event[2], struct.unpack("<f", value[2])[0]))
        at += size + 16
    return scalars


def test_tensorboard(runs):
    tool("tensorboard.py", runs / "real", "-o", runs / "tb")
    path = next((runs / "tb" / "real").glob("events.out.tfevents.*"))
    scalars = read_events(path)
    log = [json.loads(line) for line in (runs / "real" / "log.jsonl").read_text().splitlines()]
    for tag, key in (("loss/train", "loss"), ("lr", "lr"), ("norm", "norm"), ("loss/val", "val_loss")):
        want = [(entry["step"], entry[key]) for entry in log if key in entry]
        assert [step for step, _ in scalars[tag]] == [step for step, _ in want]
        assert [x for _, x in scalars[tag]] == pytest.approx([x for _, x in want], rel=1e-6)


def test_tensorboard_reads_it(runs):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tool("tensorboard.py", runs / "full", "-o", runs / "tb")
    events = loader.EventAccumulator(str(runs / "tb" / "full"), size_guidance={"scalars": 0}).Reload()
    assert len(events.Scalars("loss/train")) == 1999 and events.Scalars("loss_scale")[-1].value == 32768


# ---- the live view ----------------------------------------------------------------------------------------------
def test_watch(runs):
    run = subprocess.run([sys.executable, ROOT / "scripts" / "watch.py", runs / "full", runs / "real", "--once"],
                         capture_output=True, text=True, check=True, env={"COLUMNS": "120", "PYTHONIOENCODING": "utf8"})
    lines = run.stdout.splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert "2000/3000" in lines[1] and re.search(r"\d+m\d\ds left", lines[1]) and lines[1].count("█") == 40
    assert "val 3.2" in lines[2] and "bits per byte" in lines[2]
    spark = lines[3].strip()
    assert len(spark) == 60 and spark[0] == "█" and spark[-1] == "▁"                  # a loss that falls
    assert "scale 32768" in lines[4] and "1 skipped" in lines[4]
    assert "30/30  done" in lines[6]
