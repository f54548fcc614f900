"""Curves over load, read from the JSON documents that `lmi bench` and `lmi deploy bench` print as their last line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.bench.machine import taken, where
from handler.core import text_files
from handler.core.errors import ConfigError

LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "time between tokens",
    "latency_ms": "time of a whole answer",
}
"""Fields of a level that hold percentiles in milliseconds, and what they measure."""


@dataclass(frozen=True)
class Level:
    """One load.

    Attributes:
        load: clients at once, or requests a second.
        tokens_per_second: the median of the repetitions.
        each: tokens a second of each repetition.
        engine: tokens a second of the engine alone; None: not measured.
        times: by the names of `LATENCIES`: `p50`, `p90`, `p99` in milliseconds, None without an answer.
        num_errors: requests that failed.
        others: cores that other processes kept busy during the worst repetition; None: not known.
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
    """The levels of one document, by rising load.

    Attributes:
        name: short, for a legend.
        subject: what was measured.
        work: what each request asked for.
        machine: where and with which versions; empty: not known.
        taken: when, and of which commit; empty: not known.
        is_open: the load is requests a second; else clients at once.
        quiet: cores that other processes may keep busy before a repetition counts as disturbed; None: not measured.
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
        """Whether other processes took more of the machine than `quiet` during one of the load's repetitions."""
        return self.quiet is not None and (level.others or 0.0) > self.quiet

    def load_name(self, level: Level) -> str:
        if self.is_open:
            return f"{level.load:g} request{'s' * (level.load != 1)}/s"
        return f"{level.load:g} client{'s' * (level.load != 1)}"


def curve_of(document: Mapping[str, Any], name: str = "") -> Curve:
    """Return a document's curve.

    Raises:
        ValueError: the document is of neither command.
    """
    if not ("levels" in document or ("results" in document and "plan" in document)):
        raise ValueError("is not a result of `lmi bench` or `lmi deploy bench`")
    try:
        values = document["levels"] if "levels" in document else document["results"]
        is_open = "rate" in values[0]
        levels = sorted((_level(value, "rate" if is_open else "clients") for value in values), key=lambda it: it.load)
        return Curve(name, *_described(document), is_open, levels, document.get("plan", {}).get("quiet"))
    except KeyError as error:
        raise ValueError(f"lacks the field {error}") from None
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"is not a result of `lmi bench` or `lmi deploy bench`: {error}") from None


def read_curves(paths: Sequence[Path]) -> list[Curve]:
    """Read documents, or what a command printed, whose last line is the document. Names are the files'.

    Raises:
        ConfigError: a file cannot be read, or the loads are of different kinds.
    """
    alike = len({path.stem for path in paths}) < len(paths)
    curves = [_read(path, str(path) if alike else path.stem) for path in paths]
    if len({curve.is_open for curve in curves}) > 1:
        kinds = ", ".join(f"{curve.name}: {'rates' if curve.is_open else 'clients at once'}" for curve in curves)
        raise ConfigError(f"--compare: the loads are of different kinds: {kinds}")
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
        raise ConfigError(f"--compare: {path}: its last line is not JSON") from None
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
    """Return subject, work, machine and time."""
    if "levels" in document:
        work = f"answers of {document['max_tokens']} tokens, prompts of {document['words']} words"
        return f"endpoint {document['endpoint']}, {document['route']}", work, "", ""
    plan = document["plan"]
    work = f"answers of {plan['tokens']} tokens, prompts of {plan['prompt_words']} words, {_times(plan['repeat'])}"
    return _subject(plan), work, where(document), taken(document)


def _times(repeat: int) -> str:
    return "measured once" if repeat == 1 else f"medians of {repeat} repetitions"


def _subject(plan: Mapping[str, Any]) -> str:
    """Return the URL, or model, engine and options."""
    if not plan["engine"]:
        return str(plan["url"])
    model = [] if plan["engine"] == "echo" else [Path(plan["model"] or "demo model").name]
    return ", ".join([*model, f"engine {plan['engine']}", *plan["options"]])
