"""Text from outside has numbers of the digits 0 to 9 alone, in every room that reads one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.adopt.variables import typed
from deploy.cli import arguments
from deploy.errors import DeployError
from deploy.operations.logs import period
from handler.config.environment import max_adapters
from handler.config.options.option import dotted_value, integer, number
from handler.core.command_line import port, positive
from handler.core.errors import ConfigError, ServingError
from handler.core.numbers import decimal, is_digits, whole
from handler.http.inference import declared_length
from handler.protocols.openai.api import read_page
from handler.protocols.openai.batches import read_batch
from proof.bench.cli import count
from tests.unit.protocols.answers import CONTEXT

ROOT = Path(__file__).parents[3]
OTHERS = ("٣", "３", "३", "²", "1٣", "၃")


@pytest.mark.parametrize("text", OTHERS)
def test_digits_of_other_scripts_are_none(text: str) -> None:
    assert not is_digits(text)
    assert not is_digits(text.encode())
    for read in (whole, decimal):
        with pytest.raises(ValueError, match="ascii"):
            read(text)


def test_all_that_python_reads_of_ascii_stays() -> None:
    assert (is_digits("0123456789"), is_digits(b"7"), is_digits(""), is_digits("-1")) == (True, True, False, False)
    assert (whole(" -1_0 "), decimal("1e-3"), decimal(" inf ")) == (-10, 0.001, float("inf"))
    for read in (whole, decimal):
        with pytest.raises(ValueError, match=r"could not|invalid literal"):
            read("one")


def batch(text: str) -> Any:
    body = {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": f"{text}h"}
    return read_batch(body, ["/v1/completions"], CONTEXT)


READERS: dict[str, Callable[[str], object]] = {
    "option": integer(0),
    "option with a fraction": number(0),
    "port": port,
    "seconds of a command": positive,
    "seconds of lmi deploy": arguments.seconds,
    "number of lmi deploy": arguments.number(100),
    "number of lmi bench": count,
    "period of a log": lambda text: period(f"{text}h"),
    "window of a batch": batch,
    "page of a list": lambda text: read_page({"limit": text}, 100),
}
REFUSALS = (ValueError, argparse.ArgumentTypeError, ServingError, DeployError)


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_digits_of_other_scripts(name: str) -> None:
    READERS[name]("3")
    for text in OTHERS:
        with pytest.raises(REFUSALS):
            READERS[name](text)


@pytest.mark.parametrize("text", OTHERS)
def test_elsewhere_they_are_a_string_or_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (dotted_value(text, is_list=False), dotted_value(f"{text}k", is_list=False)) == (text, f"{text}k")
    assert (typed(text), typed(f"{text}.{text}")) == (text, f"{text}.{text}")
    assert declared_length({"headers_by_name": {"content-length": text}}) == 0
    monkeypatch.setenv("SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY", text)
    with pytest.raises(ConfigError):
        max_adapters()


def test_no_other_place_asks_unicode_what_a_digit_is() -> None:
    """`\\W` and `\\d` together exclude digits of all scripts. The engine's watcher imports nothing."""
    asks = re.compile(r"\.is(?:digit|decimal|numeric)\b|(?<!\\W)\\d")
    sources = [path for room in ("handler", "deploy", "proof") for path in sorted((ROOT / room).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if asks.search(line) and path.name != "numbers.py" and 'os.listdir("/proc")' not in line
    ]
    assert found == []
