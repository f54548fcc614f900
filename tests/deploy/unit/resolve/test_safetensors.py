"""Weights counted by the headers of safetensors files, and headers that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import SpecError
from deploy.resolve.model.files import Directory
from deploy.resolve.model.quantization import Contents, contents
from deploy.resolve.model.shape import shape_in_directory
from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.unit.resolve.safetensors_files import Tensors, header, write

NAME = "model.safetensors"


def counted(path: Path, tensors: Tensors, bits: int | None = None) -> Contents:
    write(path / NAME, tensors)
    return contents(Directory(path), [NAME], bits)


def test_weights_of_16_bits(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", (100, 8)), "model.layers.4.mlp.up_proj.weight": ("BF16", (8, 32))}
    assert counted(tmp_path, tensors) == Contents(1056, 2112, 5)


@pytest.mark.parametrize(
    ("tensors", "bits", "weights"),
    [
        ({"a.qweight": ("I32", (16, 8)), "a.qzeros": ("I32", (1, 1)), "a.scales": ("F16", (1, 8)),
          "a.g_idx": ("I32", (128,))}, 4, 1024),  # AWQ and GPTQ: eight in each number
        ({"a.qweight": ("I32", (16, 8))}, 8, 512),
        ({"a.weight_packed": ("I32", (64, 16)), "a.weight_scale": ("BF16", (64, 4)), "a.weight_shape": ("I32", (2,))},
         4, 8192),  # compressed-tensors
        ({"experts.gate_up_proj_blocks": ("U8", (2, 64, 1, 16)), "experts.gate_up_proj_scales": ("U8", (2, 64, 1))},
         4, 4096),  # gpt-oss
        ({"a.weight": ("F8_E4M3", (256, 256)), "a.weight_scale_inv": ("F32", (2, 2))}, 8, 65536),  # DeepSeek
        ({"a.weight": ("U8", (8, 16)), "a.weight_scale": ("F8_E4M3", (8, 2)), "a.weight_scale_2": ("F32", ()),
          "a.input_scale": ("F32", ())}, 4, 256),  # NVFP4
        ({"a.weight": ("U8", (128, 1)), "a.weight.absmax": ("U8", (4,)), "a.weight.quant_map": ("F32", (16,)),
          "a.weight.quant_state.bitsandbytes__nf4": ("U8", (90,))}, 4, 256),  # bitsandbytes
    ],
    ids=["awq", "gptq-8", "int4", "mxfp4", "fp8", "nvfp4", "nf4"],
)  # fmt: skip
def test_packed_weights_are_counted_singly(tmp_path: Path, tensors: Tensors, bits: int, weights: int) -> None:
    found = counted(tmp_path, tensors, bits)
    assert found.parameters == weights
    assert found.stored == header(tensors)[1]


def test_layers_of_encoders_and_drafts_are_none_of_the_models(tmp_path: Path) -> None:
    tensors = {f"{place}.layers.{number}.weight": ("BF16", (1,)) for place, number in
               (("model", 3), ("model.visual", 26), ("audio_tower", 40), ("mtp", 9))}  # fmt: skip
    assert counted(tmp_path, tensors).layers == 4


def lie(**changes: Any) -> bytes:
    said = {"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8], **changes}}
    content = json.dumps(said).encode()
    return struct.pack("<Q", len(content)) + content + b"0" * 8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no header, and the file has 0 bytes"),
        (b"0" * 1600, r"has a header of \d{19} bytes, and the file has 1600 bytes"),
        (struct.pack("<Q", 2**63), "has a header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 0) + b"{}", "has a header of 0 bytes"),
        (struct.pack("<Q", 4) + b"{{{{", "the header is not JSON: JSONDecodeError"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "the header is not JSON: "),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "the header is not JSON: RecursionError"),
        (struct.pack("<Q", 2) + b"[]", "the header is not a JSON object"),
        (struct.pack("<Q", 7) + b'{"a":1}', "'a' is not an object"),
        (lie(shape=[2, 3]), "'a' has 6 numbers and 8 bytes"),
        (lie(shape=[2, -2]), "'a' has no valid shape"),
        (lie(shape=[2**60]), "'a' has no valid shape"),
        (lie(shape=[1] * 1000), "'a' has no valid shape"),
        (lie(data_offsets=[0, 2**40]), "lies outside of the file"),
        (lie(data_offsets=[8, 0]), "lies outside of the file"),
        (lie(data_offsets="all"), "'a' has no valid shape"),
    ],
    ids=range(16),
)
def test_headers_that_lie(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(SpecError, match=said):
        contents(Directory(tmp_path), [NAME])


def test_a_header_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000))
        file.truncate(95_000_000)
    with pytest.raises(SpecError, match="the header has 90000000 bytes, and 25000000 are read at most"):
        contents(Directory(tmp_path), [NAME])


def test_headers_of_hundreds_of_files_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="257 safetensors files"):
        contents(Directory(tmp_path), [str(number) for number in range(257)])


def test_a_long_header_is_read_to_its_end(tmp_path: Path) -> None:
    tensors = {f"model.layers.{number}.weight": ("BF16", (2,)) for number in range(4000)}
    assert len(header(tensors)[0]) > 200_000
    assert counted(tmp_path, tensors) == Contents(8000, 16000, 4000)


def test_a_header_that_lies_leaves_the_files_sizes_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / NAME).write_bytes(b"0" * 1600)
    notes: list[str] = []
    shape = shape_in_directory(tmp_path, notes)
    assert shape is not None
    assert (shape.stored, shape.parameters) == (1600, 800)
    assert len(notes) == 1
    assert notes[0].startswith("The weights are counted by the files' sizes: model.safetensors has a header of ")


@pytest.mark.parametrize(("said", "held", "counts"), [(4, 32, 32), (60, 32, 60), (32, 32, 32), (31, 32, 32)])
def test_a_config_that_lies_about_its_layers(tmp_path: Path, said: int, held: int, counts: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"num_hidden_layers": said}))
    write(tmp_path / NAME, {f"model.layers.{number}.mlp.up_proj.weight": ("BF16", (2,)) for number in range(held)})
    notes: list[str] = []
    shape = shape_in_directory(tmp_path, notes)
    assert shape is not None
    assert shape.layers == counts
    told = [f"config.json says {said} layers, and the tensors are of {held}: the larger number counts."]
    assert notes == (told if said != held else [])


def test_a_layer_that_predicts_further_tokens_is_no_lie(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"num_nextn_predict_layers": 1}))
    write(tmp_path / NAME, {f"model.layers.{number}.mlp.up_proj.weight": ("BF16", (2,)) for number in range(33)})
    notes: list[str] = []
    shape = shape_in_directory(tmp_path, notes)
    assert shape is not None
    assert (shape.layers, notes) == (32, [])
