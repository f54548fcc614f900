"""The registry of engines, with the facts that are needed before an engine is loaded."""

from __future__ import annotations

from typing import NamedTuple


class EngineEntry(NamedTuple):
    """An engine's entry in the registry.

    Attributes:
        needs: the module that can be imported if the engine is installed, or None if nothing needs to be installed.
        package: the pip package that installs the engine.
        isolated: whether the engine runs in a separate process. An engine whose steps take no time runs in a thread.
        pools: whether the engine also computes embeddings, scores and classifications.
        transcribes: whether the engine transcribes audio.
        remote: whether the models run on the servers of option.base_url.
        spreads: whether the engine can spread a model over several devices. GPU engines can, and CPU engines cannot.
        caches_prefixes: whether the engine reuses the KV cache of common prompt prefixes by default.
    """

    needs: str | None
    package: str
    isolated: bool = True
    pools: bool = False
    transcribes: bool = False
    remote: bool = False
    spreads: bool = False
    caches_prefixes: bool = False


ENGINES = {
    "openvino": EngineEntry("openvino_genai", "lmi-handler[cpu]", pools=True, transcribes=True),
    "trtllm": EngineEntry("tensorrt_llm", "tensorrt-llm", spreads=True, caches_prefixes=True),
    "vllm": EngineEntry("vllm", "vllm", pools=True, transcribes=True, spreads=True, caches_prefixes=True),
    "openai": EngineEntry("aiohttp", "lmi-handler[openai]", remote=True),
    "grpc": EngineEntry("smg_grpc_proto", "lmi-handler[grpc]", pools=True, remote=True),
    "echo": EngineEntry(None, "", isolated=False, pools=True, transcribes=True),
}
"""Maps each engine's name to its entry. A folder in `engines/` has the same name."""

LLM_ENGINES = ("auto", *ENGINES)
"""The values of option.llm_engine."""
