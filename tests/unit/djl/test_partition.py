"""The stand-in for the conversion that DJL Serving 0.28 runs when option.rolling_batch=trtllm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(model: str, repo: Path) -> subprocess.CompletedProcess[str]:
    """As Java calls it."""
    return subprocess.run(
        [sys.executable, "-m", "handler.djl.partition", "--properties_dir", "/nowhere",
         "--trt_llm_model_repo", str(repo), "--tensor_parallel_degree", "1", "--pipeline_parallel_degree", "1",
         "--model_path", model],
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("leads_nowhere", [False, True])
def test_the_directory_that_java_hands_on_is_the_model(tmp_path: Path, leads_nowhere: bool) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    repo = tmp_path / "cache" / "trtllm" / "abc"
    if leads_nowhere:  # a link of an earlier start, whose model is gone
        repo.parent.mkdir(parents=True)
        repo.symlink_to(tmp_path / "gone")
    done = run(str(model), repo)
    assert (done.returncode, done.stdout) == (0, "")
    assert (repo / "config.json").read_text() == "{}"


def test_what_is_no_directory_fails_as_java_expects_it(tmp_path: Path) -> None:
    done = run("some/hub-id", tmp_path / "repo")
    assert done.returncode == 1
    assert done.stdout.startswith("ERROR option.model_id=some/hub-id")
    assert not (tmp_path / "repo").exists()
