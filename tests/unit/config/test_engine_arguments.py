"""Arguments of an engine's own: read from its source, parsed by type, checked by name."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic.dataclasses import dataclass as pydantic_dataclass

from handler.config.loader import read_config
from handler.config.options import OPTIONS
from handler.config.options.engine_arguments import engine_arguments, parser, read_class, shipped
from handler.core.errors import ConfigError
from handler.engines.vllm.arguments import construct
from tests.one_test import in_one_test
from tests.unit.config.engine_arguments import merge

SOURCE = """
class Base:
    model: str = Config.model
    name: "dict[str, Any] | QuantArgs | None" = None
class EngineArgs(Base):
    kind: ClassVar[str] = "x"
    _private: int = 0
    size: Optional[Union[int, str]] = None
    mode: Literal["a", "b"] | None = None
    levels: list[int] | None = None
    backend: AttentionBackendEnum | None = None
    config: get.CompilationConfig = None
    flag: Annotated[bool, Field()] = False
    share: PositiveFloat = 1
    executor: type[Executor] | str | None = None
"""


def test_a_class_is_read_from_its_source() -> None:
    types = {name: "|".join(sorted(found)) for name, found in read_class(SOURCE, "EngineArgs").items()}
    assert types == {
        "model": "str", "name": "null|object", "size": "int|null|str", "mode": "null|str", "levels": "list|null",
        "backend": "any|null", "config": "object", "flag": "bool", "share": "float", "executor": "null|str",
    }  # fmt: skip
    assert read_class(SOURCE, "Other") == {}


@in_one_test(
    ("types", "text", "value"),
    [
        ("bool", "True", True),
        ("int|null", "None", None),
        ("int|null", "7", 7),
        ("float", "1e-1", 0.1),
        ("str", "7", "7"),
        ("any", "FLASH_ATTN", "FLASH_ATTN"),
        ("object", '{"a": 1}', {"a": 1}),
        ("object|str", "auto", "auto"),
        ("list", "1, 2,x", [1, 2, "x"]),
        ("list|null", '["a"]', ["a"]),
        ("list|str", "a,b", "a,b"),
        ("bool", "1", "must be true or false"),
        ("int", "1.5", "must be a whole number"),
        ("object|null", "[1]", "must be a JSON object or null"),
        ("object", "{a}", "must be a JSON object: "),
        ("str", "", "must be a string"),
    ],
)
def test_a_text_is_parsed_by_type(types: str, text: str, value: Any) -> None:
    parse = parser(types.split("|"))
    if isinstance(value, str) and value.startswith("must"):
        with pytest.raises(ValueError, match=value):
            parse(text)
    else:
        assert parse(text) == value


def test_the_installed_engine_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "arg_utils.py").write_text("class EngineArgs:\n    new_thing: int = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    engine_arguments.cache_clear()
    try:
        given = ["option.llm_engine=vllm", "option.new_thing=3", "option.seed=1", "option.new_think=2"]
        config, problems, _ = read_config(overrides=given, environ={})
    finally:
        engine_arguments.cache_clear()
    assert config.engine_options["engine_args"] == {"new_thing": 3}
    assert [str(problem) for problem in problems] == [
        "-o option.seed=1: unknown option 'option.seed': not in vLLM, only in vLLM 0.20 to 0.33; "
        "`lmi options` lists all options",
        "-o option.new_think=2: unknown option 'option.new_think'; did you mean vLLM's 'option.new_thing'?",
    ]


@in_one_test(
    ("engine", "given", "wanted"),
    [
        ("vllm", ['kv_transfer_config={"kv_connector": "C"}'], {"kv_transfer_config": {"kv_connector": "C"}}),
        ("vllm", ["enable_expert_parallel=true", "seed=1"], {"enable_expert_parallel": True, "seed": 1}),
        ("vllm", ["seed=1", 'engine_args={"seed": 2}'], {"seed": 2}),
        ("trtllm", ["enable_iter_perf_stats=true"], {"enable_iter_perf_stats": True}),
        ("vllm", ["data_parallel_size=1", "skip_tokenizer_init=false", "swap_space=4"], None),
        ("vllm", ["max_num_seq=3"], "unknown option 'option.max_num_seq'; did you mean 'option.max_num_seqs'?"),
        ("vllm", ["data_parallel_size=2"], "set option.replicas"),
        ("vllm", ["seed=x"], "must be a whole number"),
        ("vllm", ['engine_args={"sed": 1}'], "'sed' is not an argument of vLLM 0.20 to 0.33; did you mean 'seed'?"),
        ("vllm", ['engine_args={"seed": "1"}'], "'seed': must be a whole number"),
        ("vllm", ['engine_args={"tokenizer": "x"}'], "'tokenizer': the tokenizer in the model's directory is used"),
        ("trtllm", ["enable_expert_parallel=true"], "option.enable_expert_parallel is for vllm; the engine here is"),
        (
            "openvino",
            ["enable_iter_perf_stats=true"],
            "option.enable_iter_perf_stats is for trtllm; the engine here is",
        ),
    ],
)
def test_an_argument_is_passed_or_refused(engine: str, given: list[str], wanted: Any) -> None:
    options = [f"option.llm_engine={engine}", *(f"option.{one}" for one in given)]
    config, problems, _ = read_config(overrides=options, environ={})
    if isinstance(wanted, str):
        assert len(problems) == 1
        assert wanted in str(problems[0])
    else:
        assert problems == ()
        assert config.engine_options.get("engine_args") == wanted


def test_every_argument_of_vllms_server_has_an_answer() -> None:
    given = {
        name for option in OPTIONS for name in (option.key, *option.aliases) if "vllm" in (option.engines or ["vllm"])
    }
    server = shipped("vllm", "server").arguments.keys() - shipped("vllm").arguments.keys()
    assert {f"option.{name}" for name in server} <= given


def test_releases_are_joined() -> None:
    whole, text = frozenset({"int"}), frozenset({"str", "null"})
    assert merge([("1.0", {"a": whole, "b": whole}), ("1.1", {"a": text})]) == {
        "a": ["null|str", "1.0", "1.1"],
        "b": ["int", "1.0", "1.0"],
    }


def test_a_quantization_is_one_of_vllms_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(value: str) -> str:
        overrides = ["option.llm_engine=vllm", f"option.quantize={value}"]
        return "".join(map(str, read_config(overrides=overrides, environ={}).problems))

    monkeypatch.setattr("handler.config.options.engine_arguments._directories", lambda package: [])
    assert [told(value) for value in ("awq", "fp8", "compressed-tensors", "gptq_marlin", "mxfp4")] == [""] * 5
    assert "option.quantize=static_int8: must be one of " in told("static_int8")
    monkeypatch.setattr("handler.config.options.engine_arguments._directories", lambda package: ["/somewhere"])
    assert told("of_a_plugin") == ""  # which vLLM itself knows


def test_a_wrong_object_is_named_without_an_empty_place() -> None:
    """A rule of the whole object has no place in it."""

    @dataclasses.dataclass
    class Transfer:
        kv_role: str | None = None

        @pydantic.model_validator(mode="before")
        @classmethod
        def _role(cls, data: object) -> object:
            raise ValueError("kv_role is needed")

    made = pydantic_dataclass(Transfer)
    EngineArgs = dataclasses.make_dataclass("EngineArgs", [("kv_transfer_config", made)])
    with pytest.raises(ConfigError, match=r"^option\.kv_transfer_config: Value error, kv_role is needed$"):
        construct({"kv_transfer_config": {"a": 1}}, EngineArgs)
