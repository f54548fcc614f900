"""Encodings and files: each file that a user gives, as systems write it, by the command or the reader that takes it."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.adopt.files import read_file
from deploy.cli.arguments import body_of
from deploy.errors import DeployError
from deploy.s3.lint import lint
from deploy.s3.prefix import Entry
from deploy.spec.reading import read_spec
from handler import cli
from handler.config import model_files
from handler.config.config import Config
from handler.config.loader import read_server_config
from handler.config.model_files import file_values
from handler.container import djl
from handler.container.arguments import Arguments
from handler.container.model import ModelSource
from handler.core.errors import AdapterFailed, ConfigError
from handler.djl.startup import read_properties
from handler.engines.huggingface.files import check_checkpoint
from handler.plugins.functions import check_model_py, find_formatters
from handler.scheduler.lora import adapter_path
from proof.bench.plot import read_curves
from proof.conform import report
from proof.replay.exchange import Unreadable
from proof.replay.sources import open_requests
from tests.bench.report.documents import served
from tests.unit.engines.test_model_files import CHECKPOINT

Take = Callable[[Path], object]
"""Reads a file, and returns what must not depend on its encoding."""


def properties(file: Path) -> object:
    return read_server_config(properties=file).config.model_id


def properties_under_djl(file: Path) -> object:
    target = file.parent / "scratch" / "model"
    djl.make_model(Arguments(8080, ()), ModelSource(file.parent, None, {}), {}, target, (0, 36, 0))
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
            raise ConfigError(f"{one.place}: {one.reason}")
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
