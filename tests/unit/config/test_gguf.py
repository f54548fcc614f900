"""GGUF files, whole, broken and in several parts: each problem is told with the file's name."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from handler.config import gguf, model_files
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import eos_ids
from tests.unit.config.gguf_files import (
    ARCHITECTURE,
    SPLIT,
    TENSOR,
    TOKENS,
    VOCABULARY,
    WHOLE,
    gguf_file,
    in_parts,
    pair,
    part,
    string,
)


def test_all_parts_of_a_model_are_read(tmp_path: Path) -> None:
    first = in_parts(tmp_path)
    header = gguf.check_parts(first)
    assert (header.num_parts, len(header.tensors), header.architecture) == (3, 3, "llama")
    assert gguf.size(first, 3) == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert model_files.locate(str(tmp_path), parts=True).path == first
    (tmp_path / "a.gguf").write_bytes(WHOLE)
    assert gguf.check_parts(tmp_path / "a.gguf").num_parts == 1


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


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*gguf.TYPES])
def test_a_tensor_takes_the_bytes_of_its_blocks_and_none_may_be_missing(tmp_path: Path, kind: int) -> None:
    _, weights, size = gguf.TYPES[kind]
    shape = (weights * 3, 5)
    tensor = string(b"w") + struct.pack("<IQQIQ", 2, *shape, kind, 64)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + ARCHITECTURE + TOKENS + tensor
    whole = head + bytes(-len(head) % 32 + 64 + 15 * size)
    path = tmp_path / "a.gguf"
    path.write_bytes(whole)
    assert gguf.check_complete(path).tensors == [([*shape], kind)]
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is cut short"):
        gguf.check_complete(path)


def test_the_bytes_before_the_tensors_are_those_of_the_alignment(tmp_path: Path) -> None:
    for alignment in (1, 64, 4096):
        value = pair(b"general.alignment", 4, struct.pack("<I", alignment))
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + ARCHITECTURE + TOKENS + value + TENSOR
        whole = head + bytes(-len(head) % alignment + 16)
        (tmp_path / "a.gguf").write_bytes(whole)
        gguf.check_complete(tmp_path / "a.gguf")
        (tmp_path / "a.gguf").write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=f"describes {len(whole):,}"):
            gguf.check_complete(tmp_path / "a.gguf")


VALUES: dict[bytes, tuple[int, bytes, object]] = {
    b"byte": (0, b"\xff", 255),
    b"signed byte": (1, b"\xff", -1),
    b"short": (2, struct.pack("<H", 65535), 65535),
    b"signed short": (3, struct.pack("<h", -2), -2),
    b"int": (4, struct.pack("<I", 1 << 31), 1 << 31),
    b"signed int": (5, struct.pack("<i", -3), -3),
    b"float": (6, struct.pack("<f", 0.5), 0.5),
    b"bool": (7, b"\1", True),
    b"text": (8, string("ä".encode()), "ä".encode()),
    b"numbers": (9, struct.pack("<IQ3H", 2, 3, 7, 8, 9), [7, 8, 9]),
    b"texts": (9, struct.pack("<IQ", 8, 1) + string(b"a"), None),
    b"long": (10, struct.pack("<Q", 1 << 63), 1 << 63),
    b"signed long": (11, struct.pack("<q", -4), -4),
    b"double": (12, struct.pack("<d", 0.1), 0.1),
}
"""A value of each type, as its number, its bytes and what they mean."""


@pytest.mark.parametrize("version", [2, 3])
def test_each_type_of_value_is_read(tmp_path: Path, version: int) -> None:
    pairs = [pair(key, kind, data) for key, (kind, data, _) in VALUES.items()]
    (tmp_path / "a.gguf").write_bytes(gguf_file(*pairs, version=version))
    expected = {key: value for key, (_, _, value) in VALUES.items()}
    assert gguf.read_values(tmp_path / "a.gguf") == expected
    with (tmp_path / "a.gguf").open("rb") as file:
        assert gguf.read_header(file).values == expected


def test_the_beginning_of_a_file_has_the_values_that_are_whole(tmp_path: Path) -> None:
    pairs = [pair(key, kind, data) for key, (kind, data, _) in VALUES.items()]
    whole, values = gguf_file(*pairs), [(key, value) for key, (_, _, value) in VALUES.items()]
    ends = [24 + sum(map(len, pairs[:count])) for count in range(len(pairs) + 1)]
    path = tmp_path / "a.gguf"
    for size in sorted({*ends, *(end - 1 for end in ends[1:]), *range(24, ends[-1], 7)}):
        path.write_bytes(whole[:size])
        with path.open("rb") as file:
            assert [*gguf.first_values(file)] == values[: sum(end <= size for end in ends) - 1]


def test_values_before_the_tokenizer_end_with_it(tmp_path: Path) -> None:
    more = pair(b"x", 4, bytes(4))
    (tmp_path / "a.gguf").write_bytes(gguf_file(ARCHITECTURE, TOKENS, more))
    assert gguf.values_before_tokenizer(tmp_path / "a.gguf") == {b"general.architecture": b"llama"}
    (tmp_path / "a.gguf").write_bytes(gguf_file(ARCHITECTURE, more))
    assert gguf.values_before_tokenizer(tmp_path / "a.gguf") == {b"general.architecture": b"llama", b"x": 0}


def test_a_list_longer_than_any_model_has_layers_is_not_kept(tmp_path: Path) -> None:
    for count, is_kept in ((1 << 12, True), ((1 << 12) + 1, False)):
        numbers = pair(b"x", 9, struct.pack("<IQ", 0, count) + bytes(count))
        (tmp_path / "a.gguf").write_bytes(gguf_file(numbers, ARCHITECTURE))
        values = gguf.read_values(tmp_path / "a.gguf")
        assert values[b"x"] == ([0] * count if is_kept else None)
        assert values[b"general.architecture"] == b"llama", "what follows is read"


def test_a_tensor_has_at_most_four_dimensions(tmp_path: Path) -> None:
    for count in range(6):
        tensor = string(b"w") + struct.pack(f"<I{count}QIQ", count, *[1] * count, 0, 0)
        (tmp_path / "a.gguf").write_bytes(gguf_file(ARCHITECTURE, TOKENS, tensors=tensor))
        if count <= 4:
            assert gguf.check_complete(tmp_path / "a.gguf").tensors == [([1] * count, 0)]
        else:
            with pytest.raises(ValueError, match="has a tensor of 5 dimensions"):
                gguf.check_complete(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("architecture", "pooling", "task"),
    [
        (b"llama", None, ""),
        (b"llama", 0, ""),
        (b"llama", 1, "text-embedding"),
        (b"llama", 4, "rerank"),
        (b"bert", None, "text-embedding"),
        (b"bert", 0, "text-embedding"),
        (b"bert", 4, "rerank"),
    ],
)
def test_the_task_of_a_model_is_that_of_its_pooling(
    tmp_path: Path, architecture: bytes, pooling: int | None, task: str
) -> None:
    pairs = [pair(b"general.architecture", 8, string(architecture))]
    if pooling is not None:
        pairs.append(pair(architecture + b".pooling_type", 4, struct.pack("<I", pooling)))
    for order in (pairs, pairs[::-1]):
        (tmp_path / "a.gguf").write_bytes(gguf_file(*order, TOKENS))
        assert gguf.pooled_task(tmp_path / "a.gguf") == task
    (tmp_path / "a.gguf").write_bytes(gguf_file(TOKENS, *pairs))
    assert gguf.pooled_task(tmp_path / "a.gguf") == "", "only values before the tokenizer's are read"


def test_what_is_no_model_has_no_task(tmp_path: Path) -> None:
    assert gguf.pooled_task(tmp_path / "gone.gguf") == ""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert gguf.pooled_task(tmp_path / "a.gguf") == ""


def test_a_tokenizer_is_read_with_a_score_and_a_type_for_each_token(tmp_path: Path) -> None:
    path, scores, kinds = tmp_path / "a.gguf", b"tokenizer.ggml.scores", b"tokenizer.ggml.token_type"
    merges = pair(b"tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + string(b"a b"))
    characters = pair(b"tokenizer.ggml.precompiled_charsmap", 9, struct.pack("<IQ2b", 1, 2, -1, 5))
    for count in range(4):
        lists = (pair(scores, 9, struct.pack(f"<IQ{count}f", 6, count, *range(count))),
                 pair(kinds, 9, struct.pack(f"<IQ{count}i", 5, count, *range(count))))  # fmt: skip
        path.write_bytes(gguf_file(TOKENS, merges, characters, *lists))
        if count >= 2:
            header = gguf.read_tokenizer(path)
            numbers = [*range(count)]
            assert header[1:] == ([b"a", b"b"], [b"a b"], numbers, numbers, b"\xff\x05")
        else:
            with pytest.raises(ValueError, match=f"scores has {count} of 2 tokens"):
                gguf.read_tokenizer(path)
            path.write_bytes(gguf_file(TOKENS, lists[1]))
            with pytest.raises(ValueError, match=f"token_type has {count} of 2 tokens"):
                gguf.read_tokenizer(path)
    path.write_bytes(gguf_file(TOKENS))
    assert gguf.read_tokenizer(path)[1:] == ([b"a", b"b"], [], [], [], b"")
