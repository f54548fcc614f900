"""Fixtures of the tests in front of other systems: a model whose echo does not end, and echo itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.server import AppServer, serve
from tests.doubles import tiny
from tests.servers import options


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat template has none of its end tokens: an echo of the prompt does not end there."""
    directory = tiny.make(tmp_path_factory.mktemp("tiny"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((directory / name).read_text())
        end = {"eos_token_id": tiny.EOS[1], "eos_token": tiny.SPECIAL[tiny.EOS[1]]}
        values |= {key: value for key, value in end.items() if key in values}
        (directory / name).write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module")
def echo(model: Path) -> Iterator[AppServer]:
    given = options(f"option.echo_tokenizer={model}", f"option.max_model_len={tiny.CONTEXT}")
    with serve("--engine", "echo", *given) as found:
        found.wait_ready()
        yield found
