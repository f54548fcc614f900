"""How a GGUF file is read for its conversion to OpenVINO's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from handler.engines.openvino.gguf import make_reader

LONG = 1025


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with lists as long as a vocabulary's, and short ones, before its tensors."""
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" * (number % 3) for number in range(LONG)])
    writer.add_array("tokenizer.ggml.token_type", [*range(LONG)])
    writer.add_array("llama.layers", [1, 2, 3])
    writer.add_array("llama.names", ["a", "", "c"])
    writer.add_uint32("llama.block_count", 7)
    for name in ("first", "second"):
        writer.add_tensor(name, np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(reader: Any) -> list[tuple[str, list[int], int, bytes]]:
    return [(one.name, one.shape.tolist(), one.data_offset, one.data.tobytes()) for one in reader.tensors]


def test_long_lists_are_skipped_and_all_else_is_as_ggufs_reader_has_it(file: Path) -> None:
    own, theirs = make_reader(file), GGUFReader(file)
    assert tensors(own) == tensors(theirs)
    assert len(tensors(own)) == 2
    assert [*own.fields] == [*theirs.fields]
    for name in ("general.architecture", "llama.layers", "llama.names", "llama.block_count"):
        assert own.get_field(name).contents() == theirs.get_field(name).contents()
    assert len(theirs.get_field("tokenizer.ggml.tokens").data) == LONG
    assert own.get_field("tokenizer.ggml.tokens").data == own.get_field("tokenizer.ggml.token_type").data == []
