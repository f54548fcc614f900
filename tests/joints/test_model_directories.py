"""Model directories as systems, archivers and hubs leave them, and what judges them: start, container, upload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.resolve.model.files import Directory
from deploy.resolve.model.gguf import parts as deployed_parts
from deploy.s3.lint import lint, list_directory
from handler.config import gguf
from handler.config.model_files import locate, tokenizer_template
from handler.container.model import find_model
from handler.core.errors import ConfigError
from handler.engines.huggingface.files import find_checkpoint
from handler.engines.openvino.model import find_model as find_openvino_model
from handler.scheduler.lora import adapters_of
from tests.unit.engines.test_model_files import CHECKPOINT, SHARD, SPLIT, WHOLE, gguf_file, pair, string

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(64)


def of_type(text: bytes) -> bytes:
    return gguf_file(pair(b"general.type", 8, string(text)), pair(b"general.architecture", 8, string(b"llama")))


PROJECTOR = gguf_file(pair(b"general.architecture", 8, string(b"clip")))
FIRST = gguf_file(
    pair(b"general.architecture", 8, string(b"llama")), pair(b"tokenizer.ggml.tokens", 9, bytes(12)), SPLIT
)
LATER = gguf_file(SPLIT)

JUNK: dict[str, bytes] = {
    ".DS_Store": b"\x00\x00\x00\x01Bud1",
    "Thumbs.db": b"\xd0\xcf\x11\xe0",
    "desktop.ini": b"\xff\xfe[\x00",
    "README.md": b"# A model\n",
    ".gitattributes": b"*.safetensors filter=lfs\n",
    ".git/HEAD": b"ref: refs/heads/main\n",
    ".git/lfs/objects/config.json": b"",
    ".cache/huggingface/download/model.safetensors.abc.incomplete": b"x",
    "__MACOSX/._config.json": APPLE_DOUBLE,
    "original/consolidated.00.pth": b"PK",
    "original/params.json": b"{}",
    **{f"._{name}": APPLE_DOUBLE for name in (*CHECKPOINT, "model.gguf", "tokenizer.model")},
}


def made(directory: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"mmproj-BF16.gguf": PROJECTOR},
        {"a-projector.gguf": of_type(b"mmproj"), "lora.gguf": of_type(b"adapter"), "imatrix.gguf": of_type(b"imatrix")},
        {"a.gguf": POINTER, "b.gguf": b""},
        {**JUNK, "mmproj.gguf": PROJECTOR},
    ],
    ids=["alone", "a projector", "other kinds", "a pointer and an empty file", "what systems leave"],
)
def test_a_gguf_model_is_found_by_its_header(beside: dict[str, bytes], tmp_path: Path) -> None:
    model = made(tmp_path / "m", {"model.gguf": WHOLE, **beside})
    assert locate(str(model)) == ("gguf", model / "model.gguf")
    assert find_openvino_model(str(model)).path == model / "model.gguf"
    assert find_model({"SAGEMAKER_MODEL_PATH": str(model)}).model_id == str(model)
    if b"" not in beside.values():
        assert deployed_parts(Directory(model))[-1:] == ["model.gguf"]


PARTS = {f"m-0000{number}-of-00003.gguf": FIRST if number == 1 else LATER for number in (1, 2, 3)}


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        (PARTS, "", r"holds a model in 3 parts: merge them with `llama-gguf-split --merge m-00001-of-00003\.gguf "),
        ({**PARTS, "mmproj.gguf": PROJECTOR}, "", "holds a model in 3 parts: merge"),
        (PARTS, "m-00001-of-00003.gguf", "is one of the parts of a model in 3 parts: merge"),
        (PARTS, "m-00002-of-00003.gguf", "is one of the parts of a model in 3 parts: merge"),
        ({"m-00002-of-00003.gguf": LATER}, "", "is one of the parts of a model in 3 parts: merge"),
        ({"q4.gguf": WHOLE, "q8.gguf": WHOLE}, "", r"holds 2 \.gguf files; name one of them: q4\.gguf, q8\.gguf"),
        ({"q4.gguf": WHOLE, **PARTS}, "", r"holds 4 \.gguf files; name one of them"),
        ({"mmproj.gguf": PROJECTOR}, "", r"mmproj\.gguf holds no model, but something for one \(mmproj\)"),
        ({"a.gguf": PROJECTOR, "b.gguf": of_type(b"adapter")}, "", "a.gguf holds no model, but something for one"),
        ({"a.gguf": POINTER, "b.gguf": POINTER}, "", "a.gguf is a Git LFS pointer, not the file"),
        ({"a.gguf": b""}, "", "a.gguf is an empty file"),
        ({"._a.gguf": APPLE_DOUBLE}, "", "holds no model"),
        ({f"top/{name}": data for name, data in CHECKPOINT.items()}, "", r"holds no model.*; \S+/top does: name that"),
        ({"top/q4.gguf": WHOLE, "__MACOSX/top/._q4.gguf": APPLE_DOUBLE}, "", r"/top does: name that"),
    ],
)
def test_a_directory_that_is_no_model_says_why(
    files: dict[str, bytes], name: str, message: str, tmp_path: Path
) -> None:
    model = made(tmp_path / "m", files)
    with pytest.raises(ConfigError, match=message):
        find_openvino_model(str(model / name))


def test_the_container_names_the_directory_of_an_archive(tmp_path: Path) -> None:
    model = made(tmp_path / "m", {f"top/{name}": data for name, data in CHECKPOINT.items()})
    with pytest.raises(ConfigError, match=rf"OPTION_MODEL_ID={model}/top;"):
        find_model({"SAGEMAKER_MODEL_PATH": str(model)})


@pytest.mark.parametrize(
    "beside",
    [
        {},
        JUNK,
        {"pytorch_model.bin": b"PK", "training_args.bin": b"PK"},
        {"q4.gguf": WHOLE, "q8.gguf": WHOLE},
        {"model.gguf": WHOLE},
    ],
    ids=["alone", "what systems leave", "torch's weights", "quantizations", "one of GGUF"],
)
def test_a_checkpoint_is_found_whatever_lies_beside_it(beside: dict[str, bytes], tmp_path: Path) -> None:
    model = made(tmp_path / "m", {**CHECKPOINT, **beside})
    assert find_checkpoint(str(model)) == model
    assert find_model({"SAGEMAKER_MODEL_PATH": str(model)}).model_id == str(model)
    listing = list_directory(model)
    sent = {entry.name for entry in listing.files}
    assert {*CHECKPOINT} <= sent
    assert not sent & {name for name in JUNK if not name.startswith(("README", "original/params"))}
    assert not lint(listing.files, lambda name: (model / name).read_bytes())


@pytest.mark.parametrize("name", [*CHECKPOINT, "tokenizer.model"])
@pytest.mark.parametrize(("data", "why"), [(POINTER, "is a Git LFS pointer"), (b"", "is an empty file")])
def test_what_stands_in_the_place_of_a_file_is_named(name: str, data: bytes, why: str, tmp_path: Path) -> None:
    model = made(tmp_path / "m", {**CHECKPOINT, name: data})
    with pytest.raises(ConfigError, match=f"{name} {why}"):
        find_checkpoint(str(model))
    if data and name in (SHARD, "tokenizer.json", "tokenizer.model"):
        found = lint(list_directory(model).files, lambda file: (model / file).read_bytes())
        assert [str(one) for one in found if "pointer" in one.says] == [f"{name}: {found[0].says}"]


def test_torchs_weights_are_looked_at_where_there_are_no_others(tmp_path: Path) -> None:
    pointer = {"pytorch_model.bin": POINTER}
    assert find_checkpoint(str(made(tmp_path / "both", {**CHECKPOINT, **pointer})))
    described = {name: data for name, data in CHECKPOINT.items() if "safetensors" not in name}
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a Git LFS pointer"):
        find_checkpoint(str(made(tmp_path / "alone", {**described, **pointer})))


def test_hidden_files_are_no_tokenizer(tmp_path: Path) -> None:
    files = {name: data for name, data in CHECKPOINT.items() if name != "tokenizer.json"}
    model = made(tmp_path / "m", {**files, "._tokenizer.json": APPLE_DOUBLE})
    with pytest.raises(ConfigError, match="has no tokenizer"):
        find_checkpoint(str(model))


def test_what_macos_packs_is_no_adapter(tmp_path: Path) -> None:
    made(tmp_path, {"__MACOSX/a/._adapter_config.json": APPLE_DOUBLE, "a/adapter_config.json": b"{}"})
    made(tmp_path, {"a/adapter_model.safetensors": b"x", "a/._adapter_model.safetensors": APPLE_DOUBLE})
    assert [*adapters_of(tmp_path)] == ["a"]


def test_early_and_late_headers_say_what_a_file_is(tmp_path: Path) -> None:
    files = {"a": WHOLE, "b": PROJECTOR, "c": of_type(b"mmproj"), "d": of_type(b"model"), "e": FIRST, "f": LATER}
    made(tmp_path, files)
    found = {name: gguf.contents(tmp_path / name) for name in files}
    assert found == {
        "a": ("model", 1), "b": ("mmproj", 1), "c": ("mmproj", 1), "d": ("model", 1), "e": ("model", 3),
        "f": ("model", 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (None, {}, None),
        (None, {"chat_template.json": b'{"chat_template": "A"}'}, "A"),
        (None, {"chat_template.json": b'\xef\xbb\xbf{"chat_template": "A"}'}, "A"),
        (None, {"chat_template.json": b'{"chat_template": [{"name": "default", "template": "A"}]}'}, "A"),
        (None, {"processor_config.json": b'{"chat_template": "A"}'}, "A"),
        (None, {"processor_config.json": b'{"image_processor": {}}'}, None),
        (None, {"chat_template.json": b'{"chat_template": 3}'}, ""),
        ("B", {"chat_template.json": b'{"chat_template": "A"}'}, "B"),
        ("\ufeffB", {}, "B"),
        ({"default": "\ufeffB", "tool_use": "T"}, {}, {"default": "B", "tool_use": "T"}),
    ],
)
def test_the_chat_template_of_a_processor_stands_in_for_the_tokenizer_s(
    own: object, files: dict[str, bytes], expected: object, tmp_path: Path
) -> None:
    assert tokenizer_template(own, made(tmp_path, files)) == expected
