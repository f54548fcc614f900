"""Broken model files: the start is refused in one line that names the file, before an engine loads anything."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from handler.config import gguf, model_files
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import check_checkpoint, eos_ids
from handler.engines.openvino.ir_files import check_directory, parts
from handler.engines.openvino.model import find_model
from tests.environment import clean_environment

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


# -- GGUF files ---------------------------------------------------------------------------------------------


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


ARCHITECTURE = pair(b"general.architecture", 8, string(b"llama"))
TOKENS = pair(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + string(b"a") + string(b"b"))
NUMBERS = pair(b"x", 9, struct.pack("<IQ", 4, 3) + bytes(12))
TENSOR = string(b"w") + struct.pack("<IQIQ", 1, 4, 0, 0)


def gguf_file(*pairs: bytes, version: int = 3, tensors: bytes = TENSOR, count: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(pairs) if count is None else count)
    header = head + b"".join(pairs) + tensors
    return header + bytes(-len(header) % 32) + bytes(16)  # the tensor's four numbers


VOCABULARY = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + ARCHITECTURE + TOKENS  # a file as llama.cpp's ggml-vocab-*.gguf
SPLIT = pair(b"split.count", 2, struct.pack("<H", 3))
READABLE = (
    pair(b"general.file_type", 4, struct.pack("<I", 7)),
    pair(b"tokenizer.ggml.model", 8, string(b"gpt2")),
    pair(b"tokenizer.ggml.pre", 8, string(b"smollm")),
    pair(b"tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + string(b"a b")),
    pair(b"tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, 2) + bytes(8)),
    pair(b"llama.block_count", 4, struct.pack("<I", 1)),
    pair(b"llama.embedding_length", 4, struct.pack("<I", 256)),
    pair(b"llama.attention.head_count", 4, struct.pack("<I", 1)),
    pair(b"llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
)
"""The keys, besides the architecture and the tokens, without which OpenVINO GenAI does not read a file."""
WHOLE = gguf_file(ARCHITECTURE, NUMBERS, TOKENS, *READABLE)


def matrix(kind: int) -> bytes:
    return string(b"w") + struct.pack("<IQQIQ", 2, 256, 1, kind, 0)


def genai_file(*pairs: bytes, kind: int = 8) -> bytes:
    """A file with one matrix of 256 weights of a kind, and enough bytes for it."""
    return gguf_file(ARCHITECTURE, TOKENS, *(pairs or READABLE), tensors=matrix(kind)) + bytes(1024)


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


# -- GGUF models in several parts ---------------------------------------------------------------------------------


def part(number: int, count: int, *pairs: bytes, cut: int = 0) -> bytes:
    numbers = (pair(b"split.no", 2, struct.pack("<H", number)), pair(b"split.count", 2, struct.pack("<H", count)))
    data = gguf_file(*pairs, *numbers, tensors=matrix(8)) + bytes(256)  # the tensor has 272 bytes
    return data[: len(data) - cut]


def in_parts(directory: Path, changes: Mapping[int, bytes | None] | None = None) -> Path:
    """Write a model in three parts, some of them changed or missing, and return the path of the first part."""
    parts: dict[int, bytes | None] = {1: part(0, 3, ARCHITECTURE, TOKENS, *READABLE), 2: part(1, 3), 3: part(2, 3)}
    for number, data in {**parts, **(changes or {})}.items():
        if data is not None:
            (directory / f"m-{number:05}-of-00003.gguf").write_bytes(data)
    return directory / "m-00001-of-00003.gguf"


def test_all_parts_of_a_model_are_read(tmp_path: Path) -> None:
    first = in_parts(tmp_path)
    header = gguf.check_parts(first)
    assert (header.num_parts, len(header.tensors), header.architecture) == (3, 3, "llama")
    assert gguf.size(first, 3) == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert model_files.locate(str(tmp_path), parts=True).path == first
    assert gguf.check_parts(put(tmp_path, {"a.gguf": WHOLE}, "", gone) / "a.gguf").num_parts == 1


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {2: None}, r"m-00002-of-00003\.gguf is missing: the model has 3 parts$"),
        (1, {3: part(2, 3, cut=1)}, r"m-00003-of-00003\.gguf is cut short"),
        (1, {3: part(2, 4)}, r"m-00003-of-00003\.gguf does not belong to .*m-00001-of-00003\.gguf, which has 3 parts$"),
        (1, {2: b"GGUF"}, r"m-00002-of-00003\.gguf ends inside its header$"),
        (2, {}, r"is a later part of a model in 3 parts: name the first, m-00001-of-00003\.gguf$"),
        (
            1,
            {1: part(0, 2, ARCHITECTURE, TOKENS)},
            r"is not the first of 2 parts: name the file \*-00001-of-00002\.gguf",
        ),
    ],
)
def test_a_part_that_is_missing_or_broken_is_named(
    tmp_path: Path, number: int, changes: Mapping[int, bytes | None], message: str
) -> None:
    first = in_parts(tmp_path, changes)
    with pytest.raises(ValueError, match=message):
        gguf.check_parts(first.with_name(f"m-{number:05}-of-00003.gguf"))


def test_an_engine_that_reads_one_file_names_the_ways_to_serve_parts(tmp_path: Path) -> None:
    for path in (tmp_path, in_parts(tmp_path)):
        with pytest.raises(ConfigError, match=r"`llama-gguf-split --merge m-00001-of-00003\.gguf .*--engine llamacpp"):
            find_model(str(path), EngineConfig())


@pytest.mark.parametrize(
    ("name", "others", "different"),
    [
        ("q/m-00001-of-00012.gguf", ["q/m-00012-of-00012.gguf"], ["q/m-00001-of-00013.gguf", "m-00002-of-00012.gguf"]),
        ("m.gguf", [], ["m2.gguf"]),
        ("m-00002-of-00003.gguf", [], ["m-00001-of-00003.gguf"]),
    ],
)
def test_a_pattern_matches_the_names_of_all_parts(name: str, others: list[str], different: list[str]) -> None:
    pattern = gguf.parts_pattern(name)
    assert [item for item in [name, *others, *different] if fnmatch(item, pattern)] == [name, *others]


# -- a GGUF file in one part ------------------------------------------------------------------------------------------


def test_a_whole_gguf_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(WHOLE)
    gguf.check_complete(tmp_path / "a.gguf")


def test_the_types_of_a_gguf_files_matrices_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(WHOLE)
    assert gguf.matrix_types(path) == set(), "it has a vector"
    path.write_bytes(gguf_file(ARCHITECTURE, TOKENS, tensors=string(b"w") + struct.pack("<IQQIQ", 2, 4, 4, 12, 0)))
    assert gguf.matrix_types(path) == {12}


def end(name: bytes, id: int, kind: int = 4) -> bytes:
    return pair(b"tokenizer.ggml.%s_token_id" % name, kind, struct.pack("<i", id))


@pytest.mark.parametrize(
    ("texts", "ends", "expected"),
    [
        ("a b", [], set()),
        ("a b", [end(b"eos", 1)], {1}),
        ("<|endoftext|> a <|im_end|>", [end(b"eos", 0)], {0, 2}),  # the template ends a turn with <|im_end|>
        ("a b c d", [end(b"eos", 0), end(b"eot", 1), end(b"eom", 2), end(b"bos", 3)], {0, 1, 2}),
        ("a b", [end(b"eos", -1, 5), end(b"eot", 2), end(b"eom", 1, 5)], {1}),  # the others are no tokens
        ("a <end_of_turn> <|eot_id|> <|eom_id|> </s>", [end(b"eos", 0)], {0, 1, 2, 3, 4}),
        ("<|return|> <|call|> <|end|> <|end|>x", [], {0, 1}),
        ("<|calls|> <|flush|> <|end|>", [end(b"eos", 1)], {0, 1}),
        ("<|return|> <|call|> <|end|>", [end(b"eos", 0), end(b"eot", 2)], {0, 1}),  # whatever the header says
        ("<|tool_response> </s> <turn|>", [end(b"eos", 1)], {0, 2}),
        ("a <|end|>", [], {1}),
        ("<|tool_response> </s> <turn|>", [], {0, 2}),
        ("<｜end▁of▁sentence｜> a", [], {0}),
    ],
)
def test_the_ends_of_a_gguf_file_are_llama_cpps(
    tmp_path: Path, texts: str, ends: list[bytes], expected: set[int]
) -> None:
    tokens = [string(text.encode()) for text in texts.split(" ")]
    header = pair(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, len(tokens)) + b"".join(tokens))
    for pairs in ([header, *ends], [*ends, header]):
        (tmp_path / "a.gguf").write_bytes(gguf_file(ARCHITECTURE, *pairs))
        assert gguf.end_ids(tmp_path / "a.gguf") == expected
        assert eos_ids(EngineConfig(model=tmp_path / "a.gguf")) == expected


@pytest.mark.parametrize(
    ("model", "count", "ids"),
    [
        (b"llama", 9, {"bos": 1, "eos": 2, "unknown": 0}),
        (b"bert", 200, {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103}),
        (b"bert", 103, {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0}),
        (b"gpt2", 12, {"bos": 11, "eos": 11}),
        (b"whitespace", 12, {"bos": 11, "eos": 11}),
        (b"t5", 9, {"eos": 1, "unknown": 2, "padding": 0}),
        (b"gemma4", 200, {}),
    ],
)
def test_a_header_without_ids_of_special_tokens_has_llama_cpps(model: bytes, count: int, ids: dict[str, int]) -> None:
    assert gguf.special_ids({b"tokenizer.ggml.model": model}, count) == ids


def test_a_later_part_of_a_model_names_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    path.write_bytes(gguf_file(ARCHITECTURE, TOKENS, SPLIT))
    with pytest.raises(ValueError, match=r"--merge m-00001-of-00003\.gguf merged\.gguf"):
        gguf.check_complete(path)


@pytest.mark.parametrize(("kind", "value", "expected"), [(4, 8, 8), (5, -8, None), (4, 0, None)])
def test_a_context_without_tokens_is_none(tmp_path: Path, kind: int, value: int, expected: int | None) -> None:
    code = {4: "I", 5: "i"}[kind]
    data = gguf_file(pair(b"llama.context_length", kind, struct.pack("<" + code, value)), ARCHITECTURE, TOKENS)
    (tmp_path / "a.gguf").write_bytes(data)
    assert gguf.context_length(tmp_path / "a.gguf") == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is an empty file"),
        (b"version https://git-lfs/v1\noid sha256:0\n", r"is a Git LFS pointer.*git lfs pull"),
        (b"XXXX" + WHOLE[4:], "is not a GGUF file"),
        (gguf_file(ARCHITECTURE, TOKENS, version=9), "is GGUF version 9; supported: 2 and 3"),
        (WHOLE[:6], "ends inside its header"),
        (WHOLE[:60], "ends inside its header"),
        (WHOLE[:-16], "is cut short: it has"),
        (WHOLE[:-1], rf"is cut short: it has {len(WHOLE) - 1} bytes, but its header describes {len(WHOLE)}"),
        (VOCABULARY, "contains no weights: its header describes no tensors"),
        (gguf_file(ARCHITECTURE, TOKENS, SPLIT), "is part of a model in 3 parts: merge them with"),
        (gguf_file(ARCHITECTURE, TOKENS, pair(b"general.alignment", 8, string(b"x"))), "its alignment is not a number"),
        (gguf_file(ARCHITECTURE, TOKENS, count=1 << 63), "its header has|ends inside its header"),
        (gguf_file(struct.pack("<Q", 1 << 62)), "its header has a string of 4,611,686,018,427,387,904 bytes"),
        (gguf_file(struct.pack("<Q", 1000)), "ends inside its header"),
        (gguf_file(pair(b"x", 77, b"")), "its header has a value of unknown type 77"),
        (gguf_file(pair(b"x", 9, struct.pack("<IQ", 77, 1))), "its header has a list of unknown type 77"),
        (gguf_file(pair(b"x", 9, struct.pack("<IQ", 9, 1))), "its header has a list of unknown type 9"),
        (gguf_file(pair(b"x", 9, struct.pack("<IQ", 10, 1 << 63))), "ends inside its header"),
        (
            gguf_file(ARCHITECTURE, TOKENS, tensors=string(b"w") + struct.pack("<I", 1 << 30)),
            "1,073,741,824 dimensions",
        ),
        (gguf_file(ARCHITECTURE, TOKENS, count=1 << 17), "its header has 131,072 values and 1 tensors"),
        (gguf_file(pair(b"x", 9, struct.pack("<IQ", 8, 1 << 22))), "a list in its header has 4,194,304 items"),
        (gguf_file(ARCHITECTURE, TOKENS, TOKENS), r"its header has two values for tokenizer\.ggml\.tokens"),
        (gguf_file(pair(b"general.architecture", 8, string(b"clip"))), r"extends a model \(mmproj\)"),
        (gguf_file(TOKENS), r"contains no model: its header has no general\.architecture"),
        (gguf_file(ARCHITECTURE), r"contains no tokenizer: its header has no tokenizer\.ggml\.tokens"),
    ],
)
def test_a_broken_gguf_file_is_refused_by_its_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as refused:
        gguf.check_complete(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "begin",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 16) + pair(b"x", 9, struct.pack("<IQ", 8, 1 << 21)),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 18, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1000) + pair(b"x", 8, struct.pack("<Q", 1 << 26) + bytes(1 << 26)) * 3,
    ],
    ids=["values", "tensors", "texts"],
)
def test_a_file_with_gigabytes_of_zeros_is_refused_soon(tmp_path: Path, begin: bytes) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(1 << 36)  # takes no room on disk
    began = time.process_time()
    with pytest.raises(ValueError, match=r"is broken|contains no|is cut short"):
        gguf.check_complete(path)
    assert time.process_time() - began < 30


@pytest.mark.parametrize("number", [(4, "<I", 1 << 32 - 1), (5, "<i", -3), (10, "<Q", 1 << 63)])
def test_a_number_of_parts_that_makes_no_sense_is_refused(tmp_path: Path, number: tuple[int, str, int]) -> None:
    kind, code, parts = number
    path = tmp_path / f"m-00001-of-{parts:05}.gguf"
    path.write_bytes(gguf_file(ARCHITECTURE, TOKENS, pair(b"split.count", kind, struct.pack(code, parts))))
    with pytest.raises(ValueError, match="its header says that the model has"):
        gguf.check_parts(path)


@pytest.mark.parametrize("kind", [b"general.architecture", b"general.type", b"tokenizer.ggml.model"])
def test_lists_in_place_of_names_are_not_errors_of_ours(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_file(pair(kind, 9, struct.pack("<IQI", 4, 1, 7)), TOKENS))
    assert gguf.end_ids(path) == frozenset()
    assert gguf.tokenizer_config(path) == {}


def test_tokens_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_file(ARCHITECTURE, pair(b"tokenizer.ggml.tokens", 9, struct.pack("<IQI", 4, 1, 7))))
    for read in (gguf.end_ids, gguf.tokenizer_config, gguf.read_tokenizer):
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens is a list of another type"):
            read(path)


def test_a_pipe_beside_a_model_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(WHOLE)
    os.mkfifo(tmp_path / "b.gguf")
    (tmp_path / "c.gguf").mkdir()
    (tmp_path / "d.gguf").symlink_to(tmp_path / "gone")
    assert [path.name for path in model_files.gguf_files(tmp_path)] == ["a.gguf", "d.gguf"]


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
