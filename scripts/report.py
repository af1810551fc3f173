#!/usr/bin/env python3
"""report.py: one page about a run, or about several side by side.

    scripts/report.py RUN [RUN ...] [-o FOLDER] [--tokens]

RUN is a run folder or its log. Writes into FOLDER (default: the first run's folder)
    report.html   everything in one self-contained file: figures, charts, memory, samples, settings
    loss.png      losses, learning rate and gradient norm, as scripts/plot.py draws them
    speed.png     tokens per second and time of a step
"""
import argparse
import html
import pathlib

from charts import COLORS, SCRIPT, STYLE, Chart
from plot import draw
from runlog import duration, median, open_runs, pyplot, short, smooth

NOT_SETTINGS = {"version", "device", "num_ranks", "model_name", "num_params", "global_batch", "num_steps", "memory"}
PHASES = ("data_ms", "forward_ms", "head_ms", "backward_ms", "recompute_ms", "communication_ms", "optimizer_ms")


def flags_of(log):
    return {key: value for key, value in log.header.items() if key not in NOT_SETTINGS and not isinstance(value, dict)}


# ------------------------------------------------------------------------------------------------------------- charts
def make_charts(logs, x_key):
    """Every chart that these logs have numbers for, with its log fields."""
    x_name = "tokens" if x_key == "tokens_so_far" else "step"
    color = {log.name: COLORS[i % len(COLORS)] for i, log in enumerate(logs)}
    charts = []

    def simple(title, unit, key, style="line", smoothed=False, **kw):
        chart = Chart(title, unit, x_name, **kw)
        for log in logs:
            x, y = log.series(key, x_key)
            if smoothed and len(y) > 20:
                chart.add(f"{log.name} raw", x, y, color[log.name], "faint")
                y = smooth(y)
            chart.add(log.name, x, y, color[log.name], style)
        if chart.series:
            charts.append(chart)

    loss = Chart("Loss", "nats per token", x_name)
    for log in logs:
        x, y = log.series("loss", x_key)
        if len(y) > 20:
            loss.add(f"{log.name} raw", x, y, color[log.name], "faint")
            y = smooth(y)
        loss.add(f"{log.name} training", x, y, color[log.name])
        loss.add(f"{log.name} validation", *log.series("val_loss", x_key), color[log.name], "dots")
    charts.append(loss)
    simple("Validation", "bits per byte", "bits_per_byte", "dots")
    simple("Gradient norm", "before clipping", "norm", smoothed=True, log_y=True)
    simple("Learning rate", "", "lr", zero=True)
    simple("Loss scale", "fp16", "loss_scale", log_y=True)
    simple("Throughput", "tokens per second", "tok_per_s", smoothed=True, zero=True)
    simple("Time of a step", "ms", "step_ms", smoothed=True, zero=True)
    simple("Memory of rank 0's process", "MiB resident", "host_mib", zero=True)
    for log in logs:
        phases = Chart("Phases of a step" + (f": {log.name}" if len(logs) > 1 else ""), "ms", x_name, zero=True)
        for i, key in enumerate(PHASES):
            x, y = log.series(key, x_key)
            phases.add(key[:-3], x, smooth(y), COLORS[i % len(COLORS)])
        if phases.series:
            charts.append(phases)
    return charts


# ------------------------------------------------------------------------------------------------------------- tables
def table(head, rows, numeric=()):
    def cell(tag, i, text):
        return f'<{tag}{" class=num" if i in numeric else ""}>{html.escape(str(text))}</{tag}>'
    out = ["<table><thead><tr>" + "".join(cell("th", i, t) for i, t in enumerate(head)) + "</tr></thead><tbody>"]
    for row, css in rows:
        out.append(f"<tr{css}>" + "".join(cell("td", i, t) for i, t in enumerate(row)) + "</tr>")
    return "".join(out) + "</tbody></table>"


def summary(log):
    header, (_, losses), (_, step_ms) = log.header, log.series("loss"), log.series("step_ms")
    best = min(log.series("val_loss")[1], default=None)
    skipped = sum(step.get("skipped", 0) for step in log.steps)
    return [
        ("model", header.get("model_name", "–")), ("parameters", short(header.get("num_params"))),
        ("device", f"{header.get('num_ranks', 1)} × {header.get('device', '–')}"),
        ("precision", header.get("precision", "–")),
        ("ZeRO stage", header.get("zero", "–")), ("sequences a step", header.get("global_batch", "–")),
        ("steps", f"{log.steps[-1]['step']} of {header.get('num_steps', '–')}"),
        ("skipped", skipped),
        ("tokens", short(log.steps[-1]["tokens_so_far"])), ("last loss", f"{losses[-1]:.4f}"),
        ("validation, last", f"{log.last('val_loss'):.4f}" if best is not None else "–"),
        ("validation, best", f"{best:.4f}" if best is not None else "–"),
        ("bits per byte", f"{log.last('bits_per_byte'):.4f}" if log.last("bits_per_byte") is not None else "–"),
        ("tokens per second", short(median(log.series("tok_per_s")[1]))),
        ("step, median", f"{median(step_ms):.1f} ms" if step_ms else "–"),
        ("time in steps", duration(sum(step_ms) / 1e3)),
        ("last state hash", log.last("state_hash") or "–")]


def summaries(logs):
    columns = [dict(summary(log)) for log in logs]
    rows = [([name, *(column[name] for column in columns)], "") for name in columns[0]]
    return table(["", *(log.name for log in logs)], rows)


def setting(value):
    """A flag as on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(logs):
    """All flags; in bold those in which the runs differ, first."""
    columns = [flags_of(log) for log in logs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        values = [setting(column.get(name, "–")) for column in columns]
        differs = len(set(values)) > 1
        flag = "--" + name.rstrip("_").replace("_", "-")
        rows.append((not differs, ([flag, *values], " class=differs" if differs else "")))
    rows = [row for _, row in sorted(rows, key=lambda row: row[0])]
    return table(["flag", *(log.name for log in logs)], rows)


def memory(log):
    """The memory plan as bars; nothing for older logs, which have none."""
    out = []
    for place, parts in log.header.get("memory", {}).items():
        total = sum(parts.values())
        largest = max(parts.values(), default=0) or 1
        rows = "".join(
            f'<tr><td>{html.escape(name)}</td><td class=num>{mib:,.1f} MiB</td><td style="width:55%">'
            f'<div style="width:{100 * mib / largest:.1f}%;background:{COLORS[i % len(COLORS)]}"></div></td></tr>'
            for i, (name, mib) in enumerate(sorted(parts.items(), key=lambda part: -part[1])) if mib >= 0.05)
        out.append(f"<p><b>{html.escape(place)}</b>, per rank: {total:,.1f} MiB</p><table class=bars>{rows}</table>")
    return "".join(out)


def page(logs, charts):
    title = " · ".join(log.name for log in logs)
    version = html.escape(str(logs[0].header.get("version", "")))
    body = [f"<h1>{html.escape(title)}</h1><p class=soft>train_gpt {version}</p>",
            f'<div class=panel>{summaries(logs)}</div><h2>Curves</h2><div class="grid-of-charts">',
            *(chart.html(f"chart-{i}") for i, chart in enumerate(charts)), "</div>"]
    for heading, section in (("Memory", memory), ("Samples", samples)):
        parts = [(log, section(log)) for log in logs]
        if any(text for _, text in parts):
            body.append(f"<h2>{heading}</h2><div class='grid-of-charts'>")
            body += [f"<div class=panel>{f'<b>{html.escape(log.name)}</b>' if len(logs) > 1 else ''}{text}</div>"
                     for log, text in parts if text]
            body.append("</div>")
    body.append(f"<h2>Settings</h2><details class=panel open><summary>Every flag"
                f"{', in bold what differs' if len(logs) > 1 else ''}</summary>{settings(logs)}</details>")
    return (f'<!doctype html><html lang=en><head><meta charset=utf-8>'
            f'<meta name=viewport content="width=device-width">'
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}"
            f"<script>{SCRIPT}</script></body></html>\n")


def samples(log):
    return "".join(f"<p class=soft>after step {html.escape(str(sample['step']))}</p>"
                   f"<pre>{html.escape(str(sample['sample']))}</pre>"
                   for sample in log.samples[-3:])


# ----------------------------------------------------------------------------------------------------------- pictures
def draw_speed(logs, x_key):
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    for i, log in enumerate(logs):
        color = COLORS[i % len(COLORS)]
        for axes, key in ((top, "tok_per_s"), (bottom, "step_ms")):
            x, y = log.series(key, x_key)
            axes.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
            axes.plot(x, smooth(y), color=color, label=f"{log.name}, median {short(median(y))}")
    top.set_ylabel("tokens per second")
    bottom.set_ylabel("ms a step")
    bottom.set_xlabel("tokens" if x_key == "tokens_so_far" else "step")
    for axes in (top, bottom):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    return figure


def main():
    parser = argparse.ArgumentParser(description="a page about runs of train_gpt")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder or its log")
    parser.add_argument("-o", "--out", type=pathlib.Path, help="folder to write to (default: the first run's)")
    parser.add_argument("--tokens", action="store_true", help="tokens instead of steps on the x axis")
    args = parser.parse_args()
    x_key = "tokens_so_far" if args.tokens else "step"
    logs = open_runs(args.runs)
    names = [log.name for log in logs]
    for log in logs:                                        # a/run and b/run would share a name, and so a colour
        if names.count(log.name) > 1:
            log.name = str(log.path.parent)
    out = args.out or logs[0].path.parent
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(page(logs, make_charts(logs, x_key)))
    draw(logs, x_key, False).savefig(out / "loss.png", dpi=110)
    draw_speed(logs, x_key).savefig(out / "speed.png", dpi=110)
    print(f"wrote {out}/report.html, loss.png, speed.png")


if __name__ == "__main__":
    main()
