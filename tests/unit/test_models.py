"""`lmi models`: what the caches hold, by name and format, and what goes with a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from handler.models import model_in_use
from tests.environment import clean_environment


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The hub's cache with a whole model and a half fetched one; a conversion, the demo model, a model of S3."""
    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / "0123"
    for name, size in (("config.json", 2), ("model.safetensors", 1_500_000)):
        blob = snapshot.parents[1] / "blobs" / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(bytes(size))
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    half = tmp_path / "hub" / "models--me--half"
    (half / "blobs").mkdir(parents=True)
    (half / "snapshots" / "4567").mkdir(parents=True)
    (half / "blobs" / "ab.incomplete").write_bytes(bytes(10))
    made = tmp_path / "lmi" / "converted" / "fingerprint"
    made.mkdir(parents=True)
    (made / "openvino_model.bin").write_bytes(bytes(3_000_000))
    (made / "lmi_source.txt").write_text(str(snapshot))
    (tmp_path / "lmi" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(bytes(100))
    of_s3 = tmp_path / "lmi" / "download"
    (of_s3 / "a-1").mkdir(parents=True)
    (of_s3 / "a-1" / "model.gguf").write_bytes(bytes(7))
    (of_s3 / "a.lock").write_text("s3://bucket/prefix/\n")
    return tmp_path


def models(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**clean_environment(), "HF_HUB_CACHE": str(cache / "hub"), "LMI_CACHE": str(cache / "lmi")}
    command = [sys.executable, "-m", "handler", "models", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def listed(cache: Path) -> list[list[str]]:
    return [line.rsplit(maxsplit=1)[0].split() for line in models(cache).stdout.splitlines()[1:-1]]


def test_the_caches_are_listed_and_emptied(cache: Path) -> None:
    every = [
        ["demo", "GGUF", "100", "B"],
        ["me/half", "incomplete", "0", "B"],
        ["me/mine", "converted", "3.0", "MB"],
        ["me/mine", "safetensors", "1.5", "MB"],
        ["s3://bucket/prefix/", "GGUF", "7", "B"],
    ]
    assert listed(cache) == every
    document = json.loads(models(cache, "--json").stdout)
    assert [[model["name"], model["format"]] for model in document["models"]] == [row[:2] for row in every]
    assert document["bytes"] == sum(model["bytes"] for model in document["models"])
    assert all(Path(model["path"]).exists() for model in document["models"])
    wrong = models(cache, "rm", "demo", "me/min")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "lmi models rm: no model 'me/min' in the caches; did you mean me/mine?\n",
    )
    assert listed(cache) == every, "nothing is removed then"
    done = models(cache, "rm", "me/mine", "s3://bucket/prefix/")
    assert done.stdout.splitlines() == [
        "removed me/mine (converted, 3.0 MB)",
        "removed me/mine (safetensors, 1.5 MB)",
        "removed s3://bucket/prefix/ (GGUF, 7 B)",
    ]
    assert listed(cache) == every[:2]
    assert models(cache, "rm", "demo", "me/half").returncode == 0
    assert models(cache).stdout == "no models; fetch one with `lmi models get MODEL`\n"


def test_of_a_link_its_files_stay(cache: Path) -> None:
    link, there = cache / "hub" / "models--me--mine", cache / "elsewhere"
    link.rename(there)
    link.symlink_to(there)
    done = models(cache, "rm", "me/mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"removed the link to me/mine; its files stay in {there}"
    assert not link.is_symlink()
    assert (there / "blobs" / "model.safetensors").is_file()


def test_files_that_a_process_has_open_are_in_use(tmp_path: Path) -> None:
    path = tmp_path / "model" / "weights"
    path.parent.mkdir()
    path.touch()
    assert model_in_use([tmp_path / "model"]) is None
    with path.open():
        assert model_in_use([tmp_path / "mod", tmp_path / "model"]) == (os.getpid(), tmp_path / "model")


def test_get_tells_what_a_start_would(cache: Path) -> None:
    (cache / "empty").mkdir()
    (cache / "empty" / "tokenizer.json").write_text("{}")
    (cache / "empty" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    found = models(cache, "get", str(cache / "empty"), "--engine", "openvino")
    assert found.returncode == 2
    assert found.stderr.endswith(
        f"{cache / 'empty'} has a config.json but no weights: no .safetensors files, no pytorch_model*.bin\n"
    )
