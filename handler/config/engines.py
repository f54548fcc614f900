"""The registry of engines: facts that the options, the command line, `engines/` and `deploy/` need before one is
loaded.
"""

from __future__ import annotations

from typing import NamedTuple


class EngineEntry(NamedTuple):
    """One line of the registry.

    Attributes:
        needs: the import that shows whether the engine is installed.
        package: that brings it, as pip names it.
        isolated: runs in a process of its own; a thread is enough where a step costs nothing.
        pools: computes embeddings, scores and classifications too.
        transcribes: writes what an audio clip says.
        caches_prefixes: reuses the KV cache of equal prompt beginnings by default.
        remote: its models run at the servers of option.base_url.
        spreads: can spread a model over several devices, as every GPU engine can and no CPU engine.
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
"""Engines by name, which is also the folder's in `engines/`."""

LLM_ENGINES = ("auto", *ENGINES)
"""Values of option.llm_engine."""
