"""The parameter tables of docs/wire/: every cell of every engine is what its capabilities make of a request."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

import pytest

from handler import engines
from handler.config.loader import read_config
from handler.core.errors import ServingError
from handler.core.text import Vocabulary
from handler.core.values import Adapter
from handler.engines.base import EngineConfig
from handler.protocols.kernel.base import Schema, ServerContext
from handler.protocols.registry import ROOTS, SCHEMAS
from tests import parameter_matrix as matrix
from tests.doubles import using

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
DIALECTS: dict[str, tuple[Schema, matrix.Values]] = {
    matrix.PARAMETERS: (SCHEMAS["lmi"], matrix.VALUES),
    matrix.TENSORS: (SCHEMAS["lmi"], matrix.TENSOR_VALUES),
    matrix.CHAT: (SCHEMAS["lmi"], matrix.CHAT_VALUES),
    matrix.TGI: (ROOTS["tgi"], matrix.TGI_VALUES),
    matrix.MINDIE: (ROOTS["mindie"], matrix.MINDIE_VALUES),
}


class Registered:
    """Every name and number is an adapter's."""

    def find(self, name: str) -> Adapter:
        return Adapter(name, 1, "/nowhere")

    def by_number(self, number: int) -> Adapter:
        return Adapter("mine", number, "/nowhere")


def context(engine: str, options: Mapping[str, str]) -> ServerContext:
    """Without the engine itself, which need not be installed."""
    given = [f"option.llm_engine={engine}", *(f"{key}={value}" for key, value in options.items())]
    config = read_config(overrides=given, environ={}).checked()
    module: Any = importlib.import_module(engines.ENGINES[engine].module)
    able = module.capabilities(EngineConfig(model=None, options=config.engine_options))
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


@pytest.mark.parametrize("heading", DIALECTS)
@pytest.mark.parametrize("setting", SETTINGS)
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
            reported = wanted == "ignored" and heading != matrix.CHAT  # a chat's are harmless
            if found != ("refused" if wanted == "refused" else "ignored" if reported else "accepted"):
                wrong[name] = (wanted, found)
    assert wrong == {}
