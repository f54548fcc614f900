"""generation_config.json: which sampling parameters hold where clients leave them out, and where they do not."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler import engines
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.config.loader import read_config
from handler.core.errors import ConfigError, InvalidParameter
from handler.core.values import Request, Sampling
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.protocols.kernel.dialect import Dialect, ServerContext
from handler.protocols.lmi.asynchronous import AsyncChat, AsyncCompletions, AsyncPrompt
from handler.protocols.registry import INVOCATIONS, ROOTS, ROUTES
from handler.scheduler.lora import AdapterRegistry
from handler.serving.check import check
from handler.serving.start import server_context

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


@pytest.mark.parametrize("engine", ENGINES)
def test_it_fills_what_the_client_leaves_out(tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    url = ("option.base_url=http://127.0.0.1:1/v1", "option.base_url_kind=vllm") if engine == "openai" else ()
    with caplog.at_level(logging.INFO, "handler.launch"):
        context = served(tmp_path, {**ALL, "eos_token_id": 2, "transformers_version": "4"}, *url, engine=engine)
    wanted = {name: value for name, value in ALL.items() if name not in context.unsupported}
    assert context.generation.shown == wanted
    assert wanted.keys() >= COMMON.keys() or engine == "echo"
    assert "temperature=0.6" in caplog.text
    for name in ALL.keys() - wanted:
        assert f"the model's default {name}={ALL[name]} has no effect: the engine lacks it: " in caplog.text
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
    with pytest.raises(InvalidParameter, match="min_tokens=6: must be at most max_new_tokens=5"):
        request("chat", context, max_tokens=50, min_tokens=6)


# -- wrong files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"temperature": "hot"}', 'generation_config.json: temperature="hot": must be a number of at least 0'),
        ('{"top_p": 1.5}', "top_p=1.5: must be a number of at least 0 and at most 1; correct it, or write option."),
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
        with pytest.raises(ConfigError, match=f"{name!r} has no effect there: write option.{name}"):
            engine_arguments(config, 1, cpu=True)
