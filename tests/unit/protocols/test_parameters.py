"""The parameter tables of docs/wire/: every cell of every engine is what its capabilities make of a request."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import pytest

from handler import engines
from handler.config.engines import ENGINES
from handler.config.loader import read_config
from handler.core.errors import InvalidParameter, ServingError
from handler.core.text import Vocabulary
from handler.core.values import BY_HANDLER, Adapter, Sampling
from handler.engines.base import Capabilities, EngineConfig
from handler.engines.openai.kinds import KINDS
from handler.protocols.kernel.dialect import Dialect, ServerContext
from handler.protocols.kernel.parameters import Parameter
from handler.protocols.kernel.readers import number
from handler.protocols.lmi.request import TABLE as LMI_TABLE
from handler.protocols.registry import INVOCATIONS, ROOTS
from tests import parameter_matrix as matrix
from tests.doubles import using
from tests.one_test import in_one_test

LORA = {"option.enable_lora": "true"}
TRTLLM = {**LORA, "option.gather_generation_logits": "true"}
SETTINGS: dict[str, tuple[str, str, dict[str, str]]] = {
    "echo": ("echo", "", {}),
    "echo with adapters": ("echo", "", LORA),
    "openvino": ("openvino", "", {}),
    "vllm": ("vllm", "", {}),
    "vllm with adapters": ("vllm", "", LORA),
    "trtllm 1.0": ("trtllm", "1.0.0", {}),
    "trtllm 1.1": ("trtllm", "1.1.0", {}),
    "trtllm 1.2 with beams": (
        "trtllm",
        "1.2.1",
        {**TRTLLM, "option.max_beam_width": "3", "option.sampler_type": "TRTLLMSampler"},
    ),
    "trtllm 1.3": ("trtllm", "1.3.0", {**TRTLLM, "option.guided_decoding_backend": "xgrammar"}),
}
"""Engine, the version of its double, and options."""

VOCABULARY = Vocabulary([b"%d" % number for number in range(10)])
DIALECTS: dict[str, tuple[Dialect, matrix.Values]] = {
    matrix.PARAMETERS: (INVOCATIONS["lmi"], matrix.VALUES),
    matrix.TENSORS: (INVOCATIONS["lmi"], matrix.TENSOR_VALUES),
    matrix.CHAT: (INVOCATIONS["lmi"], matrix.CHAT_VALUES),
    matrix.TGI: (ROOTS["tgi"], matrix.TGI_VALUES),
    matrix.MINDIE: (ROOTS["mindie"], matrix.MINDIE_VALUES),
}


class Registered:
    """Every name and number is an adapter's."""

    def find(self, name: str) -> Adapter:
        return Adapter(name, 1, "/nowhere")

    def by_number(self, number: int) -> Adapter:
        return Adapter("mine", number, "/nowhere")

    def names(self) -> list[str]:
        return []


def capabilities(engine: str, options: Mapping[str, str]) -> Capabilities:
    given = [f"option.llm_engine={engine}", *(f"{key}={value}" for key, value in options.items())]
    config = read_config(overrides=given, environ={}).checked()
    able: Capabilities = engines.module(engine).capabilities(EngineConfig(config))
    return able


def context(engine: str, options: Mapping[str, str]) -> ServerContext:
    """Without the engine itself, which need not be installed."""
    able = capabilities(engine, options)
    return ServerContext(
        engine=engine,
        unsupported=able.unsupported,
        limits=able.limits,
        no_adapters=able.no_adapters,
        sampling_defaults=able.sampling_defaults,
        adapters=Registered(),
        vocabulary=None if engine == "echo" else VOCABULARY,  # each of echo's prompts brings its own
    )


def body(heading: str, name: str) -> dict[str, Any]:
    value, beside = DIALECTS[heading][1][name]
    if heading == matrix.CHAT:
        return {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 4, **beside, name: value}
    if name == "embedding_bias":
        value = [[*value[0], *[0.0] * (len(VOCABULARY.pieces) - 1)]]
    asked: dict[str, Any] = {"inputs": "a b c", "parameters": {"max_new_tokens": 2, **beside, name: value}}
    if name == "request_output_len":
        del asked["parameters"]["max_new_tokens"]
    if name == "input_ids":
        del asked["inputs"]
    return asked


def outcome(heading: str, name: str, server: ServerContext) -> str:
    """What becomes of it: refused by name, reported as ignored, or accepted; else a message that names another."""
    try:
        parsed = DIALECTS[heading][0].parse(body(heading, name), server)
    except ServingError as error:
        message = str(error)
        named = (name, *DIALECTS[heading][1][name][1])  # beams themselves, where there are none
        return "refused" if any(f"{one}=" in message for one in named) else message
    return "ignored" if any(one.rpartition(".")[2] == name for one in parsed.ignored) else "accepted"


@in_one_test("heading", DIALECTS)
@in_one_test("setting", SETTINGS)
def test_every_cell_is_true(setting: str, heading: str) -> None:
    engine, version, options = SETTINGS[setting]
    double = using.tensorrt_llm(f"version={version}") if version else contextlib.nullcontext()
    with double:
        server = context(engine, options)
        missing = matrix.unmet(heading, engine, version, options)
        wrong = {}
        for name in DIALECTS[heading][1]:
            wanted = matrix.expected(heading, engine, name, missing)
            found = outcome(heading, name, server)
            if found != wanted:
                wrong[name] = (wanted, found)
    assert wrong == {}


_FIELDS = [*Sampling._field_defaults.items(), ("pretended", 0.5)]


class Later(namedtuple("Later", [name for name, _ in _FIELDS], defaults=[value for _, value in _FIELDS])):  # type: ignore[misc]
    """Sampling with one field more, of which no engine knows."""

    num_sequences, with_seed = Sampling.num_sequences, Sampling.with_seed


@pytest.mark.parametrize("setting", [*SETTINGS, *KINDS])
def test_a_field_that_no_engine_maps_is_refused_by_name(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("handler.engines.base", "handler.protocols.kernel.parameters"):
        monkeypatch.setattr(f"{place}.Sampling", Later)
    monkeypatch.setattr("handler.protocols.kernel.parameters.SAMPLING_DEFAULTS", Later._field_defaults)
    parameter = Parameter("pretended", number(0, 0.5))
    monkeypatch.setitem(LMI_TABLE.parameters, "pretended", parameter)
    servers = {"option.base_url": "http://x/v1", "option.base_url_kind": setting}
    engine, version, options = SETTINGS.get(setting, ("openai", "", servers))
    with using.tensorrt_llm(f"version={version}") if version else contextlib.nullcontext():
        server = context(engine, options)

    def parse(value: float, server: ServerContext = server, **beside: object) -> None:
        INVOCATIONS["lmi"].parse({"inputs": "a", "parameters": {"pretended": value, **beside}}, server)

    with pytest.raises(InvalidParameter, match=r"pretended=0\.1: is not available with num_beams > 1"):
        parse(0.1, ServerContext("any", unsupported={}), num_beams=2)
    parse(0.5)  # the neutral value
    with pytest.raises(InvalidParameter) as refused:
        parse(0.1)
    assert refused.value.message == (
        f"parameters.pretended=0.1: the engine {engine} lacks it: it has no such parameter"
    )


@in_one_test("engine", ENGINES)
def test_an_engine_names_fields_of_sampling_alone(engine: str) -> None:
    servers = {"option.base_url": "http://x/v1", "option.base_url_kind": "vllm"}
    with using.tensorrt_llm("version=1.3.0"):
        able = capabilities(engine, servers if engine == "openai" else {})
    assert {*able.supports, *able.reasons, *able.limits, *BY_HANDLER} <= set(Sampling._fields)
    assert BY_HANDLER.isdisjoint({*able.supports} - {"logprobs"}), "the handler does so"
