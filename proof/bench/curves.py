"""Throughput and latency by load, read from the JSON documents of `lmi bench` and `lmi deploy bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.core import text_files
from handler.core.errors import ConfigError
from proof.bench.machine import taken, where

LATENCIES = ("ttft_ms", "itl_ms", "latency_ms")
"""Fields of a level that contain percentiles: times to the first token, between tokens, and of a whole response."""


@dataclass(frozen=True)
class Level:
    """The results for one load.

    Attributes:
        load: number of concurrent clients, or requests per second.
        tokens_per_second: median over the repetitions.
        each: tokens per second of each repetition.
        times: the percentiles p50, p90 and p99 in milliseconds for each name in `LATENCIES`, or None if unknown.
        num_errors: number of failed requests.
        other_cores: number of CPU cores of other processes in the most disturbed repetition, or None if unknown.
    """

    load: float
    tokens_per_second: float
    each: Sequence[float]
    times: Mapping[str, Mapping[str, float | None]]
    num_errors: int
    other_cores: float | None = None


@dataclass(frozen=True)
class Curve:
    """The levels of one document, in ascending order of load.

    Attributes:
        name: short name for the head of a column.
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
        return self.quiet is not None and (level.other_cores or 0.0) > self.quiet

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
