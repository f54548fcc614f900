"""Files as systems, archivers and hubs write them, by the command or the reader that gets them."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import re
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from deploy.adopt.files import read_file
from deploy.cli.arguments import body_of
from deploy.errors import DeployError, SpecError
from deploy.resolve.model.files import Directory
from deploy.resolve.model.gguf import gguf_shape
from deploy.resolve.model.gguf import parts as deployed_parts
from deploy.s3.archive import read_archive
from deploy.s3.lint import lint, list_directory
from deploy.s3.prefix import Entry
from deploy.spec.reading import read_spec
from handler import cli
from handler.config import gguf, model_files
from handler.config.config import Config
from handler.config.loader import read_server_config
from handler.config.model_files import file_values, locate, tokenizer_template
from handler.container import djl
from handler.container.arguments import ContainerArguments, ModelSource, find_model
from handler.core.errors import AdapterFailed, ConfigError
from handler.djl.startup import read_properties
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import check_checkpoint, find_checkpoint
from handler.engines.openvino.model import find_model as find_openvino_model
from handler.plugins.functions import check_model_py, find_formatters
from handler.scheduler.lora import adapter_path, adapters_of
from proof.bench.curves import read_curves
from proof.conform import report
from proof.replay.exchange import Unreadable
from proof.replay.sources import open_requests
from tests.bench.documents import served
from tests.deploy.doubles.archives import archive
from tests.doubles.steps import steps
from tests.unit.config.gguf_files import SPLIT, WHOLE, gguf_file, pair, string
from tests.unit.engines.test_model_files import CHECKPOINT, SHARD

# -- encodings ---------------------------------------------------------------------------------------------------------
# Encodings and files: each file that a user gives, as systems write it, by the command or the reader that takes it.


Take = Callable[[Path], object]
"""Reads a file, and returns what must not depend on its encoding."""


def properties(file: Path) -> object:
    return read_server_config(properties=file).config.model_id


def properties_under_djl(file: Path) -> object:
    target = file.parent / "scratch" / "model"
    djl.make_model(ContainerArguments(8080, ()), ModelSource(file.parent, None, {}), {}, target, (0, 36, 0))
    return read_server_config(properties=target / "serving.properties").config.model_id


def properties_in_djls_worker(file: Path) -> object:
    return read_properties({"model_dir": str(file.parent)}, asynchronous=True).config.model_id


def properties_before_upload(file: Path) -> object:
    return lint([Entry(file.name, 9)], lambda name: file.read_bytes(), isolated=True)


def template(file: Path) -> object:
    return model_files.chat_template(Config(chat_template=str(file)))


def invoked(file: Path) -> object:
    return body_of(argparse.Namespace(parameters=(), json=None, body=f"@{file}"))


def piped(file: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
        return body_of(argparse.Namespace(parameters=(), json=None, body=None))


def adapter(file: Path) -> object:
    (file.parent / "adapter_model.safetensors").touch()
    return adapter_path(str(file.parent), None)


def checkpoint(file: Path) -> object:
    for name, data in CHECKPOINT.items():
        if name != file.name:
            (file.parent / name).write_bytes(data)
    check_checkpoint(file.parent)
    return None


def generation(file: Path) -> object:
    return file_values(Config(generation_config=str(file.parent)), None)


def recording(file: Path) -> object:
    found = list(open_requests(str(file)))
    for one in found:
        if isinstance(one, Unreadable):
            raise ConfigError(f"{one.location}: {one.reason}")
    return found


def model_py(file: Path) -> object:
    check_model_py(file)
    return [*find_formatters(file.parent).inputs]


def conformity(file: Path) -> object:
    return report.read([file])


def compared(file: Path) -> object:
    return [curve.name for curve in read_curves([file])]


_REQUEST = '{"path": "/invocations",\t"body": {"inputs": "é"}}\n'
_BATCH = '{"custom_id": "é", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
_HAR = (
    '{"log": {"entries": [\n{"request": {"method": "POST", "url": "http://a/b", "postData": {"text": "é"},\n'
    '"headers": []}}]}}\n'
)
_MODEL_PY = (
    "from handler.formatters import input_formatter\n\n\n@input_formatter\n"
    'def naïve(inputs, **_):\n    """é"""\n    return inputs\n'
)
_SPEC = (
    "name: llama  # é\nrole: arn:aws:iam::111122223333:role/x\nimage: {repository: x}\nmodel: {id: a/b}\ntags: {a: é}\n"
)
_MODEL = '{"Model": {\n"ModelName": "é", "PrimaryContainer": {"Image": "x", "Environment": {"A": "b"}}}}\n'

FILES: dict[str, tuple[str, Take, str]] = {
    "properties": ("any.properties", properties, "option.model_id=/é\noption.dtype=fp16\n"),
    "properties under DJL": ("serving.properties", properties_under_djl, "option.model_id=a/b\n# é\n"),
    "properties in DJL's worker": (
        "serving.properties",
        properties_in_djls_worker,
        "option.model_id=a/b\n# é\noption.llm_engine=echo\n",
    ),
    "properties before an upload": ("serving.properties", properties_before_upload, "option.model_id=a/b\n# é\n"),
    "chat template": ("chat.jinja", template, "{% for m in messages %}\né{% endfor %}\n"),
    "deployment": ("spec.yaml", lambda file: read_spec(file), _SPEC),
    "adopted": ("model.json", lambda file: read_file(file), _MODEL),
    "invoked": ("body.json", invoked, '{"inputs":\n"é"}\n'),
    "piped": ("body.json", piped, '{"inputs":\n"é"}\n'),
    "adapter": ("adapter_config.json", adapter, '{"r": 8,\n"base_model_name_or_path": "é"}\n'),
    "config.json": ("config.json", checkpoint, '{"model_type": "llama",\n"_name_or_path": "é"}\n'),
    "tokenizer.json": ("tokenizer.json", checkpoint, '{"version": "1.0",\n"model": "é"}\n'),
    "tokenizer_config.json": ("tokenizer_config.json", checkpoint, '{"eos_token":\n"é"}\n'),
    "generation config": ("generation_config.json", generation, '{"temperature": 0.5,\n"_": "é"}\n'),
    "requests": ("r.jsonl", recording, _REQUEST),
    "batch": ("b.jsonl", recording, _BATCH),
    "HAR": ("a.har", recording, _HAR),
    "model.py": ("model.py", model_py, _MODEL_PY),
    "conform's report": ("c.json", conformity, '{"conform": "1",\n"title": "é", "results": []}\n'),
    "bench's report": ("b.log", compared, "é\n" + json.dumps(served(1)) + "\n"),
}
"""A file's name, what takes it, and a text with a letter outside ASCII."""

WITHOUT_MARK = ("adapter", "config.json", "tokenizer.json", "tokenizer_config.json")
"""Files that transformers, vLLM and tokenizers read too, and refuse with a mark."""

READ: dict[str, Callable[[str], bytes]] = {
    "mark": lambda text: text.encode("utf-8-sig"),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "mark and CRLF": lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
    "CR": lambda text: text.replace("\n", "\r").encode(),
}
REFUSED: dict[str, tuple[Callable[[str], bytes], str]] = {
    "UTF-16, little end": (lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"), "UTF-16"),
    "UTF-16, big end": (lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"), "UTF-16"),
    "UTF-16 without a mark": (lambda text: text.encode("utf-16-le"), "UTF-16"),
    "ISO 8859-1": (lambda text: text.encode("iso-8859-1"), r"not UTF-8(: byte 0xe9|$)|line 5.*0xef"),
}
FAILURES = (ConfigError, DeployError, AdapterFailed)


def put(directory: Path, name: str, data: bytes) -> Path:
    directory.mkdir()
    file = directory / name
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("encoding", READ)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_read_as_if_it_were_plain_utf_8(kind: str, encoding: str, tmp_path: Path) -> None:
    name, take, text = FILES[kind]
    file = put(tmp_path / "plain", name, text.encode())
    plain = take(file)
    other = put(tmp_path / "other", name, READ[encoding](text))
    if kind in WITHOUT_MARK and encoding.startswith("mark"):
        with pytest.raises(FAILURES, match=rf"{name}.* byte order mark"):
            take(other)
        return
    found = take(other)
    assert str(found).replace("/other", "/plain").replace("\\r", "\\n") == str(plain)


@pytest.mark.parametrize("encoding", REFUSED)
@pytest.mark.parametrize("kind", FILES)
def test_another_encoding_is_refused_by_the_file_s_name(kind: str, encoding: str, tmp_path: Path) -> None:
    name, take, text = FILES[kind]
    encode, why = REFUSED[encoding]
    file = put(tmp_path / "other", name, encode(text))
    if kind.startswith("properties"):
        if encoding == "ISO 8859-1":  # as Java reads them
            assert "Problem" not in str(take(file))
            return
        if kind in ("properties", "properties in DJL's worker"):
            with pytest.raises(ConfigError, match=f"{name}.*{why}"):
                read_server_config(properties=file).checked()
            return
    if kind == "properties before an upload":
        assert [str(finding) for finding in lint([Entry(name, 9)], lambda _: file.read_bytes())]
        return
    place = "standard input" if kind == "piped" else re.escape(name)
    with pytest.raises(FAILURES, match=f"(?s){place}.*({why})"):
        take(file)


@pytest.mark.parametrize("encoding", READ)
def test_the_first_option_counts_whatever_the_file_begins_with(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = put(tmp_path / "other", "s.properties", READ[encoding]("option.model_id=/nowhere\noption.dtype=fp16\n"))
    assert cli.main(["serve", "--check", "--properties", str(file)]) == 2
    assert "/nowhere" in capsys.readouterr().err


# -- model directories -------------------------------------------------------------------------------------------------
# Model directories as systems, archivers and hubs leave them, and what judges them: start, container, upload.


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(64)


def of_type(text: bytes) -> bytes:
    return gguf_file(pair(b"general.type", 8, string(text)), pair(b"general.architecture", 8, string(b"llama")))


PROJECTOR = gguf_file(pair(b"general.architecture", 8, string(b"clip")))
FIRST = gguf_file(
    pair(b"general.architecture", 8, string(b"llama")), pair(b"tokenizer.ggml.tokens", 9, bytes(12)), SPLIT
)
LATER = gguf_file(SPLIT)

STRING, LIST = 8, 9
KINDS = {
    "number": (4, struct.pack("<I", 7)),
    "negative number": (5, struct.pack("<i", -7)),
    "fraction": (6, struct.pack("<f", float("nan"))),
    "flag": (7, b"\1"),
    "string": (STRING, string(b"\xff")),
    "list of numbers": (LIST, struct.pack("<IQI", 4, 1, 1)),
    "list of flags": (LIST, struct.pack("<IQ?", 7, 1, True)),
    "list of strings": (LIST, struct.pack("<IQ", STRING, 1) + string(b"x")),
    "empty list": (LIST, struct.pack("<IQ", 4, 0)),
}
NAMES = [
    "general.type",
    "general.architecture",
    "general.alignment",
    "split.count",
    "llama.context_length",
    "llama.block_count",
    "llama.embedding_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.sliding_window",
    "tokenizer.ggml.tokens",
    "tokenizer.chat_template",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_header_s_value_of_any_kind_is_told(name: str, kind: str, tmp_path: Path) -> None:
    """What `lmi serve --check`, the list of models, and `lmi deploy plan` read of a header."""
    values = {"general.architecture": (STRING, string(b"llama")), "tokenizer.ggml.tokens": KINDS["list of strings"]}
    values |= {key: (4, struct.pack("<I", 8)) for key in NAMES if key.startswith("llama.")}
    values[name] = KINDS[kind]
    file = put(tmp_path / "m", "a.gguf", gguf_file(*(pair(key.encode(), *value) for key, value in values.items())))
    for read in (gguf.check_complete, gguf.contents, gguf.context_length, gguf.matrix_types):
        with contextlib.suppress(ValueError):
            read(file)
    with contextlib.suppress(SpecError):
        gguf_shape(Directory(tmp_path / "m"), ["a.gguf"])
    (file.parent / "b.gguf").write_bytes(file.read_bytes())
    assert len(deployed_parts(Directory(tmp_path / "m"))) <= 1


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
    assert find_openvino_model(str(model), EngineConfig()).path == model / "model.gguf"
    assert find_model({"SAGEMAKER_MODEL_PATH": str(model)}).model_id == str(model)
    if b"" not in beside.values():
        assert deployed_parts(Directory(model))[-1:] == ["model.gguf"]


PARTS = {f"m-0000{number}-of-00003.gguf": FIRST if number == 1 else LATER for number in (1, 2, 3)}


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        (PARTS, "", r"contains a model in 3 parts: merge them with `llama-gguf-split --merge m-00001-of-00003\.gguf "),
        ({**PARTS, "mmproj.gguf": PROJECTOR}, "", "contains a model in 3 parts: merge"),
        (PARTS, "m-00001-of-00003.gguf", "is part of a model in 3 parts: merge"),
        (PARTS, "m-00002-of-00003.gguf", "is part of a model in 3 parts: merge"),
        ({"m-00002-of-00003.gguf": LATER}, "", "is part of a model in 3 parts: merge"),
        ({"q4.gguf": WHOLE, "q8.gguf": WHOLE}, "", r"contains 2 \.gguf files; name one of them: q4\.gguf, q8\.gguf"),
        ({"q4.gguf": WHOLE, **PARTS}, "", r"contains 4 \.gguf files; name one of them"),
        ({"mmproj.gguf": PROJECTOR}, "", r"mmproj\.gguf is not a model, but extends a model \(mmproj\)"),
        ({"a.gguf": PROJECTOR, "b.gguf": of_type(b"adapter")}, "", "a.gguf is not a model, but extends a model"),
        ({"a.gguf": POINTER, "b.gguf": POINTER}, "", "a.gguf is a Git LFS pointer, not the file"),
        ({"a.gguf": b""}, "", "a.gguf is an empty file"),
        ({"._a.gguf": APPLE_DOUBLE}, "", "contains no model"),
        (
            {f"top/{name}": data for name, data in CHECKPOINT.items()},
            "",
            r"contains no model.*; \S+/top contains a model: use that directory",
        ),
        ({"top/q4.gguf": WHOLE, "__MACOSX/top/._q4.gguf": APPLE_DOUBLE}, "", r"/top contains a model: use"),
    ],
)
def test_a_directory_that_is_no_model_says_why(
    files: dict[str, bytes], name: str, message: str, tmp_path: Path
) -> None:
    model = made(tmp_path / "m", files)
    with pytest.raises(ConfigError, match=message):
        find_openvino_model(str(model / name), EngineConfig())


def test_an_archive_of_many_settings_costs_in_proportion() -> None:
    def work(count: int) -> int:
        packed = io.BytesIO(archive({f"{number}/serving.properties": b"" for number in range(count)}))
        return steps(lambda: read_archive(packed))

    assert work(400) < 5 * work(100), "16 times, if each were compared with all others"


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
