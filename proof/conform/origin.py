"""Finds out of which server the clients of a target expect the responses, and which profiles its rules are in.

A server that replaces another must keep the contract of the old one. Its own responses show which contract that is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from proof.conform.exchange import Response
from proof.conform.server import PROMPT, Server


class Origin(NamedTuple):
    """A contract that the clients of a server may rely on.

    Attributes:
        profile: the profile with the rules of the contract.
        because: the response that shows it.
    """

    profile: str
    because: str


_PROBE = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2, "details": True}}


async def origins(server: Server) -> list[Origin]:
    """Return the contracts that a server seems to implement on purpose, each once."""
    by_profile = {origin.profile: origin async for origin in _evidence(server)}
    return list(by_profile.values())


async def _evidence(server: Server) -> AsyncIterator[Origin]:
    response = await server.post("/invocations", _PROBE)
    if profile := _of_details(response.value):
        yield Origin(profile, "the format of POST /invocations")
        return
    if not response.ok and (await server.post("/v1/chat/completions", _chat(await server.model()))).ok:
        yield Origin("openai", "/v1/chat/completions works, and /invocations reads no `inputs`")
    info = (await server.get("/info")).object
    if {"docker_label", "router"} & info.keys():
        yield Origin("tgi", "GET /info describes TGI")
    if (await server.get("/v2")).object.get("name") == "triton":
        yield Origin("triton", "GET /v2 describes Triton")
    if _owner(await server.get("/v1/models")) in ("vllm", "sglang", "llamacpp", "openai"):
        yield Origin("openai", "GET /v1/models names the owner of a server with OpenAI's API")


def _of_details(value: Any) -> str:
    """Return the profile of the format of a response to `inputs` with details, or ""."""
    match value:
        case [{"generated_text": str()}]:
            return "tgi"
        case {"generated_text": str(), "details": {"tokens": [{"log_prob": _}, *_]}}:
            return "lmi-0.28"
        case {"generated_text": str(), "details": {"tokens": [{"logprob": _}, *_]}}:
            return "lmi-0.38"
    return ""


def _chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}


def _owner(response: Response) -> str:
    match response.value:
        case {"data": [{"owned_by": str(owner)}, *_]}:
            return owner
    return ""
