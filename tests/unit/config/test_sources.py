"""Settings under dotted names, and properties files that Java reads too."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from handler.config.options.images import Note
from handler.config.sources import Item, Setting, encode_properties, from_file, joined, misread_by_java, only
from handler.core.errors import Problem


def setting(key: str, value: str = "1") -> Setting:
    return Setting(key, value, f"origin of {key}")


def flat(values: dict[str, Any], prefix: str) -> list[tuple[str, str]]:
    """The dotted names of an object's values."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}.{name}")
        else:
            found.append((f"{prefix}.{name}", json.dumps(value)))
    return found


def test_an_object_is_the_same_by_dotted_names_in_any_order() -> None:
    draw = random.Random(61)
    values = {"a": 1, "b": {"c": 2.5, "d": {"e": True}}, "f": {"g": None}}
    for names in itertools.islice(itertools.permutations(flat(values, "option.hf_overrides")), 24):
        others: list[Item] = [setting("option.max_model_len", "7"), Note("x", "kept")]
        source: list[Item] = [*others, *(setting(name, value) for name, value in names)]
        draw.shuffle(source)
        result = joined(source)
        (option,) = (item for item in only(Setting, result) if item.key == "option.hf_overrides")
        assert json.loads(option.value) == values
        assert option.origin == [item.origin for item in only(Setting, source) if item.key.count(".") > 1][-1]
        assert [item for item in result if item != option] == [item for item in source if item in others]


def test_lists_of_the_same_name_are_joined_and_other_values_are_replaced() -> None:
    for names, expected in (
        ((("a+", "x"), ("a+", "y")), {"a": ["x", "y"]}),
        ((("a", "1"), ("a", "2")), {"a": 2}),
        ((("a.b", "1"), ("a", "2")), {"a": 2}),
        ((("a", "1"), ("a.b", "2")), {"a": {"b": 2}}),
        ((("a", "text"),), {"a": "text"}),
    ):
        (result,) = joined(setting(f"option.hf_overrides.{name}", value) for name, value in names)
        assert isinstance(result, Setting)
        assert json.loads(result.value) == expected


def test_dotted_names_replace_the_option_itself_and_say_so() -> None:
    plain, dotted = setting("option.hf_overrides", "{}"), setting("option.hf_overrides.a")
    for source in ([plain, dotted], [dotted, plain]):
        first, option, note = joined(source)
        assert first == plain
        assert isinstance(option, Setting)
        assert (option.key, option.value) == ("option.hf_overrides", '{"a": 1}')
        assert isinstance(note, Note)
    for others in ([setting("other.a.b")], [setting("option.no_such_option.a")], [plain]):
        assert joined(others) == others


def test_a_name_that_is_nested_too_deeply_is_a_problem_and_loses_nothing_else() -> None:
    deep = setting("option.hf_overrides" + ".a" * 100_000)
    other = setting("option.max_model_len", "7")
    first, problem = joined([other, deep])
    assert first == other
    assert isinstance(problem, Problem)
    assert problem.message == "option.hf_overrides: nested too deeply"


def read(path: Path, data: bytes) -> dict[str, str]:
    path.write_bytes(data)
    return {item.key: item.value for item in only(Setting, from_file(path))}


def test_an_encoded_file_is_ascii_and_reads_the_same(tmp_path: Path) -> None:
    draw, path = random.Random(62), tmp_path / "serving.properties"
    for _ in range(100):
        value = "".join(draw.choices(["a", "ä", "€", "😀", "\\\\", "\\ä", " "], k=8)).strip() + "x"
        text = f"option.model_id={value}\n"
        encoded = encode_properties(text)
        assert encoded.isascii()
        assert encode_properties(encoded) == encoded
        assert read(path, encoded.encode()) == read(path, text.encode()), text


def test_what_java_misreads_is_told(tmp_path: Path) -> None:
    path = tmp_path / "serving.properties"
    assert [*misread_by_java(path)] == []
    for data, words in (
        (b"option.model_id=a\n", []),
        ("option.model_id=ä\n".encode(), []),
        ("option.model_id=ä\n".encode("latin-1"), ["is not UTF-8"]),
        (b"\xef\xbb\xbfoption.model_id=a\n", ["a byte order mark precedes it"]),
        (b"\xef\xbb\xbf\noption.model_id=a\n", []),
    ):
        path.write_bytes(data)
        told = [*misread_by_java(path)]
        assert len(told) == len(words)
        assert all(word in message for word, message in zip(words, told, strict=True))
