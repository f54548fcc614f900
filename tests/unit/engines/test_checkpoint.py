"""Which directory a model id names, with a hub of our own in the place of Hugging Face's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.core.errors import ConfigError
from handler.engines.huggingface.checkpoint import eos_ids, prepare_checkpoint, tokenizer_eos_id
from handler.engines.huggingface.hub import gguf_file, is_hub_name
from tests.doubles.hub import Hub, serve_hub

FILES = {
    "config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "original/consolidated.00.pth": b"more",
}
IR = {
    "config.json": b"{}",
    "openvino_model.xml": b"<net/>",
    "openvino_model.bin": b"weights",
    "model.safetensors": b"w",
}
MODELS = {
    "someone/model": FILES,
    "someone/ir": IR,
    "someone/files": {"a.Q4.gguf": b"GGUF", "b.gguf": b"GGUF"},
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub(MODELS) as server:
        yield server


FETCH = """
import sys
from handler.core.errors import ConfigError
from handler.engines import fetch
from handler.engines.base import EngineConfig
from handler.engines.openvino import convert
convert.converter_is_installed = lambda: False
try:
    print(fetch(sys.argv[1], sys.argv[2], EngineConfig(options={"revision": sys.argv[3]} if sys.argv[3:] else {})))
except ConfigError as error:
    print(error)
"""


def fetch(hub: Hub, home: Path, engine: str, name: str, *revision: str) -> str:
    """In a process of its own: the hub's address is read when its library is imported."""
    command = [sys.executable, "-c", FETCH, engine, name, *revision]
    done = subprocess.run(command, env=os.environ | hub.environment(home), capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("engine", "name", "files"),
    [
        ("openai", "someone/model", {"config.json", "tokenizer.json"}),
        ("openvino", "someone/ir", IR.keys() - {"model.safetensors"}),
    ],
)
def test_a_hub_model_is_fetched_as_far_as_the_engine_reads_it(
    hub: Hub, tmp_path: Path, engine: str, name: str, files: set[str]
) -> None:
    found = Path(fetch(hub, tmp_path, engine, name))
    assert {str(path.relative_to(found)) for path in found.rglob("*")} == files
    asked = len(hub.asked)
    assert fetch(hub, tmp_path, engine, name) == str(found)
    assert not any("/resolve/" in path for path in hub.asked[asked:])


def test_a_checkpoint_is_fetched_without_other_formats_of_the_weights(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    script = "from handler.engines.huggingface.hub import fetch; print(fetch('someone/model', None))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = Path(done.stdout.strip())
    assert {path.name for path in found.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert not any("consolidated" in path for path in hub.asked)


def test_a_gguf_file_is_fetched_alone(hub: Hub, tmp_path: Path) -> None:
    found = Path(fetch(hub, tmp_path, "openvino", "someone/files/a.Q4.gguf"))
    assert found.read_bytes() == b"GGUF"
    assert [path.name for path in found.parent.iterdir()] == ["a.Q4.gguf"]


@pytest.mark.parametrize(
    ("name", "revision", "wanted"),
    [
        ("someone/model", ["nowhere"], "'someone/model' here, and the model cannot be fetched from the hub"),
        ("someone/else", [], r"run: hf download someone/else --local-dir else; .* lmi serve \./else$"),
        ("someone/files", [], r"name a file of GGUF with its name: someone/files/FILE\.gguf"),
        ("someone/files/c.gguf", [], "someone/files on the hub has no file 'c.gguf'"),
        ("someone/model", [], r"has to be converted .*'\.\[convert\]'.* lmi serve someone/model --engine vllm"),
    ],
)
def test_what_cannot_be_served_from_the_hub_is_named(
    hub: Hub, tmp_path: Path, name: str, revision: list[str], wanted: str
) -> None:
    asked = len(hub.asked)
    assert re.search(wanted, fetch(hub, tmp_path, "openvino", name, *revision), re.DOTALL)
    assert not any(path.endswith("model.safetensors") for path in hub.asked[asked:])


def test_a_path_of_the_users_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert not any(map(is_hub_name, ("owner/model", "./model", "../model", "/a/b", "demo", None)))
    assert is_hub_name("owner/other")
    assert gguf_file("owner/model/missing.gguf") is None
    assert gguf_file("owner/other/sub/a.gguf") == ("owner/other", "sub/a.gguf")


def test_a_directory_is_served_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert prepare_checkpoint(str(tmp_path)) == tmp_path


def test_what_is_no_hugging_face_directory_is_refused_by_kind(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text("")
    with pytest.raises(ConfigError, match="is a openvino model; this engine serves Hugging Face model directories"):
        prepare_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no model at 'nothing'"):
        prepare_checkpoint("nothing")


def test_end_tokens_are_those_of_the_generation_config_before_the_models(tmp_path: Path) -> None:
    assert eos_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_ids(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert eos_ids(tmp_path) == {3, 4}


@pytest.mark.parametrize(
    ("files", "own", "wanted"),
    [
        ({"tokenizer_config.json": {"eos_token": "<end>"}}, 9, {2, 9}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<end>", "special": True}}}, 9, {2, 9}),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "</s>"}}, 7, {2, 7}),
        ({"tokenizer_config.json": {"eos_token": "<other>"}}, None, {2}),  # which is no token
        (
            {"tokenizer_config.json": {"eos_token": "<end>"}, "generation_config.json": {"eos_token_id": [3, 9]}},
            9,
            {3, 9},
        ),
        ({"tokenizer_config.json": {"eos_token": None}}, None, {2}),
    ],
)
def test_the_tokenizers_end_is_one_too(
    tmp_path: Path, files: dict[str, object], own: int | None, wanted: set[int]
) -> None:
    tokenizer = {"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {"a": 0, "</s>": 7}}}
    for name, content in {"config.json": {"eos_token_id": 2}, "tokenizer.json": tokenizer, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenizer_eos_id(tmp_path) == own
    assert eos_ids(tmp_path) == wanted
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["</s>", 0.0]]}}))  # one of Unigram's
    assert tokenizer_eos_id(tmp_path) is None
