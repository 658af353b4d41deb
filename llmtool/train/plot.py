"""Line plots as SVG text, for a page that needs nothing from a network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 30
MOST_POINTS = 280  # of a line; more are put together, with the span between their extremes behind it
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A series over steps. ``points``: (step, value), by step; one that is not finite is a mark at the top.
    ``marked``: with a dot at each point, for values that are measured now and then."""

    name: str
    points: Sequence[Point]
    marked: bool = False


def plot(lines: Sequence[Line], *, unit: str = "", from_zero: bool = False) -> str:
    """One SVG figure of up to three lines. Grows a logarithmic axis where values span more than a factor of 50."""
    shown = [_thinned(line) for line in lines]
    values = [y for each in shown for _, low, high, _ in each for y in (low, high)]
    steps = [x for line in lines for x, _ in line.points]
    if not values:
        return f'<svg class="plot" viewBox="0 0 {WIDTH} 40"><text x="8" y="24">nothing finite was measured</text></svg>'
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > 50 and not from_zero
    ticks = _decades(low, high) if logarithmic else _ticks(0.0 if from_zero else low, high)
    bottom, top = min(ticks[0], low), max(ticks[-1], high)
    left, right = min(steps), max(max(steps), min(steps) + 1)

    def x_of(step: float) -> float:
        return _LEFT + (step - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        a, b, v = (math.log(each) for each in (bottom, top, value)) if logarithmic else (bottom, top, value)
        share = (v - a) / (b - a) if b > a else 0.5
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    out = [f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in ticks:
        y = y_of(tick)
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                   f'<text class="y" x="{_LEFT - 8}" y="{y + 4:.1f}">{short(tick)}</text>')
    for tick in (tick for tick in _ticks(left, right) if left <= tick <= right and tick == int(tick)):
        out.append(f'<text class="x" x="{x_of(tick):.1f}" y="{HEIGHT - 8}">{short(tick)}</text>')
    for number, (line, points) in enumerate(zip(lines, shown, strict=True)):
        xs = [x_of(x) for x, *_ in points]
        if any(low < high for _, low, high, _ in points):
            edge = [(x, y_of(low)) for x, (_, low, _, _) in zip(xs, points, strict=True)]
            back = [(x, y_of(high)) for x, (_, _, high, _) in zip(xs, points, strict=True)]
            out.append(f'<polygon class="span s{number}" points="{_pairs([*edge, *reversed(back)])}"/>')
        ys = [y_of(mean) for *_, mean in points]
        out.append(f'<polyline class="line s{number}" points="{_pairs(list(zip(xs, ys, strict=True)))}"/>')
        if line.marked or len(points) == 1:
            out += [f'<circle class="dot s{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(line.name)} '
                    f'{short(mean)} {escape(unit)} at step {short(step)}</title></circle>'
                    for x, y, (step, *_, mean) in zip(xs, ys, points, strict=True)]
        out += [f'<text class="lost" x="{x_of(step):.1f}" y="{_TOP + 8}">×<title>not finite at step {short(step)}'
                '</title></text>' for step, value in line.points if not math.isfinite(value)]
    return "".join([*out, "</svg>"])


def short(value: float) -> str:
    """A number as an axis says it: ``1.2e-4``, ``0.25``, ``1500``, ``25k``, ``3M``."""
    size = abs(value)
    if size >= 1e4:
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= factor:
                return f"{value / factor:.4g}{letter}"
    if 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _thinned(line: Line) -> list[tuple[float, float, float, float]]:
    """(step, lowest, highest, mean) of at most MOST_POINTS groups of neighbours."""
    points = [point for point in line.points if math.isfinite(point[1])]
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    out = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        values = [y for _, y in group]
        out.append((group[len(group) // 2][0], min(values), max(values), math.fsum(values) / len(values)))
    return out


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose the span."""
    span = (high - low) or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor * 5 >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, max(last, first + 1) + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 5)
    return [10.0**i for i in range(first, last + every, every)]


def _pairs(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
