"""JSON options by dotted names, as vLLM's argument parser joins them: as flags, variables and lines of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handler.cli import make_parser
from handler.config.loader import Reading, read_config
from handler.config.options import KNOWN, OPTIONS
from handler.config.options.engine_arguments import shipped
from handler.config.options.option import MediaLimits, json_object
from tests.one_test import in_one_test

_ENGINES = ("vllm", "trtllm")


def read_flags(*words: str) -> Reading:
    return read_config(overrides=make_parser().parse_all(["serve", *words]).options, environ={})


def engine_args(reading: Reading) -> dict[str, Any]:
    assert reading.problems == ()
    return dict(reading.config.engine_options.get("engine_args", {}))


@in_one_test(
    ("words", "wanted"),
    [
        ("--compilation-config.mode 3", {"mode": 3}),
        ("--compilation-config.mode=3", {"mode": 3}),
        ("--compilation_config.pass_config.fuse_norm_quant true", {"pass_config": {"fuse_norm_quant": True}}),
        ("-cc.mode 3 --compilation-config.backend=inductor", {"mode": 3, "backend": "inductor"}),
        ("-cc.a.b 1 -cc.a.c 2 -cc.a.b 3", {"a": {"b": 3, "c": 2}}),
        ("-cc.a 1 -cc.a.b 2", {"a": {"b": 2}}),
        ("-cc.sizes+ 1,2 -cc.sizes+=4", {"sizes": ["1", "2", "4"]}),
        ("-cc.sizes [1,2] -cc.sizes [4]", {"sizes": [1, 2, 4]}),
        ('-cc.a {"b":{"c":1}} -cc.a.b.d null', {"a": {"b": {"c": 1, "d": None}}}),
        ("-cc.a 1k -cc.b 2K -cc.c 25.6k -cc.d 2.5K", {"a": 1000, "b": 2048, "c": 25600, "d": "2.5K"}),
        ("-cc.a 01 -cc.b +5 -cc.c 1_000", {"a": 1, "b": 5, "c": 1000}),
        ("-cc.a -1 -cc.b a=b -cc.c=x.y", {"a": -1, "b": "a=b", "c": "x.y"}),
        ('-cc={"a":1} -cc.b 2', {"b": 2}),
    ],
)
def test_flags_are_joined_as_by_vllms_parser(words: str, wanted: dict[str, Any]) -> None:
    found = engine_args(read_flags("--engine=vllm", "-o", "option.llm_engine=vllm", *words.split()))
    assert found["compilation_config"] == wanted


def test_outer_spaces_stay_and_digits_of_other_scripts_are_text() -> None:
    words = ("-cc.a+", " 7", "-cc.b", " x ", "-cc.c", "\u0663k", "-cc.d", " 2K ")
    found = engine_args(read_flags("--engine=vllm", "-o", "option.llm_engine=vllm", *words))
    assert found["compilation_config"] == {"a": [" 7"], "b": " x ", "c": "\u0663k", "d": 2048}


@in_one_test(
    ("environ", "wanted"),
    [
        ({"SM_VLLM_LIMIT_MM_PER_PROMPT.IMAGE": "2"}, {"image": 2}),
        (
            {"SM_VLLM_LIMIT_MM_PER_PROMPT.IMAGE": "2", "SM_VLLM_LIMIT_MM_PER_PROMPT.AUDIO": "1"},
            {"image": 2, "audio": 1},
        ),
        ({"OPTION_LIMIT_MM_PER_PROMPT.IMAGE": "2", "OPTION_LLM_ENGINE": "vllm"}, {"image": 2}),
        ({"OPTION_limit_mm_per_prompt.image": "2", "OPTION_LLM_ENGINE": "vllm"}, {"image": 2}),
        ({"SM_VLLM_LIMIT_MM_PER_PROMPT": '{"image": 9}', "SM_VLLM_LIMIT_MM_PER_PROMPT.AUDIO": "1"}, {"audio": 1}),
        ({"SM_VLLM_LIMIT_MM_PER_PROMPT.IMAGE": "2", "OPTION_LIMIT_MM_PER_PROMPT": "image=3"}, {"image": 3}),
    ],
)  # fmt: skip
def test_variables_are_joined_too(environ: dict[str, str], wanted: dict[str, Any]) -> None:
    reading = read_config(environ=environ)
    assert reading.problems == ()
    assert reading.config.engine_options["limit_mm_per_prompt"] == wanted


def test_a_stronger_source_replaces_the_whole_of_a_weaker_one(tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text(
        "option.llm_engine=vllm\noption.limit_mm_per_prompt.image = 2\noption.hf_overrides.a+=x,y\n"
        "option.hf_overrides.a+=z\n"
    )
    environ = {"OPTION_LIMIT_MM_PER_PROMPT.AUDIO": "1"}
    reading = read_config(properties=file, environ=environ)
    assert reading.config.engine_options["limit_mm_per_prompt"] == {"image": 2}
    assert engine_args(reading)["hf_overrides"] == {"a": ["x", "y", "z"]}
    assert reading.config.settings["option.limit_mm_per_prompt.image"] == "2", "as a model.py's handle gets it"
    stronger = read_config(properties=file, environ=environ, overrides=["option.limit_mm_per_prompt=image=7"])
    assert stronger.config.engine_options["limit_mm_per_prompt"] == {"image": 7}


def test_a_value_that_dotted_names_replace_is_told() -> None:
    given = ['option.hf_overrides={"a": 1}', "option.hf_overrides.b=2", "option.llm_engine=vllm"]
    (warning,) = read_config(overrides=given, environ={}).config.warnings
    assert warning.startswith('option.hf_overrides (-o option.hf_overrides={"a": 1}) has no effect here: ')


def _json_options() -> list[tuple[str, str]]:
    """Return each option whose value is a JSON object, with an engine that has it."""
    rows = [
        (key, engine)
        for engine in _ENGINES
        for name, argument in shipped(engine).arguments.items()
        if "object" in argument.types and (key := f"option.{name}") not in KNOWN
    ]
    own = [one for one in OPTIONS if one.parse is json_object or isinstance(one.parse, MediaLimits)]
    return rows + [(one.key, next((name for name in _ENGINES if name in one.engines), "vllm")) for one in own]


@in_one_test(("key", "engine"), _json_options())
def test_every_json_option_has_dotted_names(key: str, engine: str, tmp_path: Path) -> None:
    """As a flag, with dashes and underscores, as a variable of both kinds, as a line and by `-o`."""
    name = key.removeprefix("option.")
    sub = "limit_mm_per_prompt.image" if name == "engine_args" and engine == "vllm" else "image"
    name, value, chosen = f"{name}.{sub}", "3", f"option.llm_engine={engine}"
    file = tmp_path / "serving.properties"
    file.write_text(f"{chosen}\noption.{name}={value}\n")
    variables = [{f"OPTION_{name.upper()}": value, "OPTION_LLM_ENGINE": engine}]
    variables += [{f"SM_VLLM_{name.upper()}": value}] if engine == "vllm" else []
    whole = read_config(overrides=[chosen, f"{key}={_nested(sub, 3)}"], environ={})
    readings = [
        read_flags("-o", chosen, f"--{name}", value),
        read_flags("-o", chosen, f"--{name.replace('_', '-', key.count('_'))}={value}"),
        read_config(properties=file, environ={}),
        read_config(overrides=[chosen, f"option.{name}={value}"], environ={}),
        *(read_config(environ=environ) for environ in variables),
    ]
    for reading in readings:
        assert [str(one.message)[-60:] for one in reading.problems] == [
            str(one.message)[-60:] for one in whole.problems
        ]
        assert reading.config.engine_options == whole.config.engine_options


def _nested(names: str, value: int) -> str:
    found: Any = value
    for name in reversed(names.split(".")):
        found = {name: found}
    return json.dumps(found)


@in_one_test(
    ("word", "why"),
    [
        ("option.max_model_len.x=1", "must be a whole number"),
        ("option.hf_override.a=1", "unknown option 'option.hf_override.a'"),
        ("option.hf_overrides." + ".".join("a" * 5000) + "=1", "nested too deeply"),
        ("option.hf_overrides.a=" + "[" * 200_000, "nested too deeply"),
    ],
)
def test_what_cannot_be_joined_is_a_problem(word: str, why: str) -> None:
    reading = read_config(overrides=["option.llm_engine=vllm", word], environ={})
    assert any(why in str(problem) for problem in (*reading.problems, *reading.config.warnings))


@pytest.mark.parametrize("word", ["--compilation-config.mode", "--compilation-confi.mode 3", "--model.x"])
def test_a_flag_that_cannot_be_joined_is_a_usage_error(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_all(["serve", *word.split()])
    assert word.partition(" ")[0] in capsys.readouterr().err
