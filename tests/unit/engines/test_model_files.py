"""Broken model files: the start is refused in one line that names the file, before an engine loads anything."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from handler.config import model_files
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import check_checkpoint
from handler.engines.openvino.ir_files import check_directory, parts
from handler.engines.openvino.model import find_model
from tests.environment import clean_environment
from tests.unit.config.gguf_files import (
    READABLE,
    TOKENS,
    genai_file,
    gguf_file,
    in_parts,
    matrix,
    pair,
    string,
)

Bytes = Callable[[bytes], bytes | None]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def gone(data: bytes) -> None:
    return None


def put(directory: Path, files: Mapping[str, bytes], name: str, change: Bytes) -> Path:
    """The files, one of them changed; None takes it away."""
    for file, data in files.items():
        changed = change(data) if file == name else data
        if changed is not None:
            (directory / file).write_bytes(changed)
    return directory


# -- Hugging Face directories ------------------------------------------------------------------------------------------

_HEADER = json.dumps(
    {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
).encode()
SHARD = "model-1.safetensors"
CHECKPOINT = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    SHARD: struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(16),
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}',
}


def test_a_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    check_checkpoint(put(tmp_path, CHECKPOINT, "", gone))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", half, r"config\.json is not JSON: "),
        ("config.json", lambda data: b"[]", r"config\.json is not a JSON object"),
        ("config.json", lambda data: b'{"\xff": 1}', r"config\.json is not JSON: it is not UTF-8: byte 0xff in line 1"),
        ("config.json", lambda data: b"[" * 100_000, r"config\.json is not JSON: "),
        ("tokenizer.json", half, r"tokenizer\.json is not JSON: "),
        ("tokenizer.json", gone, r"has no tokenizer: none of tokenizer\.json, tokenizer\.model"),
        (SHARD, lambda data: data[:-1], r"model-1\.safetensors is cut short: it has \d+ bytes"),
        (SHARD, lambda data: data[:20], r"model-1\.safetensors is cut short, .* ends inside its header"),
        (SHARD, empty, r"model-1\.safetensors is an empty file"),
        (SHARD, lambda data: data + b"x", r"model-1\.safetensors is broken: it has"),
        (SHARD, lambda data: struct.pack("<Q", 4) + b"junk", r"safetensors is broken: its header"),
        (SHARD, gone, r"model-1\.safetensors is missing, but model\.safetensors\.index\.json lists it"),
        ("model.safetensors.index.json", lambda data: b"[]", r"index\.json is not a JSON object"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_the_file_s_name(
    tmp_path: Path, name: str, change: Bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_checkpoint(put(tmp_path, CHECKPOINT, name, change))
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_index_is_not_asked_where_the_weights_are_in_one_file(tmp_path: Path) -> None:
    files = {**CHECKPOINT, "model.safetensors": CHECKPOINT[SHARD]}
    check_checkpoint(put(tmp_path, files, SHARD, gone))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "pytorch_model.bin is an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "pytorch_model.bin is .*Git LFS"),
    ],
)
def test_weights_of_torch_that_are_not_there_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    files = {name: CHECKPOINT[name] for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    check_checkpoint(put(tmp_path, files | {"pytorch_model.bin": b"PK"}, "", gone))
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(put(tmp_path, {"pytorch_model.bin": data}, "", gone))


def test_a_header_that_is_too_long_for_the_format_is_not_read(tmp_path: Path) -> None:
    path = put(tmp_path, CHECKPOINT, "", gone) / SHARD
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 36))
        file.truncate(1 << 37)  # sparse
    with pytest.raises(ConfigError, match=r"is broken: it specifies a header of 68,719,476,736 bytes"):
        check_checkpoint(tmp_path)


def test_a_tokenizer_of_the_model_s_own_code_needs_no_known_file(tmp_path: Path) -> None:
    files = {**CHECKPOINT, "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}'}
    check_checkpoint(put(tmp_path, files, "tokenizer.json", gone))


# -- OpenVINO directories ----------------------------------------------------------------------------------------------

_XML = (
    b'<?xml version="1.0"?>\n<net name="x" version="11"><layers>'
    b'<layer id="0" type="Const"><data element_type="f32" shape="2" offset="0" size="8"/></layer>'
    b'<layer id="1" type="Const"><data element_type="f32" shape="3" offset="8" size="12"/></layer>'
    b'<layer id="2" type="Other"><data offset="5" size="many"/></layer></layers></net>'
)
PARTS = ("model", "tokenizer", "detokenizer")
DIRECTORY = {
    "config.json": b'{"max_position_embeddings": 8192}',
    "generation_config.json": b'{"eos_token_id": 2}',
    **{f"openvino_{part}.xml": _XML for part in PARTS},
    **{f"openvino_{part}.bin": bytes(20) for part in PARTS},
}


@pytest.mark.parametrize("context", [1, 8192])
def test_a_whole_openvino_directory_is_taken(tmp_path: Path, context: int) -> None:
    put(tmp_path, DIRECTORY, "config.json", lambda _: b'{"max_position_embeddings": %d}' % context)
    check_directory(tmp_path, parts(vision=False))


def test_the_demo_model_s_directory_is_taken(demo_model: Path) -> None:
    from handler.engines.openvino.model import prepare

    check_directory(prepare(str(demo_model), EngineConfig()), parts(vision=False))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("xml", half, r"\.xml is cut short, or not XML: "),
        ("xml", empty, r"\.xml is an empty file"),
        ("xml", lambda data: b"<html></html>", r"\.xml is not an OpenVINO model: it begins with <html>, not <net>"),
        (
            "xml",
            lambda data: data.replace(b'"8"', b'"x"'),
            r"\.xml is broken: the offset or size of a constant is not a number",
        ),
        ("bin", half, r"\.bin is cut short: it has 10 bytes, but openvino_\w+\.xml describes 20"),
        ("bin", empty, r"\.bin is an empty file"),
        ("bin", gone, r"\.bin is missing; it contains the weights that openvino_\w+\.xml describes"),
    ],
)
def test_a_broken_part_is_refused_by_the_file_s_name(
    tmp_path: Path, part: str, kind: str, change: Bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"openvino_{part}{message}"):
        check_directory(put(tmp_path, DIRECTORY, f"openvino_{part}.{kind}", change), parts(vision=False))


@pytest.mark.parametrize("part", ["tokenizer", "detokenizer"])
def test_a_missing_tokenizer_is_refused_by_its_name(tmp_path: Path, part: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"openvino_{part}\.xml is missing: an OpenVINO model directory must contain"
    ):
        check_directory(put(tmp_path, DIRECTORY, f"openvino_{part}.xml", gone), parts(vision=False))


def test_a_missing_graph_is_not_taken_for_another_kind_of_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"openvino_model\.xml is missing, but"):
        model_files.locate(str(put(tmp_path, DIRECTORY, "openvino_model.xml", gone)))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("config.json", b"{x", r"config\.json is not JSON"),
        ("generation_config.json", b"[1]", r"generation_config\.json is not a JSON object"),
        (
            "config.json",
            b'{"max_position_embeddings": "many"}',
            r"config\.json: max_position_embeddings must be a whole",
        ),
        ("config.json", b'{"max_position_embeddings": -1}', r"max_position_embeddings must be a whole"),
        ("config.json", b'{"max_position_embeddings": 0}', r"max_position_embeddings must be a whole"),
        ("config.json", b'{"text_config": 5}', r"config\.json: text_config must be an object"),
    ],
)
def test_a_broken_configuration_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_directory(put(tmp_path, DIRECTORY, name, lambda _: data), parts(vision=False))


# -- GGUF files: what OpenVINO GenAI reads -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [1, 2, 3, 8, 12, 14])
def test_weights_that_genai_reads_are_taken(tmp_path: Path, kind: int) -> None:
    (tmp_path / "a.GGUF").write_bytes(genai_file(kind=kind))
    assert find_model(str(tmp_path / "a.GGUF"), EngineConfig()).kind == "gguf"


@pytest.mark.parametrize(
    ("kind", "name"),
    [(0, "F32"), (6, "Q5_0"), (7, "Q5_1"), (10, "Q2_K"), (11, "Q3_K"), (13, "Q5_K"), (16, "IQ2_XXS"), (30, "BF16"),
     (39, "MXFP4"), (999, "type 999")],
)  # fmt: skip
def test_weights_that_genai_does_not_read_are_refused_with_those_it_reads(tmp_path: Path, kind: int, name: str) -> None:
    (tmp_path / "a.gguf").write_bytes(genai_file(kind=kind))
    remedy = f"has {name} weights, .* use a file with F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K weights, or the model's Hugg"
    with pytest.raises(ConfigError, match=remedy):
        find_model(str(tmp_path / "a.gguf"), EngineConfig())


@pytest.mark.parametrize("name", [b"gemma3", b"qwen2moe", b"gpt-oss", b"llama4"])
def test_an_architecture_that_genai_does_not_read_is_refused(tmp_path: Path, name: bytes) -> None:
    data = gguf_file(pair(b"general.architecture", 8, string(name)), TOKENS, *READABLE, tensors=matrix(8)) + bytes(512)
    (tmp_path / "a.gguf").write_bytes(data)
    remedy = r"use --engine llamacpp, which needs .*\); or serve the model's Hugging"
    with pytest.raises(ConfigError, match=rf"architecture {name.decode()}, .* llama, qwen2, qwen3: {remedy}"):
        find_model(str(tmp_path / "a.gguf"), EngineConfig())


@pytest.mark.parametrize("place", range(len(READABLE)))
def test_a_key_that_genai_needs_is_named(tmp_path: Path, place: int) -> None:
    (tmp_path / "a.gguf").write_bytes(genai_file(*READABLE[:place], *READABLE[place + 1 :]))
    (size,) = struct.unpack_from("<Q", READABLE[place])
    key = READABLE[place][8 : 8 + size].decode()
    with pytest.raises(ConfigError, match=rf"its header lacks {key}, which OpenVINO GenAI needs: .*convert the model"):
        find_model(str(tmp_path / "a.gguf"), EngineConfig())


def test_a_tokenizer_that_genai_does_not_read_is_refused(tmp_path: Path) -> None:
    other = pair(b"tokenizer.ggml.model", 8, string(b"llama"))
    (tmp_path / "a.gguf").write_bytes(genai_file(READABLE[0], other, *READABLE[2:]))
    with pytest.raises(ConfigError, match="tokenizer of the kind llama, but OpenVINO GenAI reads only gpt2"):
        find_model(str(tmp_path / "a.gguf"), EngineConfig())


def test_an_engine_that_reads_one_file_names_the_ways_to_serve_parts(tmp_path: Path) -> None:
    for path in (tmp_path, in_parts(tmp_path)):
        with pytest.raises(ConfigError, match=r"`llama-gguf-split --merge m-00001-of-00003\.gguf .*--engine llamacpp"):
            find_model(str(path), EngineConfig())


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.gguf": gguf_file(struct.pack("<Q", 1 << 62))}, "a.gguf is broken: its header has a string of"),
        ({**DIRECTORY, "openvino_model.bin": b""}, "openvino_model.bin is an empty file"),
        ({**CHECKPOINT, SHARD: b"x"}, "model-1.safetensors is cut short, or not a safetensors file"),
    ],
    ids=["gguf", "openvino", "safetensors"],
)
def test_the_server_says_one_line_and_ends_with_status_2(
    tmp_path: Path, files: Mapping[str, bytes], message: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    put(model, files, "", gone)
    command = [sys.executable, "-m", "handler", "serve", str(model), "--engine", "openvino", "--port", "0"]
    environ = {**clean_environment(), "LMI_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lmi: the MODEL argument: {model}")
    assert message in line
