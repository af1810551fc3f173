"""charts.py: line charts as inline SVG, with the data beside them for the pointer. No library, no network."""
import html
import json
import math

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 34
COLORS = ["#3266c8", "#d4642a", "#2b8a5b", "#a03a9c", "#b8860b", "#4a9fb8", "#c0392b", "#666f7a"]
MAX_POINTS = 600


def ticks_linear(low, high, count=5):
    span = high - low or abs(high) or 1
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= count)
    return [step * k for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def ticks_log(low, high):
    powers = [10.0 ** k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    if len(powers) <= 3:
        powers = [p * m for p in powers for m in (1, 2, 5)]
    elif len(powers) > 7:
        powers = powers[::len(powers) // 6]
    return [p for p in powers if low <= p * 1.0001 and p <= high * 1.0001]


def label(x):
    if x == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size * 10 or (abs(x) >= size and abs(x) % size == 0):
            return f"{x / size:g}{letter}"
    return f"{x:.4g}" if abs(x) >= 1e-3 else f"{x:.0e}".replace("e-0", "e-")


def thin(points):
    """About MAX_POINTS: both ends, and the lowest and highest of each piece, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    kept, pieces = [], MAX_POINTS // 2
    for i in range(pieces):
        piece = points[i * len(points) // pieces:(i + 1) * len(points) // pieces]
        kept += sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])})
    return [points[0], *kept, points[-1]]


class Chart:
    """chart = Chart(title, unit); chart.add(name, x, y, color, style); chart.svg()
    style: "line", "faint" (raw values behind a smoothed line), "dots" (joined), "area" """

    def __init__(self, title, unit="", x_name="step", log_y=False, zero=False):
        self.title, self.unit, self.x_name, self.log_y, self.zero = title, unit, x_name, log_y, zero
        self.series = []

    def add(self, name, x, y, color, style="line"):
        points = [(a, b) for a, b in zip(x, y) if b is not None and math.isfinite(b) and (b > 0 or not self.log_y)]
        if points:
            self.series.append((name, thin(points), color, style))

    def scale(self):
        """The faint lines stretch the axis but for their outer 2 %: extremes may leave the picture."""
        xs = [x for s in self.series for x, _ in s[1]]
        ys = []
        for _, points, _, style in self.series:
            ordered = sorted(y for _, y in points)
            cut = len(ordered) // 50 if style == "faint" else 0
            ys += ordered[cut:len(ordered) - cut]
        ys.sort()
        low, high = ys[0], ys[-1]
        if self.zero:
            low = min(0, low)
        if self.log_y:
            low, high = low / 1.15, high * 1.15
        else:
            pad = (high - low) * 0.05 or abs(high) * 0.05 or 1
            low, high = low - (0 if self.zero and low == 0 else pad), high + pad
        x_low, x_high = min(xs), max(xs)
        if x_low == x_high:
            x_low, x_high = x_low - 1, x_high + 1
        return x_low, x_high, low, high

    def svg(self, chart_id):
        x_low, x_high, low, high = self.scale()
        f = math.log if self.log_y else float

        def px(x):
            return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

        def py(y):
            return TOP + (f(high) - f(y)) / (f(high) - f(low)) * (HEIGHT - TOP - BOTTOM)

        out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(self.title)}">',
               f'<clipPath id="clip-{chart_id}"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
               f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>']
        for y in ticks_log(low, high) if self.log_y else ticks_linear(low, high):
            out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
                       f'<text class="y" x="{LEFT - 7}" y="{py(y) + 4:.1f}">{label(y)}</text>')
        for x in ticks_linear(x_low, x_high, 7):
            out.append(f'<text class="x" x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 18}">{label(x)}</text>')
        out.append(f'<text class="x name" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}">{html.escape(self.x_name)}</text>')
        out.append(f'<g clip-path="url(#clip-{chart_id})">')
        for name, points, color, style in self.series:
            path = "M" + "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in points)
            if len(points) == 1 or style == "dots":
                out += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{color}"/>' for x, y in points]
            dash = ' stroke-dasharray="4 3"' if style == "dots" else ""
            out.append(f'<path class="{style}" data-series="{html.escape(name, True)}" d="{path}" '
                       f'stroke="{color}"{dash}/>')
        out.append('</g><line class="cross" y1="%d" y2="%d"/></svg>' % (TOP, HEIGHT - BOTTOM))
        return "".join(out)

    def html(self, chart_id):
        data = [{"name": n, "color": c, "points": [[x, float(f"{y:.6g}")] for x, y in p]}
                for n, p, c, style in self.series if style != "faint"]
        spec = {"low": self.scale()[0], "high": self.scale()[1], "left": LEFT, "right": RIGHT, "width": WIDTH,
                "x": self.x_name, "series": data}
        keys = "".join(f'<span class="key"><i class="{style}" style="color:{c}"></i>{html.escape(n)}</span>'
                       for n, _, c, style in self.series if style != "faint")
        unit = f' <small>{html.escape(self.unit)}</small>' if self.unit else ""
        return (f'<figure class="chart" id="{chart_id}"><figcaption>{html.escape(self.title)}{unit}</figcaption>'
                f'{self.svg(chart_id)}<div class="keys">{keys}</div><div class="tip"></div>'
                f'<script type="application/json">{json.dumps(spec).replace("<", chr(92) + "u003c")}</script></figure>')


STYLE = """
:root { --ink:#1d2430; --soft:#667080; --line:#e3e7ec; --page:#f6f7f9; --panel:#fff }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e4e8ee; --soft:#98a2b0; --line:#2f3742; --page:#14181e; --panel:#1c222b } }
* { box-sizing:border-box }
body { font:15px/1.45 system-ui,"DejaVu Sans",sans-serif; color:var(--ink); background:var(--page); margin:0 auto;
       max-width:1360px; padding:24px }
h1 { font-size:24px; margin:0 0 2px } h2 { font-size:18px; margin:30px 0 10px } .soft, small { color:var(--soft) }
.grid-of-charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr)); gap:14px }
.chart, .panel { background:var(--panel); border:1px solid var(--line); border-radius:8px; margin:0; padding:12px 14px }
.chart { position:relative } figcaption { font-weight:600; margin-bottom:4px }
small { font-weight:400 } svg { width:100%; display:block }
.grid { stroke:var(--line) } text { font-size:12px; fill:var(--soft) }
text.y { text-anchor:end } text.x { text-anchor:middle } text.name { text-anchor:end }
path { fill:none; stroke-width:1.8; stroke-linejoin:round } path.faint { stroke-width:.8; opacity:.35 }
.cross { stroke:var(--soft); visibility:hidden; pointer-events:none }
.keys { display:flex; flex-wrap:wrap; gap:4px 14px; font-size:13px; color:var(--soft) }
.key i { display:inline-block; width:18px; border-top:3px solid; margin-right:5px; vertical-align:4px }
.key i.dots { border-top-style:dotted }
.tip { position:absolute; top:40px; background:var(--panel); border:1px solid var(--line); border-radius:6px;
       padding:5px 9px; font-size:12px; pointer-events:none; visibility:hidden; white-space:nowrap;
       box-shadow:0 2px 8px #0002 }
.panel { overflow-x:auto } table { border-collapse:collapse; width:100% }
th,td { text-align:left; padding:5px 14px 5px 0; border-bottom:1px solid var(--line); vertical-align:top }
th { font-weight:600 } td.num, th.num { text-align:right; font-variant-numeric:tabular-nums }
tr:last-child td { border-bottom:0 } tr.differs td { font-weight:600 }
pre { white-space:pre-wrap; font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace; margin:0 }
summary { cursor:pointer; font-weight:600 }
.bars td { border:0; padding:3px 10px 3px 0 } .bars div { height:13px; border-radius:3px }
"""

SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const spec = JSON.parse(chart.querySelector('script').textContent);
  const svg = chart.querySelector('svg'), cross = chart.querySelector('.cross'), tip = chart.querySelector('.tip');
  const near = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * spec.width;
    const share = (at - spec.left) / (spec.width - spec.left - spec.right);
    if (share < 0 || share > 1) return;
    const x = spec.low + share * (spec.high - spec.low);
    cross.setAttribute('x1', at);
    cross.setAttribute('x2', at);
    cross.style.visibility = tip.style.visibility = 'visible';
    tip.replaceChildren(...spec.series.map(series => {
      const point = near(series.points, x), line = document.createElement('div');
      line.textContent = `${series.name}  ${spec.x} ${point[0]}:  ${point[1]}`;
      line.style.color = series.color;
      return line;
    }));
    tip.style.left = share < .5 ? `${event.clientX - box.left + 30}px` : '';
    tip.style.right = share < .5 ? '' : `${box.right - event.clientX + 30}px`;
  });
  svg.addEventListener('pointerleave', () => { cross.style.visibility = tip.style.visibility = 'hidden'; });
}
document.documentElement.dataset.ready = document.querySelectorAll('.chart').length;
"""
