"""A host of its own in thirty lines: generating text in the caller's process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from unittest import mock

from handler.config.loader import read_config
from handler.core import loop
from handler.serving.start import running
from tests.environment import clean_environment
from tests.examples.programs import EXAMPLES, load
from tests.servers import PATIENCE

OFFLINE = EXAMPLES / "offline.py"


def test_each_line_is_answered() -> None:
    command = [sys.executable, str(OFFLINE), "option.llm_engine=echo", "option.max_model_len=64"]
    done = subprocess.run(
        command, input="a b\n\nc\n", env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, refusal, last = done.stdout.splitlines()
    assert first.startswith(" a b a b")
    assert refusal == "'inputs' must be a non-empty string"
    assert last.startswith(" c c c")


def test_prompts_are_answered_in_their_order_and_none_stays_open() -> None:
    async def story() -> list[str]:
        config = read_config(overrides=["option.llm_engine=echo"], environ={}).checked()
        async with running(config) as model:
            answers: list[str] = await load(OFFLINE).generate(model, ["a b", "c"], max_new_tokens=3)
            assert model.num_requests == 0
        assert model.state == "stopping"
        return answers

    with mock.patch.object(loop, "keep_collecting"):
        assert asyncio.run(story()) == [" a b a", " c c c"]


def test_it_is_short() -> None:
    assert len(OFFLINE.read_text().splitlines()) <= 30
