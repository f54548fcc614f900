"""The program for a lent GPU, as far as it needs no vLLM: equal settings for all systems, and the calls to make."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.engines.base import EngineConfig
from handler.engines.vllm.arguments import engine_arguments
from tests.gpu.lease import bundle
from tests.gpu.lease.steps import verdicts
from tests.gpu.lease.systems import DEVICES, arguments, options


@pytest.mark.parametrize("name", DEVICES)
def test_our_server_gets_the_settings_of_vllms(name: str) -> None:
    flags = DEVICES[name].flags
    settings = [word for word in options(flags) if word != "-o"]
    config = read_config(overrides=["option.llm_engine=vllm", *settings], environ={}).checked()
    ours = engine_arguments(EngineConfig(config, model=Path("model")), 1, cpu=name == "cpu")
    assert {key: ours.get(key) for key in flags} == dict(flags)
    words = arguments(flags)
    assert words[words.index("--max-num-seqs") + 1] == str(flags["max_num_seqs"])


def test_each_call_carries_one_part_and_the_last_unpacks_and_runs() -> None:
    parts = [Path(f"build/lease/part.{number:02}") for number in range(3)]
    found = list(bundle.calls(parts, "--steps model,start"))
    assert [part for _, part in found] == parts
    assert all(len(command) <= 2000 for command, _ in found), "a call takes 2,000 characters"
    assert ["lease run" in command for command, _ in found] == [False, False, True]


def test_a_cut_suite_tells_what_had_ended() -> None:
    lines = [
        "collecting ... collected 3 items\n",
        "tests/a.py::test_b PASSED [ 33%]\n",
        "tests/a.py::test_c FAILED [ 66%]\n",
    ]
    assert verdicts(lines) == {
        "tests": {"PASSED": 1, "FAILED": 1},
        "not_passed": ["tests/a.py::test_c"],
        "last": "tests/a.py::test_c FAILED [ 66%]",
    }
