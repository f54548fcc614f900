"""Plots of throughput and latency by load, drawn with matplotlib."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.core import text_files
from handler.core.errors import ConfigError
from proof.bench.machine import taken, where

LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "time between tokens",
    "latency_ms": "time of a whole response",
}
"""Maps the fields of a level that contain percentiles in milliseconds to the names of the measured times."""


@dataclass(frozen=True)
class Level:
    """The results for one load.

    Attributes:
        load: number of concurrent clients, or requests per second.
        tokens_per_second: median over the repetitions.
        each: tokens per second of each repetition.
        engine: tokens per second of the engine alone, or None if it was not measured.
        times: the percentiles p50, p90 and p99 in milliseconds for each name in `LATENCIES`, or None if unknown.
        num_errors: number of failed requests.
        others: number of CPU cores that other processes kept busy in the most disturbed repetition, or None if unknown.
    """

    load: float
    tokens_per_second: float
    each: Sequence[float]
    engine: float | None
    times: Mapping[str, Mapping[str, float | None]]
    num_errors: int
    others: float | None = None


@dataclass(frozen=True)
class Curve:
    """The levels of one document, in ascending order of load.

    Attributes:
        name: short name for a legend.
        subject: description of what was measured.
        work: description of the requests.
        machine: the machine and versions, or "" if they are unknown.
        taken: date and commit, or "" if they are unknown.
        is_open: whether loads are requests per second instead of concurrent clients.
        levels: the results for each load.
        quiet: cores that other processes may keep busy without disturbing a repetition, or None if not measured.
    """

    name: str
    subject: str
    work: str
    machine: str
    taken: str
    is_open: bool
    levels: Sequence[Level]
    quiet: float | None = None

    def is_disturbed(self, level: Level) -> bool:
        """Return whether other processes kept more cores busy than `quiet` in any repetition of a level."""
        return self.quiet is not None and (level.others or 0.0) > self.quiet

    def load_name(self, level: Level) -> str:
        if self.is_open:
            return f"{level.load:g} request{'s' * (level.load != 1)}/s"
        return f"{level.load:g} client{'s' * (level.load != 1)}"


def curve_of(document: Mapping[str, Any], name: str = "") -> Curve:
    """Return the curve of a JSON document from `lmi bench` or `lmi deploy bench`.

    Raises:
        ValueError: the document is not from either command.
    """
    if not ("levels" in document or ("results" in document and "plan" in document)):
        raise ValueError("is not a result of `lmi bench` or `lmi deploy bench`")
    try:
        values = document["levels"] if "levels" in document else document["results"]
        is_open = "rate" in values[0]
        levels = sorted((_level(value, "rate" if is_open else "clients") for value in values), key=lambda it: it.load)
        return Curve(name, *_described(document), is_open, levels, document.get("plan", {}).get("quiet"))
    except KeyError as error:
        raise ValueError(f"does not have the field {error}") from None
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"is not a result of `lmi bench` or `lmi deploy bench`: {error}") from None


def read_curves(paths: Sequence[Path]) -> list[Curve]:
    """Read files that contain a JSON document, possibly after other output. Each curve is named after its file.

    Raises:
        ConfigError: a file cannot be read, or some files contain request rates and others contain client counts.
    """
    alike = len({path.stem for path in paths}) < len(paths)
    curves = [_read(path, str(path) if alike else path.stem) for path in paths]
    if len({curve.is_open for curve in curves}) > 1:
        kinds = ", ".join(f"{curve.name}: {'rates' if curve.is_open else 'concurrent clients'}" for curve in curves)
        raise ConfigError(f"--compare: cannot compare rates with numbers of clients: {kinds}")
    return curves


def _read(path: Path, name: str) -> Curve:
    try:
        lines = text_files.read_text(path).strip()
        try:
            document = json.loads(lines)
        except ValueError:
            document = json.loads(lines.rpartition("\n")[2])
        if not isinstance(document, dict):
            raise ValueError("is not a JSON object")
        return curve_of(document, name)
    except OSError as error:
        raise ConfigError(f"--compare: {path}: {error.strerror}") from None
    except json.JSONDecodeError:
        raise ConfigError(f"--compare: {path}: the last line is not JSON") from None
    except ValueError as error:
        raise ConfigError(f"--compare: {path}: {error}") from None


def _level(value: Mapping[str, Any], load: str) -> Level:
    rate = float(value["tokens_per_second"])
    return Level(
        float(value[load]),
        rate,
        [float(each) for each in value.get("tokens_per_second_each", [rate])],
        value.get("engine_tokens_per_second"),
        {name: dict(value.get(name, {})) for name in LATENCIES},
        sum(value["errors"].values()),
        value.get("others_cores"),
    )


def _described(document: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the values of `subject`, `work`, `machine` and `taken` for `Curve`."""
    if "levels" in document:
        work = f"responses of {document['max_tokens']} tokens, prompts of {document['words']} words"
        return f"endpoint {document['endpoint']}, {document['route']}", work, "", ""
    plan = document["plan"]
    work = f"responses of {plan['tokens']} tokens, prompts of {plan['prompt_words']} words, {_times(plan['repeat'])}"
    return _subject(plan), work, where(document), taken(document)


def _times(repeat: int) -> str:
    return "measured once" if repeat == 1 else f"medians of {repeat} repetitions"


def _subject(plan: Mapping[str, Any]) -> str:
    """Return the URL of the measured server, or the model, engine and options if the command started the server."""
    if not plan["engine"]:
        return str(plan["url"])
    model = [] if plan["engine"] == "echo" else [Path(plan["model"] or "demo model").name]
    return ", ".join([*model, f"engine {plan['engine']}", *plan["options"]])


# -- the plot of one or more measurements: throughput and latency by load, and throughput against latency --------------


# The palette of Okabe and Ito, which color-blind people can distinguish.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GRAY = "#6B6B6B"
_FAILED = "#C00000"
_PERCENTILES: dict[str, dict[str, Any]] = {
    "p50": {"linestyle": "-", "marker": "o", "color": _COLORS[0]},
    "p90": {"linestyle": "--", "marker": "s", "color": _COLORS[1]},
    "p99": {"linestyle": ":", "marker": "^", "color": _COLORS[2]},
}
_LEGEND = {"loc": "best"}  # as by default, but without matplotlib's warning about a slow search
_TITLE, _NOTE = 84, 170  # characters per line
STYLE = {
    "text.parse_math": False,  # do not interpret a `$` in a name
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
    """Draw a plot and save it. The suffix of the file name selects the format.

    Args:
        path: the file to write.
        curves: the curves to draw. The loads are request rates in all curves, or client counts in all curves.
        title: the title, or None for a description of the curves.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        draw(curves, title).savefig(path, dpi=144)


def draw(curves: Sequence[Curve], title: str | None = None) -> Any:
    """Draw a plot and return matplotlib's figure. For the arguments, see `save`."""
    from matplotlib.figure import Figure  # pyplot would need a display and global state

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
    """Draw medians, with bars from the lowest to the highest repetition. Add the engine alone if there is one curve."""
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
    """Draw the percentiles of a latency by load: p50, p90 and p99 for a single curve, p50 and p99 for several."""
    from matplotlib.lines import Line2D

    shown = ("p50", "p90", "p99") if len(curves) == 1 else ("p50", "p99")
    times = [value for curve in curves for percentile in shown for value in _milliseconds(curve, name, percentile)]
    unit, scale = _unit(times)
    for color, curve in _colored(curves):
        loads = [level.load for level in curve.levels]
        for percentile in shown:
            own = _PERCENTILES[percentile] if len(curves) == 1 else {**_PERCENTILES[percentile], "color": color}
            axes.plot(loads, [value * scale for value in _milliseconds(curve, name, percentile)], **own)
    what = LATENCIES[name]
    axes.set(title=f"{what.capitalize()} by load", ylabel=f"{what} [{unit}]")
    _time_axis(axes, [value * scale for value in times])
    gray = {"color": _GRAY} if len(curves) > 1 else {}  # the first panel's legend explains the colors
    axes.legend([Line2D([], [], **{**_PERCENTILES[percentile], **gray}) for percentile in shown], shown, **_LEGEND)


def _against(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw throughput against the median time for a whole response, and label each point with its load."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=2, foreground="white")]  # makes labels legible on lines
    unit, scale = _unit([value for curve in curves for value in _milliseconds(curve, "latency_ms", "p50")])
    highest = max(level.tokens_per_second for curve in curves for level in curve.levels)
    for color, curve in _colored(curves):
        times = [value * scale for value in _milliseconds(curve, "latency_ms", "p50")]
        rates = [level.tokens_per_second for level in curve.levels]
        axes.plot(times, rates, "o-", color=color, label=_short(curve.name) or "served")
        for time, rate, level in zip(times, rates, curve.levels, strict=True):
            if not math.isnan(time):
                below = -7 if rate > 0.08 * highest else 0  # points, to not cover the line or the axis
                label = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": color}
                axes.annotate(f"{level.load:g}", (time, rate), (7, below), path_effects=outline, **label)
    axes.set(title="Throughput against latency", xlabel=f"{LATENCIES['latency_ms']}, p50 [{unit}]")
    axes.set(ylabel="throughput [tokens/s]")
    _from_zero(axes.xaxis, room=0.15)  # room for the label of the last point
    _from_zero(axes.yaxis)
    axes.legend(title=f"points: {_load_label(curves)}", title_fontsize=9, **_LEGEND)


# -- parts -------------------------------------------------------------------------------------------------------------


def _colored(curves: Sequence[Curve]) -> Iterator[tuple[str, Curve]]:
    for index, curve in enumerate(curves):
        yield _COLORS[index % len(_COLORS)], curve


def _short(name: str) -> str:
    """Shorten a name to 24 characters for a legend. Remove a leading `_`, because legends omit names with it."""
    name = name.lstrip("_")
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def _milliseconds(curve: Curve, name: str, percentile: str) -> list[float]:
    """Return a percentile of each level in milliseconds, or NaN, which is not drawn, if there were no responses."""
    values = [level.times[name].get(percentile) for level in curve.levels]
    return [math.nan if value is None else value for value in values]


def _unit(milliseconds: Sequence[float]) -> tuple[str, float]:
    """Choose the unit of an axis, and return it with the conversion factor from milliseconds."""
    largest = max((value for value in milliseconds if not math.isnan(value)), default=0.0)
    return ("s", 0.001) if largest >= 10_000 else ("ms", 1.0)


def _load_label(curves: Sequence[Curve]) -> str:
    return "requests/s" if curves[0].is_open else "concurrent clients"


def _load_axis(axes: Any, curves: Sequence[Curve]) -> None:
    """Add a tick for each load if there is room. The scale is logarithmic if the loads span a factor of 8 or more."""
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
    ticks = _legible(axes, loads)
    axes.set_xticks(ticks, [f"{load:g}" for load in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(_load_label(curves))


def _legible(axes: Any, loads: Sequence[float]) -> list[float]:
    """Return the loads whose labels do not overlap, beginning with the highest load."""
    positions = axes.transScale.transform([(load, 1) for load in loads])[:, 0]
    distance = 0.09 * (positions[-1] - positions[0])  # minimum distance between labels
    ticks: list[tuple[float, float]] = []
    for position, load in zip(reversed(positions), reversed(loads), strict=True):
        if not ticks or ticks[-1][0] - position >= distance:
            ticks.append((position, load))
    return [load for _, load in ticks]


def _time_axis(axes: Any, values: Sequence[float]) -> None:
    """Use a logarithmic scale if the times span a factor of 30 or more, else a scale that begins at 0."""
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
    """Begin an axis at 0 and show all data. `room` is the free space at the end, as a fraction of the largest value."""
    _, largest = axis.get_data_interval()
    axis.axes.set(**{f"{axis.axis_name}lim": (0, (1 + room) * largest if largest > 0 else 1)})
    axis.set_major_formatter("{x:,g}")


def _heading(curves: Sequence[Curve], title: str | None) -> str:
    title = title or (curves[0].subject if len(curves) == 1 else ", ".join(curve.name for curve in curves))
    works = dict.fromkeys(curve.work for curve in curves)
    work = next(iter(works)) if len(works) == 1 else "; ".join(f"{curve.name}: {curve.work}" for curve in curves)
    return "\n".join([*_lines(title, _TITLE, 2), *_lines(work, _TITLE, 2)])


def _note(curves: Sequence[Curve]) -> str:
    """Return when and where the measurements were taken. A machine that is the same for all is listed once."""
    several = len(curves) > 1
    known = [(f"{curve.name}: " if several else "", curve) for curve in curves if curve.taken]
    if len({curve.machine for _, curve in known}) == 1:
        notes = ["; ".join(name + curve.taken for name, curve in known), known[0][1].machine]
    else:
        notes = [f"{name}{curve.taken}; {curve.machine}" for name, curve in known]
    return "\n".join(line for note in notes for line in _lines(note, _NOTE, 3))


def _lines(text: str, width: int, maximum: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=maximum, placeholder=" …")


def _hide_overlaps(figure: Any, axes: Any) -> None:
    figure.draw_without_rendering()
    kept: list[Any] = []
    for text in axes.texts:
        box = text.get_window_extent()
        text.set_visible(not any(box.overlaps(other) for other in kept))
        kept += [box] * text.get_visible()
