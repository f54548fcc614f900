"""The directory that a model id names, with a hub of our own in the place of Hugging Face's."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from handler import engines
from handler.config import model_files
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.core import child_processes
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.huggingface import files as hub_module
from handler.engines.huggingface.files import eos_ids, gguf_file, is_hub_name, prepare_checkpoint, tokenizer_eos_id
from handler.engines.openvino import ir_files
from tests.doubles.downloads import COMMIT, Hub, serve_hub
from tests.environment import clean_environment
from tests.servers import free_port

Fetch = Callable[..., Path]
MODULES = {name: engines.module(name) for name in ENGINES}
"""Not those of `engines`, which refuse an engine that is not installed."""
FILES = {
    "config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "2_Dense/pytorch_model.bin": b"a module of its own",
}
OLD = {"config.json": b"{}", "pytorch_model-00001-of-00002.bin": b"1", "pytorch_model-00002-of-00002.bin": b"2"}
SAME_WEIGHTS = dict.fromkeys(
    (
        "pytorch_model.bin", "pytorch_model.fp32.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot",
        "model.ckpt", "original/consolidated.00.pth", "original/params.json", "consolidated.01.pth", "model.Q4.gguf",
        "model.tflite", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/tokenizer.json", "decoder.onnx",
        "openvino/openvino_model.bin",
    ),
    b"more",
)  # fmt: skip
IR = {
    "config.json": b"{}",
    "openvino_model.xml": b"<net/>",
    "openvino_model.bin": b"weights",
    "model.safetensors": b"w",
}
MODELS = {
    "someone/model": FILES | SAME_WEIGHTS,
    "someone/old": OLD | {"model.ckpt": b"more"},
    "someone/ir": IR,
    "someone/files": {"a.Q4.gguf": b"GGUF", "b.gguf": b"GGUF"},
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub(MODELS) as server:
        yield server


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Fetch:
    """Fetches as a start does: from the hub above, and with one line in the log."""
    for name, value in hub.environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def fetch(engine: str, name: str, revision: str | None = None) -> Path:
        caplog.clear()
        with caplog.at_level("INFO"):
            found = MODULES[engine].fetch(name, EngineConfig(Config(engine_options={"revision": revision})))
        assert caplog.messages == [f"fetching {name} from the hub, unless it is in the cache"]
        return Path(found)

    return fetch


@pytest.mark.parametrize(
    ("engine", "name", "files"),
    [
        ("openai", "someone/model", {"config.json", "tokenizer.json"}),
        ("openvino", "someone/ir", IR.keys() - {"model.safetensors"}),
        ("vllm", "someone/model", FILES.keys()),
        ("trtllm", "someone/old", OLD.keys()),
    ],
)
def test_a_hub_model_is_fetched_as_far_as_the_engine_reads_it(
    fetch: Fetch, engine: str, name: str, files: set[str]
) -> None:
    found = fetch(engine, name)
    fetched = {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}
    assert fetched == {file: MODELS[name][file] for file in files}


def test_a_model_that_was_fetched_is_not_fetched_again(hub: Hub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything asked offline."""
    engine, name = "openai", "someone/model"
    found = fetch(engine, name)
    asked = len(hub.asked)
    assert fetch(engine, name) == found
    assert not any("/resolve/" in path for path in hub.asked[asked:])
    asked = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(engine, name) == found
    assert not hub.asked[asked:]


def test_a_gguf_file_is_fetched_alone(fetch: Fetch) -> None:
    found = fetch("openvino", "someone/files/a.Q4.gguf")
    assert found.read_bytes() == b"GGUF"
    assert [path.name for path in found.parent.iterdir()] == ["a.Q4.gguf"]


@pytest.mark.parametrize(
    ("name", "revision", "wanted"),
    [
        ("someone/model", "nowhere", "'someone/model' here, and the model cannot be fetched from the hub"),
        ("someone/else", None, r"run: hf download someone/else --local-dir else; .* lmi serve \./else$"),
        (
            "someone/files",
            None,
            r"such as someone/files/a\.Q4\.gguf; its files are a\.Q4\.gguf, b\.gguf$",
        ),
        ("someone/files/c.gguf", None, "someone/files on the hub has no file 'c.gguf'"),
    ],
)
def test_what_cannot_be_served_from_the_hub_is_named(
    hub: Hub, fetch: Fetch, name: str, revision: str | None, wanted: str
) -> None:
    asked = len(hub.asked)
    with pytest.raises(ConfigError, match=f"(?s){wanted}"):
        fetch("openvino", name, revision)
    assert not any(path.endswith("model.safetensors") for path in hub.asked[asked:])


def test_a_hub_that_cannot_be_reached_is_named_without_the_librarys_words(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"from the hub: it cannot be reached \(Connection refused\)\. Where the hub"):
        fetch("openvino", "someone/away")


ANSWERS = [
    ("revision/", (200, b"<html>Log in</html>"), r"HF_ENDPOINT does not respond like a hub: JSONDecodeError\("),
    ("revision/", (200, b"[]"), "HF_ENDPOINT does not respond like a hub: TypeError"),
    ("revision/", (200, b"{}"), "HF_ENDPOINT does not respond like a hub: KeyError"),
    (f"resolve/{COMMIT}/model.safetensors", (403, b""), "403 Forbidden"),
    (
        "revision/",
        (401, b"<html>\n\x1b[2J" + b"long" * 10_000),
        r"401 Unauthorized.*<html> \\x1b\[2Jlong.*\.\.\. Where",
    ),
    (
        "revision/",
        (400, b"wrong: Bearer abc.def, hf_abcdefghij"),
        r"wrong: Bearer \*\*\* \*\*\* .*try again\. Where",
    ),
]
DOWNLOADS = """
import json, sys
from handler.core.errors import ConfigError
from handler.engines.huggingface.files import download_checkpoint
for name in sys.argv[1:]:
    try:
        print(json.dumps(str(download_checkpoint(name, None))))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def test_what_a_hub_answers_instead_is_told_in_short(tmp_path: Path) -> None:
    """In one process for all: huggingface_hub takes a third of a second to import, and asks one hub."""
    names = [f"someone/model{number}" for number in range(len(ANSWERS))]
    failures = {f"{name}/{path}": answer for name, (path, answer, _) in zip(names, ANSWERS, strict=True)}
    with serve_hub(dict.fromkeys(names, FILES), failures=failures) as hub:
        ended = subprocess.run(
            [sys.executable, "-c", DOWNLOADS, *names],
            env={**clean_environment(), **hub.environment(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
    for told, (_, _, wanted) in zip(map(json.loads, ended.stdout.splitlines()), ANSWERS, strict=True):
        assert re.search(wanted, told)
        assert len(told) < 800
        assert told.isprintable()


OUTSIDE = ["../" * 9 + "outside", "/{home}/../outside", "..", "a/../../../../../../outside", "../" * 4 + "x/outside"]


def test_no_answer_of_a_hub_names_a_file_outside_its_cache(tmp_path: Path) -> None:
    """Commits, ETags and file names become paths there: each in turn is one that leads outside."""
    home = tmp_path / "a" / "home"
    models: dict[str, dict[str, bytes]] = {}
    failures: dict[str, tuple[int, bytes]] = {}
    headers: dict[str, dict[str, str]] = {}
    for number, text in enumerate(OUTSIDE):
        odd = text.format(home=home)
        for header in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
            models[name := f"someone/{header}{number}"] = {"config.json": b"{}"}
            headers[f"{name}/resolve/"] = {header: f'"{odd}"' if "tag" in header.lower() else odd}
        models[name := f"someone/away{number}"] = {"config.json": b"{}"}  # huggingface_hub notes what is not there
        failures[f"{name}/resolve/"] = 404, b""
        headers[f"{name}/resolve/"] = {"X-Repo-Commit": odd, "X-Error-Code": "EntryNotFound"}
        models[name := f"someone/sha{number}"] = {"config.json": b"{}"}
        failures[f"{name}/revision/"] = 200, json.dumps({"id": name, "sha": odd, "siblings": []}).encode()
        headers[f"{name}/revision/"] = {"Content-Type": "application/json"}
        models[name := f"someone/name{number}"] = {"config.json": b"{}", odd: b"{}"}
    models["someone/plain"] = {"config.json": b"{}", "sub/x.json": b"{}"}
    headers["someone/plain/resolve/"] = {"X-Linked-Etag": f'W/"{"b" * 64}"'}
    with serve_hub(models, failures=failures, headers=headers) as hub:
        ended = subprocess.run(
            [sys.executable, "-c", DOWNLOADS, *models],
            env={**clean_environment(), **hub.environment(home)},
            capture_output=True,
            text=True,
            check=True,
        )
    *refused, plain = map(json.loads, ended.stdout.splitlines())
    assert len(refused) == 6 * len(OUTSIDE)
    assert [told for told in refused if not re.search("cannot be (the|a) |not a valid file path", told)] == []
    assert (Path(plain) / "sub" / "x.json").read_bytes() == b"{}"
    beside = {path for path in tmp_path.rglob("*") if home not in path.parents}
    assert beside == {home, home.parent}
    assert list(home.rglob("outside*")) == []


def test_the_index_of_a_checkpoint_lists_only_its_own_files(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "part/1.safetensors", "b": "../x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lists '\.\./x\.safetensors', which is not a file of this directory"):
        hub_module.weight_files(tmp_path)


def test_no_message_shows_the_password_of_the_hubs_address(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://user:password@hub/api"

    def download(*_: object, **__: object) -> None:
        for handler in logging.getLogger("huggingface_hub").handlers:
            record = logging.LogRecord("huggingface_hub.x", logging.WARNING, "", 1, "while at %s", (address,), None)
            assert handler.filter(record)
            written.append(record.getMessage())
        raise OSError(f"nothing at {address}")

    written: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match=r"nothing at http://\*\*\*@hub/api\. Where"):
        hub_module.download("someone/model", None)
    assert written == ["while at http://***@hub/api"]


def test_what_must_be_converted_is_not_fetched_without_the_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, as another one would find a converter that is installed."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(ir_files, "converter_is_installed", lambda: False)
    monkeypatch.setattr(hub_module, "download_descriptions", lambda name, revision: tmp_path)
    monkeypatch.setattr(hub_module, "download", lambda *_, **__: pytest.fail("fetched"))
    with pytest.raises(ConfigError, match=r"must be converted .*\[convert\].* lmi serve a/b --engine vllm"):
        ir_files.download("a/b", None)


@pytest.mark.parametrize("installed", [True, False])
def test_weights_of_torch_are_for_the_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    asked: list[Sequence[str]] = []

    def download(*_: object, only: Sequence[str] = (), without: Sequence[str] = ()) -> Path:
        asked.append(without)
        return tmp_path

    monkeypatch.setattr(ir_files, "converter_is_installed", lambda: installed)
    monkeypatch.setattr(hub_module, "download", download)
    assert ir_files.download("a/b", None) == tmp_path
    assert (hub_module.TORCH[0] in asked[-1]) is not installed


def test_a_download_that_dies_is_an_error(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    monkeypatch.setattr(child_processes, "python", lambda *_: dies)
    with pytest.raises(ConfigError, match="someone/model was not fetched: the download process exited with status -9"):
        fetch("vllm", "someone/model")


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "openvino", "openai"])
def test_a_model_that_was_not_fetched_is_no_other(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "fetch_demo", lambda: pytest.fail("the demo model"))
    with pytest.raises(ConfigError, match="'someone/model'"):
        MODULES[engine].prepare("someone/model", EngineConfig())


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
    assert eos_ids(EngineConfig(model=tmp_path)) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_ids(EngineConfig(model=tmp_path)) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert eos_ids(EngineConfig(model=tmp_path)) == {3, 4}


def test_end_tokens_of_a_part_for_text_count_and_what_is_no_id_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [2, -1, "</s>", null]}}')
    assert eos_ids(EngineConfig(model=tmp_path)) == {2}


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
    assert eos_ids(EngineConfig(model=tmp_path)) == wanted
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["</s>", 0.0]]}}))  # one of Unigram's
    assert tokenizer_eos_id(tmp_path) is None
