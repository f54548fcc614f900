"""The registry of engines, with the information that is needed before an engine is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class EngineEntry(NamedTuple):
    """The registry entry of an engine.

    Attributes:
        needs: module that can be imported if the engine is installed, or None if no installation is needed.
        package: the pip package that installs the engine.
        isolated: whether the engine runs in a separate process. An engine whose steps take almost no time runs on a
            thread.
        pools: whether the engine also computes embeddings, scores and classifications.
        transcribes: whether the engine transcribes audio.
        remote: whether the models run on the servers at option.base_url.
        spreads: whether the engine can distribute a model over several devices, as GPU engines can.
        has_server_adapters: whether LoRA adapters are files of llama.cpp's or SGLang's server, which only that server
            can check.
        caches_prefixes: whether the engine reuses the KV cache of common prompt prefixes by default.
        kinds: maps each value of option.base_url_kind to the module in `engines/` that defines the kind in `KINDS`.
    """

    needs: str | None
    package: str
    isolated: bool = True
    pools: bool = False
    transcribes: bool = False
    remote: bool = False
    spreads: bool = False
    caches_prefixes: bool = False
    has_server_adapters: bool = False
    kinds: Mapping[str, str] = MappingProxyType({})


_URL_KINDS = {
    "vllm": "openai.completions",
    "dynamo": "openai.completions",
    "lmi": "openai.completions",
    "sglang": "openai.sglang.kind",
    "llamacpp": "llamacpp.kind",
}
_GRPC_KINDS = {"vllm": "grpc.vllm", "sglang": "grpc.sglang", "trtllm": "grpc.trtllm"}

ENGINES = {
    "openvino": EngineEntry("openvino_genai", "lmi-handler[cpu]", pools=True, transcribes=True),
    "trtllm": EngineEntry("tensorrt_llm", "tensorrt-llm", spreads=True, caches_prefixes=True),
    "vllm": EngineEntry("vllm", "vllm", pools=True, transcribes=True, spreads=True, caches_prefixes=True),
    "openai": EngineEntry(
        "aiohttp", "lmi-handler[openai]", pools=True, remote=True, has_server_adapters=True, kinds=_URL_KINDS
    ),
    "grpc": EngineEntry("smg_grpc_proto", "lmi-handler[grpc]", pools=True, remote=True, kinds=_GRPC_KINDS),
    "llamacpp": EngineEntry(
        "aiohttp", "lmi-handler[openai]", pools=True, caches_prefixes=True, has_server_adapters=True
    ),
    "echo": EngineEntry(None, "", isolated=False, pools=True, transcribes=True),
}
"""Maps the name of each engine, which is also its folder in `engines/`, to its registry entry."""

LLM_ENGINES = ("auto", *ENGINES)
"""The values of option.llm_engine."""
