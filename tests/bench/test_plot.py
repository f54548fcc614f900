"""The picture: series, axes, units, labels, and that no text is cut off or covered."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
from matplotlib.text import Text

from proof.bench import plot
from proof.bench.plot import Curve, curve_of
from tests.bench.documents import NOTHING, endpoint, level, served

LONG = "a-branch-with-a-rather-long-name-" * 5
OPTIONS = [f"option.some_long_name_{number}=some-long-value-{number}" for number in range(12)]
FAILED = endpoint(
    {"rate": 1, **level(1)}, {"rate": 9, **level(9, tokens_per_second=0.0, errors={"Throttled": 50}, **NOTHING)}
)
PICTURES: dict[str, list[dict[str, Any]]] = {
    "one": [served(1, 8, 32)],
    "one level": [served(4)],
    "many levels": [served(*range(1, 40))],
    "slow": [served(1, 2000)],
    "long names": [served(1, 8, 32, model="/models/" + LONG, options=OPTIONS)],
    "two": [served(1, 8, 32), served(1, 8, 64, scale=2, options=OPTIONS)],
    "seven": [served(1, 2, 3, scale=scale) for scale in range(1, 8)],
    "rates": [served(0.5, 2.5, kind="rate")],
    "failures": [FAILED],
    "wide": [endpoint({"clients": 1, **level(1, itl_ms={"p50": 0.0003, "p90": 10.0, "p99": 4000.0})})],
}


def curves(name: str) -> list[Curve]:
    documents = PICTURES[name]
    names = ["before", f"_{LONG}", "$x$ and $y", *"cdef"] if len(documents) > 1 else [""]
    return [curve_of(document, name) for document, name in zip(documents, names, strict=False)]


@functools.cache
def figure(name: str) -> Any:
    with matplotlib.rc_context(plot.STYLE):
        return plot.draw(curves(name))


def series(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The lines by their color and style."""
    lines = [line for line in axes.lines if line.get_linestyle() != "None"]
    return {f"{line.get_color()} {line.get_linestyle()}": [tuple(xy) for xy in line.get_xydata()] for line in lines}


def texts(drawn: Any) -> list[Text]:
    """What is drawn: an axis also has labels of ticks beyond its ends, which it does not draw."""
    axises = [axis for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = {label for axis in axises for label in axis.get_majorticklabels()}
    inside = set()
    for axis in axises:
        low, high = axis.get_view_interval()
        places = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        inside |= {label for at, label in places if low <= at <= high}
    found = [text for text in drawn.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in found if text not in ticks or text in inside]


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_slow_machine_draws_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=2)
    monkeypatch.setattr("matplotlib.legend.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    with matplotlib.rc_context(plot.STYLE):
        assert len(plot.draw(curves("one")).axes) == 4
    assert next(seconds) > 0  # matplotlib looked at the clock


def test_one_measurement() -> None:
    drawn = figure("one")
    throughput, against, first, between = drawn.axes
    assert drawn.get_suptitle().split("\n") == [
        "tiny, engine vllm",
        "responses of 128 tokens, prompts of 48 words, medians of 3 repetitions",
    ]
    assert [axes.get_title(loc="left") for axes in drawn.axes] == [
        "Throughput by load",
        "Throughput against latency",
        "Time to first token by load",
        "Time between tokens by load",
    ]
    assert [axes.get_xlabel() for axes in drawn.axes] == [
        "concurrent clients",
        "time of a whole response, p50 [ms]",
        "concurrent clients",
        "concurrent clients",
    ]
    assert [axes.get_ylabel() for axes in drawn.axes] == [
        "throughput [tokens/s]",
        "throughput [tokens/s]",
        "time to first token [ms]",
        "time between tokens [ms]",
    ]
    assert list(series(throughput).values()) == [
        [(1, 100), (8, 800), (32, 3200)],
        [(1, 120), (8, 960), (32, 3840)],
    ]
    assert list(series(against).values()) == [[(1100, 100), (1800, 800), (4200, 3200)]]
    assert list(series(first).values()) == [[(n, start + n) for n in (1, 8, 32)] for start in (10, 20, 40)]
    assert list(series(between).values()) == [[(n, (start + n) / 10) for n in (1, 8, 32)] for start in (10, 20, 40)]
    (bars,) = [lines for lines in throughput.collections if lines.get_segments()]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [
        pytest.approx([0.9 * rate, 1.1 * rate]) for rate in (100, 800, 3200)
    ]
    assert labels(throughput) == ["served", "engine alone"]
    assert labels(first) == labels(between) == ["p50", "p90", "p99"]
    assert [text.get_text() for text in against.texts] == ["1", "8", "32"]
    assert against.get_legend().get_title().get_text() == "points: concurrent clients"
    for axes in (throughput, first, between):
        assert [text.get_text() for text in axes.get_xticklabels()] == ["32", "8", "1"]
        assert axes.get_xscale() == "log"
    assert "AMD EPYC, 2 cores, 25 GB" in drawn.get_supxlabel()


def test_two_measurements_have_a_color_each() -> None:
    throughput, against, first, _ = figure("two").axes
    assert labels(throughput) == labels(against) == ["before", "a-branch-wi…r-long-name-"]
    colors = [line.get_color() for line in against.lines]
    assert len(set(colors)) == 2
    assert list(series(first)) == [f"{color} {style}" for color in colors for style in ("-", ":")]
    assert labels(first) == ["p50", "p99"]
    assert [text.get_text() for text in throughput.get_xticklabels()] == ["64", "32", "8", "1"]


def test_a_load_without_an_answer_and_failed_requests() -> None:
    throughput, against, first, _ = figure("failures").axes
    assert labels(throughput) == ["served", "with failed requests"]
    (ring,) = [line for line in throughput.lines if line.get_fillstyle() == "none"]
    assert ring.get_xydata().tolist() == [[9, 0]]
    assert throughput.get_xlabel() == "requests/s"
    assert [text.get_text() for text in first.get_xticklabels()] == ["9", "1"]
    assert first.get_xlim()[1] > 9
    assert [text.get_text() for text in against.texts] == ["1"]


def test_long_times_are_in_seconds() -> None:
    _, against, first, _ = figure("slow").axes
    assert against.get_xlabel().endswith("[s]")
    assert against.lines[0].get_xydata()[-1].tolist() == [201.0, 200_000.0]
    assert first.get_ylabel().endswith("[ms]")


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_cut_off_or_covered(name: str) -> None:
    drawn = figure(name)
    boxes = {text: text.get_window_extent() for text in texts(drawn)}
    assert len(boxes) > 30
    for text, box in boxes.items():
        assert drawn.bbox.x0 <= box.x0 <= box.x1 <= drawn.bbox.x1, f"{text.get_text()!r} is cut off at a side"
        assert drawn.bbox.y0 <= box.y0 <= box.y1 <= drawn.bbox.y1, f"{text.get_text()!r} is cut off"
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
        assert not overlap, f"{one.get_text()!r} covers {other.get_text()!r}"


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(tmp_path: Path, suffix: str, begin: bytes) -> None:
    plot.save(tmp_path / f"p.{suffix}", curves("one"), "A title")
    assert (tmp_path / f"p.{suffix}").read_bytes().startswith(begin)
