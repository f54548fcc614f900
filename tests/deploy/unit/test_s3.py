"""Model data that SageMaker or an engine cannot load is found before it costs a deployment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import Refused
from deploy.s3.lint import Finding, Level, errors, lint, list_directory, refuse
from deploy.s3.prefix import Entry
from tests.one_test import in_one_test

GOOD = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}


def found(files: dict[str, str], **how: bool) -> list[Finding]:
    return lint([Entry(name, len(text)) for name, text in files.items()], lambda name: files[name].encode(), **how)


def places(findings: list[Finding], level: Level = Level.ERROR) -> list[str]:
    return [finding.file for finding in findings if finding.level is level]


def test_a_complete_model_has_nothing_wrong() -> None:
    assert found(GOOD) == []
    assert found({"model.gguf": "weights"}) == []
    assert found({"openvino_model.bin": "w", "config.json": "{}", "openvino_tokenizer.xml": "<x/>"}) == []


@in_one_test(
    ("files", "place", "says"),
    [
        ({**GOOD, "sub/": ""}, "sub/", "0-byte object"),
        ({**GOOD, "": ""}, "the prefix itself", "0-byte object"),
        ({**GOOD, "sub/": "x"}, "sub/", "ends in a slash"),
        ({**GOOD, "a": "x", "a/b": "x"}, "a", "both a file and a directory"),
        ({**GOOD, "ä" * 128: "x"}, "ä" * 128, "more than 255 bytes"),
        ({}, "", "it contains no files"),
        ({"config.json": "{}", "tokenizer.json": "{}"}, "", "no weights"),
        ({"model.safetensors": "w", "tokenizer.json": "{}"}, "config.json", "missing"),
        ({**GOOD, "config.json": "{"}, "config.json", "not JSON"),
        ({**GOOD, "model.safetensors.index.json": '{"weight_map": {"a": "model-2.safetensors"}}'},
         "model-2.safetensors", "the index names it"),
        ({**GOOD, "model.safetensors.index.json": "[]"}, "model.safetensors.index.json", "not a valid index"),
    ],
)  # fmt: skip
def test_what_cannot_load_is_an_error(files: dict[str, str], place: str, says: str) -> None:
    findings = found(files)
    assert places(findings) == [place]
    assert says in errors(findings)[0].says


def test_a_model_one_directory_too_deep_says_where_it_is() -> None:
    findings = found({f"llama/{name}": text for name, text in GOOD.items()})
    assert errors(findings)[0].advice == "It is in llama/: use that directory."


HUB = {"serving.properties": "engine=Python\noption.model_id = Qwen/Qwen3-8B\n", "model.py": "x = 1\n"}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf", "demo"])
def test_a_directory_without_weights_may_name_a_model_elsewhere(name: str) -> None:
    assert found({**HUB, "serving.properties": f"option.model_id={name}"}) == []


@pytest.mark.parametrize("name", ["/opt/ml/model/weights", "./weights", "weights", ""])
def test_a_directory_that_names_a_path_needs_weights(name: str) -> None:
    assert places(found({**HUB, "serving.properties": f"option.model_id={name}"})) == [""]


def test_a_name_that_nobody_can_read_is_none() -> None:
    assert places(found({**HUB, "serving.properties": "option.model_id=\\u12"})) == [""]


def test_an_isolated_container_fetches_no_model() -> None:
    assert found(HUB) == []
    (error,) = errors(found(HUB, isolated=True))
    assert error.says == "names the model Qwen/Qwen3-8B, which an isolated container cannot download"
    assert error.file == "serving.properties"


def test_what_may_be_meant_is_a_warning() -> None:
    assert places(found({**GOOD, "old.tar.gz": "x", "empty.txt": ""}), Level.WARNING) == ["old.tar.gz", "empty.txt"]
    without = {name: text for name, text in GOOD.items() if name != "tokenizer.json"}
    assert places(found(without), Level.WARNING) == ["tokenizer.json"]
    assert places(found(without, isolated=True)) == ["tokenizer.json"]


def test_code_of_the_model_must_be_there() -> None:
    own = {**GOOD, "config.json": json.dumps({"auto_map": {"AutoModel": "modeling_x.X", "T": ["tok.T", None]}})}
    assert places(found(own, trusts_code=True)) == ["modeling_x.py", "tok.py"]
    assert places(found({**own, "modeling_x.py": "x", "tok.py": "x"}, trusts_code=True)) == []
    assert places(found({**own, "modeling_x.py": "x", "tok.py": "x"}), Level.WARNING) == ["config.json"]


def test_an_isolated_container_fetches_no_code() -> None:
    elsewhere = {**GOOD, "config.json": json.dumps({"auto_map": {"AutoModel": "some/one--modeling_x.X"}})}
    assert places(found(elsewhere, trusts_code=True)) == []
    (error,) = errors(found(elsewhere, trusts_code=True, isolated=True))
    assert error.says == "its code must be downloaded from some/one, which an isolated container cannot do"
    assert "modeling_x.py" in error.advice


def test_a_directory_is_listed_without_what_is_no_model_data(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth", "sub/a.txt",
                 ".git/HEAD", ".cache/x", ".DS_Store"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    listing = list_directory(tmp_path)
    assert [entry.name for entry in listing.files] == ["config.json", "model.safetensors", "sub/a.txt"]
    assert listing.files[0].size == len("config.json")
    assert listing.findings == ()


def test_links_to_files_are_followed_and_others_refused(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_text("twelve bytes")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").symlink_to(blob)
    (model / "gone").symlink_to(tmp_path / "nowhere")
    (model / "folder").symlink_to(tmp_path)
    listing = list_directory(model)
    assert listing.files == (Entry("model.safetensors", 12),)
    assert {finding.file: finding.says for finding in errors(listing.findings)} == {
        "gone": "a broken link",
        "folder": "a link to a directory",
    }
    with pytest.raises(Refused, match="model cannot be loaded: folder") as refused:
        refuse(listing.findings, "model")
    assert "Download the model again" in refused.value.advice


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not a directory"):
        list_directory(tmp_path / "none")


@pytest.mark.parametrize("name", [b"a\nb.txt", b"\xff.txt", b"\x7f"])
def test_names_that_s3_would_not_keep_are_refused(tmp_path: Path, name: bytes) -> None:
    with open(os.fsencode(tmp_path) + b"/" + name, "w") as file:
        file.write("x")
    listing = list_directory(tmp_path)
    assert listing.files == ()
    assert [finding.level for finding in listing.findings] == [Level.ERROR]
    assert str(listing.findings[0]).isascii()


def test_a_directory_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    real = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("below"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [str(finding) for finding in list_directory(tmp_path).findings] == [
        "below: cannot be read: Permission denied"
    ]


def test_a_link_out_of_the_model_is_said_and_a_hub_s_cache_is_fine(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0a1b").write_text("{}")
    (tmp_path / "private").write_text("x")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0a1b")
    assert list_directory(snapshot).findings == ()
    (snapshot / "notes").symlink_to(tmp_path / "private")
    (finding,) = list_directory(snapshot).findings
    assert finding.level is Level.WARNING
    assert "outside the directory" in str(finding)
