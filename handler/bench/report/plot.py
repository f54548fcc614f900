"""The picture of one or more measurements: throughput and latencies by load, and throughput against latency."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from handler.bench.report.curves import LATENCIES, Curve

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's, which the color-blind
_GRAY = "#6B6B6B"  # can tell apart
_FAILED = "#C00000"
_PERCENTILES: dict[str, dict[str, Any]] = {
    "p50": {"linestyle": "-", "marker": "o", "color": _COLORS[0]},
    "p90": {"linestyle": "--", "marker": "s", "color": _COLORS[1]},
    "p99": {"linestyle": ":", "marker": "^", "color": _COLORS[2]},
}
_LEGEND = {"loc": "best"}  # matplotlib's default too, but left unnamed it warns when the search takes over a second
_TITLE, _NOTE = 84, 170  # characters a line
STYLE = {
    "text.parse_math": False,  # a `$` in a name is a `$`
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.markersize": 5,
    "legend.framealpha": 0.85,
    "legend.fontsize": 9,
}


def save(path: Path, curves: Sequence[Curve], title: str | None = None) -> None:
    """Save the picture; the file's suffix chooses the format.

    Args:
        curves: with loads of one kind.
        title: by default the names of what was measured.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        draw(curves, title).savefig(path, dpi=144)


def draw(curves: Sequence[Curve], title: str | None = None) -> Any:
    """Return the matplotlib figure."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure: Any = Figure(figsize=(11, 8.5), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    (throughput, against), (first, between) = figure.subplots(2, 2)
    _throughput(throughput, curves)
    _against(against, curves)
    _latency(first, curves, "ttft_ms")
    _latency(between, curves, "itl_ms")
    for axes in (throughput, first, between):
        _load_axis(axes, curves)
    figure.suptitle(_heading(curves, title), fontsize=13)
    if note := _note(curves):
        figure.supxlabel(note, fontsize=7.5, color=_GRAY)
    _hide_overlaps(figure, against)
    return figure


# -- panels ------------------------------------------------------------------------------------------------------------


def _throughput(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw medians, with bars from the lowest to the highest repetition; of one curve also the engine alone."""
    for color, curve in _colored(curves):
        loads = [level.load for level in curve.levels]
        rates = [level.tokens_per_second for level in curve.levels]
        axes.plot(loads, rates, "o-", color=color, label=_short(curve.name) or "served")
        spread = [
            [rate - min(level.each) for rate, level in zip(rates, curve.levels, strict=True)],
            [max(level.each) - rate for rate, level in zip(rates, curve.levels, strict=True)],
        ]
        axes.errorbar(loads, rates, spread, fmt="none", capsize=3, color=color)
        if len(curves) == 1 and all(level.engine is not None for level in curve.levels):
            axes.plot(loads, [level.engine for level in curve.levels], "x--", color=_GRAY, label="engine alone")
    failed = [level for curve in curves for level in curve.levels if level.num_errors]
    if failed:
        loads, rates = [level.load for level in failed], [level.tokens_per_second for level in failed]
        axes.plot(loads, rates, "o", ms=11, fillstyle="none", color=_FAILED, label="with failed requests")
    axes.set(title="Throughput by load", ylabel="throughput [tokens/s]")
    _from_zero(axes.yaxis)
    axes.legend(**_LEGEND)


def _latency(axes: Any, curves: Sequence[Curve], name: str) -> None:
    """Draw a time's percentiles by load: all three of one curve, p50 and p99 of several."""
    from matplotlib.lines import Line2D

    shown = ("p50", "p90", "p99") if len(curves) == 1 else ("p50", "p99")
    times = [value for curve in curves for percentile in shown for value in _times(curve, name, percentile)]
    unit, scale = _unit(times)
    for color, curve in _colored(curves):
        loads = [level.load for level in curve.levels]
        for percentile in shown:
            own = _PERCENTILES[percentile] if len(curves) == 1 else {**_PERCENTILES[percentile], "color": color}
            axes.plot(loads, [value * scale for value in _times(curve, name, percentile)], **own)
    what = LATENCIES[name]
    axes.set(title=f"{what.capitalize()} by load", ylabel=f"{what} [{unit}]")
    _time_axis(axes, [value * scale for value in times])
    gray = {"color": _GRAY} if len(curves) > 1 else {}  # the first panel says whose color it is
    axes.legend([Line2D([], [], **{**_PERCENTILES[percentile], **gray}) for percentile in shown], shown, **_LEGEND)


def _against(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw throughput against the median time of a whole answer; each point has its load beside it."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=2, foreground="white")]  # legible on a line
    unit, scale = _unit([value for curve in curves for value in _times(curve, "latency_ms", "p50")])
    highest = max(level.tokens_per_second for curve in curves for level in curve.levels)
    for color, curve in _colored(curves):
        times = [value * scale for value in _times(curve, "latency_ms", "p50")]
        rates = [level.tokens_per_second for level in curve.levels]
        axes.plot(times, rates, "o-", color=color, label=_short(curve.name) or "served")
        for time, rate, level in zip(times, rates, curve.levels, strict=True):
            if not math.isnan(time):
                below = -7 if rate > 0.08 * highest else 0  # points; clear of the line, and of the axis
                label = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": color}
                axes.annotate(f"{level.load:g}", (time, rate), (7, below), path_effects=outline, **label)
    axes.set(title="Throughput against latency", xlabel=f"{LATENCIES['latency_ms']}, p50 [{unit}]")
    axes.set(ylabel="throughput [tokens/s]")
    _from_zero(axes.xaxis, room=0.15)  # for the last point's load
    _from_zero(axes.yaxis)
    axes.legend(title=f"points: {_load_label(curves)}", title_fontsize=9, **_LEGEND)


# -- parts -------------------------------------------------------------------------------------------------------------


def _colored(curves: Sequence[Curve]) -> Iterator[tuple[str, Curve]]:
    for index, curve in enumerate(curves):
        yield _COLORS[index % len(_COLORS)], curve


def _short(name: str) -> str:
    """Return a name for a legend, of at most 24 characters; a legend leaves out names that begin with `_`."""
    name = name.lstrip("_")
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def _times(curve: Curve, name: str, percentile: str) -> list[float]:
    """Return milliseconds by level; NaN, which draws nothing, where no answer came."""
    values = [level.times[name].get(percentile) for level in curve.levels]
    return [math.nan if value is None else value for value in values]


def _unit(milliseconds: Sequence[float]) -> tuple[str, float]:
    """Return the unit of an axis, and the factor from milliseconds to it."""
    largest = max((value for value in milliseconds if not math.isnan(value)), default=0.0)
    return ("s", 0.001) if largest >= 10_000 else ("ms", 1.0)


def _load_label(curves: Sequence[Curve]) -> str:
    return "requests/s" if curves[0].is_open else "clients at once"


def _load_axis(axes: Any, curves: Sequence[Curve]) -> None:
    """Put a tick at each load that has room; a logarithmic scale where loads span a factor of 8."""
    from matplotlib.ticker import NullLocator

    loads = sorted({level.load for curve in curves for level in curve.levels})
    first, last = loads[0], loads[-1]
    if last / first >= 8:
        axes.set_xscale("log", base=2)
        room = (last / first) ** 0.05
        axes.set_xlim(first / room, last * room)
    else:
        room = 0.05 * (last - first) or first
        axes.set_xlim(first - room, last + room)
    places = axes.transScale.transform([(load, 1) for load in loads])[:, 0]
    distance = 0.09 * (places[-1] - places[0])  # of two labels
    ticks: list[tuple[float, float]] = []
    for place, load in zip(reversed(places), reversed(loads), strict=True):
        if not ticks or ticks[-1][0] - place >= distance:
            ticks.append((place, load))
    axes.set_xticks([load for _, load in ticks], [f"{load:g}" for _, load in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(_load_label(curves))


def _time_axis(axes: Any, values: Sequence[float]) -> None:
    """Begin at 0; a logarithmic scale where the times span a factor of 30."""
    from matplotlib.ticker import LogLocator, NullLocator

    known = [value for value in values if not math.isnan(value)]
    if known and min(known) > 0 and max(known) / min(known) >= 30:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(known) / min(known) < 3000 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,g}")
    else:
        _from_zero(axes.yaxis)


def _from_zero(axis: Any, room: float = 0.05) -> None:
    """Show all data, from 0; `room` is free beyond the largest, as a share of it."""
    _, largest = axis.get_data_interval()
    axis.axes.set(**{f"{axis.axis_name}lim": (0, (1 + room) * largest if largest > 0 else 1)})
    axis.set_major_formatter("{x:,g}")


def _heading(curves: Sequence[Curve], title: str | None) -> str:
    title = title or (curves[0].subject if len(curves) == 1 else ", ".join(curve.name for curve in curves))
    works = dict.fromkeys(curve.work for curve in curves)
    work = next(iter(works)) if len(works) == 1 else "; ".join(f"{curve.name}: {curve.work}" for curve in curves)
    return "\n".join([*_lines(title, _TITLE, 2), *_lines(work, _TITLE, 2)])


def _note(curves: Sequence[Curve]) -> str:
    """Return when and where: the machine once, if it is the same."""
    several = len(curves) > 1
    known = [(f"{curve.name}: " if several else "", curve) for curve in curves if curve.taken]
    if len({curve.machine for _, curve in known}) == 1:
        notes = ["; ".join(name + curve.taken for name, curve in known), known[0][1].machine]
    else:
        notes = [f"{name}{curve.taken}; {curve.machine}" for name, curve in known]
    return "\n".join(line for note in notes for line in _lines(note, _NOTE, 3))


def _lines(text: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=most, placeholder=" …")


def _hide_overlaps(figure: Any, axes: Any) -> None:
    """Hide the loads that would cover another one."""
    figure.draw_without_rendering()
    kept: list[Any] = []
    for text in axes.texts:
        box = text.get_window_extent()
        text.set_visible(not any(box.overlaps(other) for other in kept))
        kept += [box] * text.get_visible()
