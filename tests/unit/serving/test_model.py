"""A served model: its sampling defaults, its replicas' devices, and its response template."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.loader import read_config
from handler.config.model_files import tokenizer_config
from handler.core.errors import ConfigError, InvalidParameter
from handler.core.values import Request, Sampling
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, Placement, State, on_cores, on_devices
from handler.engines.vllm.arguments import engine_arguments
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.lmi.asynchronous import AsyncChat, AsyncCompletions, AsyncPrompt
from handler.protocols.registry import INVOCATIONS, ROOTS, ROUTES
from handler.scheduler.lora import AdapterRegistry
from handler.serving.check import check
from handler.serving.engine import check_replicas, replica_places
from handler.serving.model import ServedAdapters
from handler.serving.start import server_context
from tests.one_test import in_one_test
from tests.unit.protocols.assistant.response_templates import TEMPLATES

# -- generation --------------------------------------------------------------------------------------------------------
# generation_config.json: which sampling parameters hold where clients leave them out, and where they do not.


ALL = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}  # fmt: skip
COMMON = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
CHAT = {"messages": [{"role": "user", "content": "a"}]}

BODIES: Mapping[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (ROUTES["/v1/chat/completions"], CHAT),
    "completion": (ROUTES["/v1/completions"], {"prompt": "a"}),
    "messages": (ROUTES["/v1/messages"], {**CHAT, "max_tokens": 9}),
    "responses": (ROUTES["/v1/responses"], {"input": "a"}),
    "async chat": (AsyncChat(), CHAT),
    "async completion": (AsyncCompletions(), {"prompt": "a"}),
}
"""Those that it fills, at their least."""

OTHERS: Mapping[str, tuple[Dialect, dict[str, Any]]] = {
    "LMI": (INVOCATIONS["lmi"], {"inputs": "a"}),
    "LMI, sampled": (INVOCATIONS["lmi"], {"inputs": "a", "parameters": {"do_sample": True}}),
    "LMI's chat": (INVOCATIONS["lmi"], CHAT),
    "dynamic batch": (INVOCATIONS["dynamic_batch"], {"inputs": "a"}),
    "TGI": (ROUTES["/generate"], {"inputs": "a", "parameters": {"do_sample": True}}),
    "MindIE": (ROOTS["mindie"], {"inputs": "a"}),
    "Triton": (ROUTES["/v2/models/{model}/generate"], {"text_input": "a", "max_tokens": 9}),
}


def served(directory: Path, values: object = None, *options: str, engine: str = "echo") -> ServerContext:
    """The context of a model whose generation_config.json has `values`; with an engine that need not be installed."""
    if values is not None:
        (directory / "generation_config.json").write_text(json.dumps(values))
    config = read_config(overrides=[f"option.llm_engine={engine}", *options], environ={}).checked()
    with mock.patch.object(engines, "entry", ENGINES.__getitem__):
        return server_context(config, Spec(engine, EngineConfig(config, directory)), AdapterRegistry(1))


def request(dialect: str, context: ServerContext, **more: Any) -> Request:
    reader, body = {**BODIES, **OTHERS}[dialect]
    (parsed,) = reader.parse({**body, **more}, context).requests
    return parsed


def sampling(dialect: str, context: ServerContext, **more: Any) -> Sampling:
    return request(dialect, context, **more).sampling


def of(sampling: Sampling, names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in names}


def test_the_models_own_end_tokens_are_known(tmp_path: Path) -> None:
    assert served(tmp_path, {"eos_token_id": [2, 5]}).eos == {2, 5}
    assert served(tmp_path, {"eos_token_id": 2}).eos == {2}


@pytest.mark.parametrize("engine", ENGINES)
def test_it_fills_what_the_client_leaves_out(tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    address = {"openai": "http://127.0.0.1:1/v1", "grpc": "grpc://127.0.0.1:1"}.get(engine)
    url = (f"option.base_url={address}", "option.base_url_kind=vllm") if address else ()
    with caplog.at_level(logging.INFO, "handler.launch"):
        context = served(tmp_path, {**ALL, "eos_token_id": 2, "transformers_version": "4"}, *url, engine=engine)
    wanted = {name: value for name, value in ALL.items() if name not in context.unsupported}
    assert context.generation.shown == wanted
    assert wanted.keys() >= COMMON.keys() or engine == "echo"
    assert "temperature=0.6" in caplog.text
    for name in ALL.keys() - wanted:
        assert f"the model's default {name}={ALL[name]} has no effect: the engine does not support it: " in caplog.text
    for dialect in BODIES:
        found = sampling(dialect, context)
        assert found.do_sample, dialect
        assert of(found, wanted) == wanted, dialect
        assert sampling(dialect, context, temperature=0.2) == found._replace(temperature=0.2)
        assert not sampling(dialect, context, temperature=0).do_sample
        assert sampling(dialect, context, temperature=1, top_p=1)[4:8] == found._replace(temperature=1, top_p=1)[4:8]
        assert sampling(dialect, context, temperature=None) == found


def test_other_apis_are_as_their_originals(tmp_path: Path) -> None:
    context = served(tmp_path, {**ALL, "max_new_tokens": 7})
    plain = ServerContext("echo")
    for dialect in OTHERS:
        ours, wanted = (sampling(dialect, each)._replace(seed=None) for each in (context, plain))
        assert ours == wanted, dialect


def test_a_prompt_of_lmis_async_mode_heeds_it(tmp_path: Path) -> None:
    context = served(tmp_path, {**ALL, "max_new_tokens": 7})

    def read(**parameters: Any) -> Sampling:
        (found,) = AsyncPrompt().parse({"inputs": "a", "parameters": parameters}, context).requests
        return found.sampling

    held = context.generation.sampling
    assert of(read(), held) == held
    assert read().do_sample
    assert read().max_new_tokens == 30  # LMI's own default comes before the model's
    assert not read(do_sample=False).do_sample
    assert (read(temperature=0.2).temperature, read(do_sample=True).temperature) == (0.2, 0.6)


def test_lmis_chats_heed_it_since_0_32(tmp_path: Path) -> None:
    for version, wanted in (("0.31", {"temperature": 1.0, "top_k": 0, "top_p": 1.0}), ("0.32", COMMON)):
        context = served(tmp_path, COMMON, f"option.lmi_version={version}")
        assert of(sampling("LMI's chat", context), COMMON) == wanted
        assert not sampling("LMI", context).do_sample


def test_a_temperature_of_zero_is_greedy(tmp_path: Path) -> None:
    context = served(tmp_path, {"temperature": 0.0})
    for dialect in BODIES:
        assert not sampling(dialect, context).do_sample
        assert sampling(dialect, context, temperature=0.5).do_sample


def test_the_response_repeats_the_values_that_held(tmp_path: Path) -> None:
    context = served(tmp_path, COMMON)
    reader, body = BODIES["responses"]
    for more, wanted in (({}, (0.6, 0.9)), ({"temperature": 1, "top_p": 0.5}, (1, 0.5))):
        parsed = reader.parse({**body, **more}, context)
        head = parsed.reply._settings.head  # type: ignore[attr-defined]
        assert (head["temperature"], head["top_p"]) == wanted


# -- the option and the override ---------------------------------------------------------------------------------------


def test_the_option_turns_it_off_or_names_another(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    for value, wanted in (("auto", COMMON), ("vllm", {}), ("trtllm", {}), (str(other), {"top_p": 0.5})):
        assert served(tmp_path, COMMON, f"option.generation_config={value}").generation.shown == wanted
    properties = tmp_path / "serving.properties"
    properties.write_text("option.llm_engine=echo\noption.generation_config=other\n")
    config = read_config(properties=properties, environ={}).checked()  # relative to that file
    found = server_context(config, Spec("echo", EngineConfig(config, tmp_path)), AdapterRegistry(1))
    assert found.generation.shown == {"top_p": 0.5}


def test_the_override_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    override = 'option.override_generation_config={"top_k": 3, "top_p": null, "eos_token_id": 4}'
    assert served(tmp_path, COMMON, override).generation.shown == {"temperature": 0.6, "top_k": 3}
    assert "option.override_generation_config: eos_token_id has no effect" in caplog.text
    assert served(tmp_path, COMMON, override, "option.generation_config=vllm").generation.shown == {"top_k": 3}


def test_the_log_says_nothing_where_nothing_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert served(tmp_path, {"eos_token_id": 2}).generation.shown == {}
        assert served(tmp_path).generation.shown == {}
    assert not caplog.text


# -- the length --------------------------------------------------------------------------------------------------------


def test_the_models_length_is_that_of_answers_without_one(tmp_path: Path) -> None:
    context = served(tmp_path, {"max_new_tokens": 20})
    for dialect, wanted in (("chat", 20), ("responses", 20), ("completion", 16), ("messages", 9)):
        assert sampling(dialect, context).max_new_tokens == wanted
    assert request("chat", context).fill_context  # a prompt that leaves less than that is not refused
    assert sampling("chat", context, max_tokens=50).max_new_tokens == 50


@pytest.mark.parametrize("chosen", ["directory", "override"])
def test_the_operators_length_is_the_most_of_any_answer(tmp_path: Path, chosen: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"max_new_tokens": 5}')
    values = {"directory": f"generation_config={other}", "override": 'override_generation_config={"max_new_tokens": 5}'}
    context = served(tmp_path, {"max_new_tokens": 20}, f"option.{values[chosen]}")
    for dialect in BODIES:
        assert sampling(dialect, context).max_new_tokens == 5
    assert sampling("chat", context, max_tokens=50).max_new_tokens == 5
    assert sampling("chat", context, max_tokens=3).max_new_tokens == 3
    with pytest.raises(InvalidParameter, match="min_tokens=6: must be at most max_tokens=5"):
        request("chat", context, max_tokens=50, min_tokens=6)


# -- wrong files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"temperature": "hot"}', 'generation_config.json: temperature="hot": must be a number of at least 0'),
        ('{"top_p": 1.5}', "top_p=1.5: must be a number of at least 0 and at most 1; correct it, or set option."),
        ('{"top_k": true}', "top_k=true: must be an integer"),
        ('{"max_new_tokens": 0}', "max_new_tokens=0: must be an integer from 1"),
        ('{"min_p": NaN}', "min_p=NaN: must be a number"),
    ],
)
def test_a_wrong_file_is_named_at_the_start_and_by_the_check(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        served(tmp_path)
    assert said in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    found = check(read_config(overrides=["option.llm_engine=echo", f"option.model_id={tmp_path}"], environ={}))
    assert [said in str(problem) for problem in found] == [True]
    if text not in ("{", "[]"):
        assert served(tmp_path, None, "option.generation_config=vllm").generation.shown == {}


def test_every_wrong_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        served(tmp_path, {"top_p": 2}, 'option.override_generation_config={"top_k": "x", "temperature": -1}')
    assert len(refused.value.problems) == 3
    assert 'option.override_generation_config: top_k="x": must be an integer' in str(refused.value)


def test_a_directory_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option.generation_config=nowhere: must be auto, vllm, or a directory"):
        served(tmp_path, COMMON, "option.generation_config=nowhere")


def test_an_engine_argument_says_where_it_belongs() -> None:
    from handler.engines.vllm.arguments import engine_arguments

    for name, value in (("generation_config", "vllm"), ("override_generation_config", {})):
        config = EngineConfig(Config(engine_options={"engine_args": {name: value}}))
        with pytest.raises(ConfigError, match=f"{name!r} has no effect there; use option.{name}"):
            engine_arguments(config, 1, cpu=True)


# -- what each replica gets: devices in its environment, and cores; and what is refused --------------------------------


FOUR = ["0", "1", "2", "3"]


def config(*options: str, engine: str = "vllm") -> Config:
    return read_config(overrides=[f"option.{one}" for one in (f"llm_engine={engine}", *options)], environ={}).checked()


@in_one_test(
    ("options", "devices", "wanted"),
    [
        (["replicas=auto"], FOUR, ["0", "1", "2", "3"]),
        (["replicas=2"], FOUR, ["0", "1"]),
        (["replicas=auto", "tensor_parallel_degree=2"], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", "tensor_parallel_degree=2", "pipeline_parallel_degree=2"], FOUR, [None]),
        (["replicas=auto", "prefill_context_parallel_size=2"], FOUR, ["0,1", "2,3"]),
        (["replicas=2", "tensor_parallel_degree=2", "decode_context_parallel_size=2"], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", 'engine_args={"tensor_parallel_size": 2}'], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", "tensor_parallel_degree=max"], FOUR, [None]),
        (
            ["replicas=3", "prefill_context_parallel_size=2"],
            FOUR,
            "needs 6 GPUs with option.tensor_parallel_degree=1 and 2 parts of the context, but there are 4",
        ),
        (["replicas=2", "tensor_parallel_degree=max"], FOUR, ["0,1", "2,3"]),
        (["replicas=auto", "tensor_parallel_degree=3"], FOUR, [None]),
        (["replicas=auto"], ["GPU-a", "GPU-b"], ["GPU-a", "GPU-b"]),
        (["replicas=auto"], [], [None]),
        (["replicas=5"], FOUR, "option.replicas=5: needs 5 GPUs with option.tensor_parallel_degree=1, but there are 4"),
        (
            ["replicas=2", "tensor_parallel_degree=2", "pipeline_parallel_degree=2"],
            FOUR,
            "needs 8 GPUs with option.tensor_parallel_degree=2 and 2 stages, but there are 4",
        ),
        (
            ["replicas=2", "engine_isolation=thread"],
            FOUR,
            "replicas run as processes, but option.engine_isolation=thread",
        ),
        (
            ["replicas=2", "llm_engine=openai"],
            FOUR,
            "list the addresses of several servers in option.base_url, and omit option.replicas",
        ),
    ],
)
def test_devices(options: list[str], devices: list[str], wanted: Any) -> None:
    def places() -> list[str | None]:
        check_replicas(config(*options))
        found = replica_places(config(*options), devices, [0, 1])
        return [placement.environ.get("CUDA_VISIBLE_DEVICES") for placement in found]

    if isinstance(wanted, str):
        with pytest.raises(ConfigError) as error:
            places()
        assert wanted in str(error.value)
    else:
        assert places() == wanted


@in_one_test(
    ("cores", "count", "wanted"),
    [([0, 1], 2, [[0], [1]]), ([3, 1, 2, 0], 2, [[0, 1], [2, 3]]), ([0, 1, 2], 2, [[0], [1, 2]]),
     ([0, 1], 4, [[0], [0], [1], [1]]), ([5], 2, [[5], [5]])],
)  # fmt: skip
def test_cores_are_divided(cores: list[int], count: int, wanted: list[list[int]]) -> None:
    assert sorted(sorted(placement.cores) for placement in on_cores(cores, count)) == wanted


def test_devices_are_divided_by_their_own_names() -> None:
    environs = [placement.environ for placement in on_devices(["2", "GPU-a", "5", "7"], 2)]
    assert environs == [{"CUDA_VISIBLE_DEVICES": "2,GPU-a"}, {"CUDA_VISIBLE_DEVICES": "5,7"}]


@pytest.mark.parametrize(("cores", "wanted"), [([0, 1, 2, 3], [{0, 1}, {2, 3}]), ([], [set(), set()])])
def test_without_devices_the_cores_are_divided(cores: list[int], wanted: list[set[int]]) -> None:
    assert [
        placement.cores for placement in replica_places(config("replicas=2", engine="openvino"), [], cores)
    ] == wanted


def test_the_engines_process_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    core = max(os.sched_getaffinity(0))
    engine = EngineSupervisor(
        Spec("echo", EngineConfig()), placement=Placement({"CUDA_VISIBLE_DEVICES": "2,3"}, frozenset({core}))
    )
    try:
        while engine.state is State.LOADING:
            engine.step(timeout=1)
        environ = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
        assert [one for one in environ if one.startswith(b"CUDA")] == [b"CUDA_VISIBLE_DEVICES=2,3"]
        threads = Path(f"/proc/{engine.pid}/task").iterdir()
        assert {frozenset(os.sched_getaffinity(int(thread.name))) for thread in threads} == {frozenset({core})}
    finally:
        engine.close()


@pytest.mark.parametrize("replicas", ["auto", "2"])
def test_several_servers_by_url_are_no_replicas(replicas: str) -> None:
    with pytest.raises(ConfigError, match=rf"option\.replicas={replicas}: .*option\.base_url"):
        check_replicas(config(f"replicas={replicas}", "base_url=http://a/v1", engine="openai"))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["context_parallel_size=2"], ["0,1", "2,3"]),
        (["context_parallel_size=2", "pipeline_parallel_size=2"], [None]),
        (["tensor_parallel_degree=2", "moe_expert_parallel_size=2"], ["0,1", "2,3"]),
    ],
)
def test_parts_of_the_context_are_gpus_of_an_engine(options: list[str], wanted: list[str | None]) -> None:
    found = replica_places(config("replicas=auto", *options, engine="trtllm"), FOUR, [])
    assert [placement.environ.get("CUDA_VISIBLE_DEVICES") for placement in found] == wanted


def test_max_leaves_gpus_for_stages_and_parts_of_the_context() -> None:
    for options in ({"pipeline_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        arguments = engine_arguments(
            EngineConfig(Config(tensor_parallel_degree="max", engine_options=options)), 4, cpu=False
        )
        assert arguments["tensor_parallel_size"] == 2


# -- the response template of a model's files: where it is taken, and what is refused at the start ---------------------


BROKEN = {"start_anchor": "a", "fields": {"content": {"open_pattern": "(a"}}}


def template_served(directory: Path, template: Any, *options: str) -> ServerContext:
    (directory / "tokenizer_config.json").write_text(json.dumps({"response_template": template} if template else {}))
    config = read_config(overrides=[f"option.model_id={directory}", "option.llm_engine=echo", *options], environ={})
    checked = config.checked()
    return server_context(checked, Spec("echo", EngineConfig(checked, directory)), AdapterRegistry())


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ((), True),
        (("option.reasoning_parser=auto",), True),
        (("option.reasoning_parser=hf", "option.tool_call_parser=hf"), True),
        (("option.reasoning_parser=none",), True),
        (("option.reasoning_parser=none", "option.tool_call_parser=none"), False),
        (("option.tool_call_parser=hermes",), False),
        (("option.reasoning_parser=qwen3",), False),
    ],
)
def test_auto_takes_it_unless_an_option_names_another_parser(
    tmp_path: Path, options: tuple[str, ...], taken: bool
) -> None:
    assert (template_served(tmp_path, TEMPLATES["hermes"], *options).response_template is not None) is taken
    assert (
        template_served(tmp_path, None, *(option for option in options if "=hf" not in option)).response_template
        is None
    )


NO_CALLS = {"start_anchor": "a", "fields": {"thinking": {"open": "b"}}}


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (BROKEN, ("reasoning_parser=hf",), "fields.content.open_pattern: '(a' cannot be read: a bracket is not closed"),
        ("text", ("reasoning_parser=hf",), "tokenizer_config.json: response_template: must be an object"),
        (None, ("tool_call_parser=hf",), "tokenizer_config.json has no response_template"),
        (NO_CALLS, ("tool_call_parser=hf",), "tokenizer_config.json: response_template.fields has no tool_calls"),
        (NO_CALLS, ("reasoning_parser=hf", "tool_call_parser=hermes"), "combined with option.tool_call_parser=hermes"),
        (NO_CALLS, ("reasoning_parser=hf", "tool_parser_plugin=p.py"), "combined with option.tool_parser_plugin=p.py"),
    ],
)  # fmt: skip
def test_what_hf_cannot_read_is_refused_with_file_and_place(
    tmp_path: Path, template: Any, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        template_served(tmp_path, template, *(f"option.{option}" for option in options))
    assert message in str(refused.value)
    assert f"option.{options[0]}: " in str(refused.value)


def test_auto_leaves_a_broken_one_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert template_served(tmp_path, BROKEN).response_template is None
    (message,) = caplog.messages
    assert f"{tmp_path / 'tokenizer_config.json'}: response_template.fields.content.open_pattern" in message
    assert "the parsers are derived from the chat template" in message


def test_a_check_finds_it_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": BROKEN}))
    options = [f"option.model_id={tmp_path}", "option.llm_engine=echo", "option.reasoning_parser=hf"]
    problems = check(read_config(overrides=options, environ={}))
    assert "fields.content.open_pattern" in "".join(problem.message for problem in problems)


def test_tokenizer_info_shows_it_as_it_is(tmp_path: Path) -> None:
    template_served(tmp_path, TEMPLATES["hermes"])
    assert tokenizer_config(tmp_path)["response_template"] == TEMPLATES["hermes"]


def test_a_call_about_adapters_is_counted_until_its_end() -> None:
    home: Any = SimpleNamespace(registry=None, at_start=(), roots=None, of_server=None)
    formatters: Any = None
    adapters = ServedAdapters(home, lambda: None, formatters)
    with contextlib.suppress(RuntimeError), adapters.calls:
        assert adapters.calls.value == 1
        raise RuntimeError
    assert adapters.calls.value == 0
