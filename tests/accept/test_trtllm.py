"""The acceptance script itself, on the double: it passes what works and says what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doubles import tiny
from tests.doubles.requests import environment
from tests.user_files import write_adapter

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]  # each runs a whole acceptance, which itself notices a hang


def run(model: Path, manners: str, *arguments: str) -> tuple[int, list[str], dict[str, object]]:
    """Exit status, lines, and the verdict that is the last of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.accept.trtllm", str(model), "--timeout", "60", *arguments],
        env={**os.environ, **environment(manners)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    *lines, last = done.stdout.splitlines()
    return done.returncode, lines, json.loads(last)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


def test_it_passes_where_all_is_well(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    status, lines, verdict = run(model, "version=1.3.0;worker", "--adapter", str(adapter))
    assert (status, verdict["verdict"], verdict["failed"]) == (0, "PASS", []), lines
    assert verdict["skipped"] == [
        "as it is: forbidden_words_do_not_come",
        "as it is: images_are_seen_in_their_order_alone_and_in_company",
        "as it is: images_of_the_same_bytes_stay_apart_in_the_prefix_cache",
    ]
    assert "PASS adapter: an_adapter_changes_the_answer" in lines
    assert sum(line.startswith("PASS conformance: ") for line in lines) == 18


@pytest.mark.nightly
def test_it_tries_both_samplers_of_1_2(model: Path) -> None:
    status, lines, verdict = run(model, "version=1.2.1", "--only", "TRTLLMSampler")
    assert (status, verdict["failed"]) == (0, []), lines
    assert "PASS TRTLLMSampler: penalties_act" in lines
    assert "PASS TRTLLMSampler: a_seed_repeats_an_answer_alone_and_in_company" in lines
    assert any("log-probabilities: still broken in this TensorRT-LLM: " in line for line in lines)
    assert "loading the model for 'TRTLLMSampler' ..." in lines


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
@pytest.mark.nightly
def test_it_shows_images_to_a_model_that_takes_them(tmp_path: Path, version: str) -> None:
    status, lines, verdict = run(tiny.make(tmp_path, vision=True), f"version={version}", "--only", "images")
    assert (status, verdict["passed"], verdict["skipped"]) == (0, 2, []), lines


@pytest.mark.parametrize(
    ("manners", "only", "point"),
    [
        pytest.param(
            "version=1.3.0;cancel_all=3",
            "greedy",
            "as it is: loads|as it is: greedy_is_the_same_twice",
            marks=pytest.mark.nightly,
        ),
        ("version=1.3.0;init_fails", "greedy", "as it is: loads"),
        pytest.param(
            "version=1.2.1;assert_logprobs=6", "ignore_eos", "as it is: ignore_eos_goes_on", marks=pytest.mark.nightly
        ),
    ],
)
def test_it_fails_what_does_not_work_and_goes_on(model: Path, manners: str, only: str, point: str) -> None:
    status, lines, verdict = run(model, manners, "--only", only)
    assert (status, verdict["verdict"]) == (1, "FAIL"), lines
    assert set(point.split("|")) & set(verdict["failed"])  # type: ignore[call-overload]


def test_a_word_that_no_point_has_is_said(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.accept.trtllm", str(model), "--only", "nosuchpoint"],
        env={**os.environ, **environment("version=1.3.0")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "accept-trtllm: no point matches --only nosuchpoint"


def test_without_the_package_it_says_what_is_missing(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.accept.trtllm", str(model)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install tensorrt-llm" in done.stderr
