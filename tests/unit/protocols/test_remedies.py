"""A refusal names only a parameter that the same engine takes."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from handler.config.config import Config
from handler.engines.base import Capabilities, EngineConfig
from handler.engines.echo.engine import capabilities as echo
from handler.engines.grpc.client import CONTRACTS
from handler.engines.llamacpp.engine import capabilities as llamacpp
from handler.engines.openai.engine import capabilities as by_url
from handler.engines.openai.kinds import KINDS
from handler.engines.openvino.engine import capabilities as openvino
from handler.engines.vllm.engine import capabilities as vllm
from handler.protocols.openai.request import CHAT, COMPLETIONS
from handler.protocols.openai.unsupported import FOREIGN, OF_CHATS, OF_COMPLETIONS, OF_VLLM

FIELDS = {name: entry.field for name, entry in {**CHAT.parameters, **COMPLETIONS.parameters}.items() if entry.field}
OTHER_NAMES = {"bad_sequences", "random_seed"}
"""Names of another API for the parameter that the error names. The engine may refuse that too, with its reason."""

READ = {"top_logprobs"}
"""A count of 0 or 1 is served by every engine."""


def at(kind: str) -> Capabilities:
    return by_url(EngineConfig(Config(engine_options={"base_url": ("http://x/v1",), "base_url_kind": kind})))


ENGINES: Mapping[str, Capabilities] = {
    "echo": echo(EngineConfig()),
    "openvino": openvino(EngineConfig()),
    "vllm": vllm(EngineConfig()),
    "llamacpp": llamacpp(EngineConfig()),
    **{f"{kind} by URL": at(kind) for kind in KINDS},
    **{f"{kind} by gRPC": contract.capabilities for kind, contract in CONTRACTS.items()},
}


def remedies(text: str) -> set[str]:
    """The fields of the parameters that a refusal tells to use."""
    _, _, told = text.partition("use ")
    return {FIELDS[name] for name in re.findall(r"\w+", told) if name in FIELDS} - READ


@pytest.mark.parametrize("engine", ENGINES)
def test_a_remedy_is_taken_by_the_engine(engine: str) -> None:
    refused = ENGINES[engine].unsupported
    texts = dict(refused)
    for name, parameter in {**OF_VLLM, **OF_CHATS, **OF_COMPLETIONS, **FOREIGN}.items():
        with pytest.raises(ValueError, match="is not supported") as caught:
            parameter.read({"a": object()})
        if name not in OTHER_NAMES:
            texts[name] = str(caught.value)
    told = {name: found for name, text in texts.items() if (found := remedies(text) & refused.keys())}
    assert not told
    assert sum(bool(remedies(text)) for text in texts.values()) > 10
