"""Which directory a model id names, with a hub of our own in the place of Hugging Face's."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.core.errors import ConfigError
from handler.engines.huggingface.checkpoint import eos_ids, prepare_checkpoint, tokenizer_eos_id

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"eos_token_id": 2}',
    "model.safetensors": b"weights",
    "original/consolidated.00.pth": b"more",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of one for `someone/model`."""

    asked: list[str]

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.asked.append(self.path)
        name = self.path.rpartition(f"/someone/model/resolve/{COMMIT}/")[2]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'}
        if self.path.startswith("/api/models/someone/model"):
            known = any(self.path.startswith(f"/api/models/someone/model/{it}") for it in ("revision/main", "tree"))
            tree = [{"type": "file", "path": file, "size": len(data), "oid": file} for file, data in FILES.items()]
            siblings = [{"rfilename": file} for file in FILES]
            found = tree if "/tree/" in self.path else {"id": "someone/model", "sha": COMMIT, "siblings": siblings}
            self.send(200 if known else 404, json.dumps(found).encode(), {"Content-Type": "application/json"})
        elif name in FILES:
            self.send(200, FILES[name], headers)
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """Its address."""
    Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


ASK = """
import sys
from handler.engines.huggingface.checkpoint import prepare_checkpoint
from handler.core.errors import ConfigError
try:
    print(prepare_checkpoint("someone/model", {"revision": sys.argv[1]} if sys.argv[1:] else {}))
except ConfigError as error:
    print(error)
"""


def ask(hub: str, home: Path, *revision: str) -> str:
    """In a process of its own: the hub's address is read when its library is imported."""
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", ASK, *revision]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_hub_id_is_fetched_without_other_forms_of_the_weights(hub: str, tmp_path: Path) -> None:
    found = Path(ask(hub, tmp_path))
    assert {path.name for path in found.iterdir()} == {"config.json", "model.safetensors"}
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert not any("consolidated" in path for path in Hub.asked)


def test_a_revision_that_is_not_there_is_named(hub: str, tmp_path: Path) -> None:
    assert "'someone/model' cannot be had from the hub" in ask(hub, tmp_path, "nowhere")


def test_a_directory_is_served_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert prepare_checkpoint(str(tmp_path), {}) == tmp_path


def test_what_is_no_hugging_face_directory_is_refused_by_kind(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text("")
    with pytest.raises(ConfigError, match="is a openvino model; this engine serves Hugging Face model directories"):
        prepare_checkpoint(str(tmp_path), {})
    with pytest.raises(ConfigError, match="there is no model at 'nothing'"):
        prepare_checkpoint("nothing", {})


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
