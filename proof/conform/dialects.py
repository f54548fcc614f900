"""Requests for generated text in the API of each profile, and the location of the text in responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class GenerationApi:
    """The requests with which an API generates text.

    Attributes:
        name: the name of the API in messages.
        path, stream_path: the routes, which may contain `{model}`.
        body: a function that takes a prompt, a number of tokens, and whether to stream, and returns the body of a
            greedy request.
        prompt: the name of the field with the prompt.
        tokens: the path of keys to the token limit.
        temperature: the path of keys to the temperature.
        content_type: the content type of a stream.
        endless: fields that prevent an end token from ending a stream early.
        refuses_in_stream: whether a stream with a bad parameter gets status 200 and an error event, as in TGI.
    """

    name: str
    path: str
    stream_path: str
    body: Callable[[str, int, bool], Body]
    prompt: str
    tokens: tuple[str, ...]
    temperature: tuple[str, ...]
    content_type: str
    endless: Mapping[str, Any]
    refuses_in_stream: bool = False


def change(body: Body, keys: tuple[str, ...], value: Any) -> Body:
    """Return a copy of the body with `value` at the path `keys`."""
    first, *inner_keys = keys
    return {**body, first: change(body.get(first, {}), tuple(inner_keys), value) if inner_keys else value}


def merge(body: Body, more: Mapping[str, Any]) -> Body:
    """Return a copy of the body with the fields of `more` added. Nested objects are merged."""
    joined = dict(body)
    for name, value in more.items():
        inner = joined.get(name)
        joined[name] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return joined


def _lmi(prompt: str, tokens: int, stream: bool) -> Body:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "do_sample": False}}
    return {**body, "stream": True} if stream else body


def _tgi(prompt: str, tokens: int, stream: bool) -> Body:
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}


def _chat(prompt: str, tokens: int, stream: bool) -> Body:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "{model}", "messages": messages, "max_tokens": tokens, "temperature": 0}
    return {**body, "stream": True} if stream else body


def _completion(prompt: str, tokens: int, stream: bool) -> Body:
    body = {"model": "{model}", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return {**body, "stream": True} if stream else body


def _triton(prompt: str, tokens: int, stream: bool) -> Body:
    body = {"text_input": prompt, "max_tokens": tokens, "temperature": 0.0}
    return {**body, "stream": True} if stream else body


_EVENTS = "text/event-stream"
_LINES = "application/jsonlines"
_CALLS = "/invocations"
_MAX_NEW, _LMI_TEMPERATURE = ("parameters", "max_new_tokens"), ("parameters", "temperature")
_ENDLESS: Mapping[str, Any] = {"parameters": {"ignore_eos_token": True}}
_IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True}
_MAX, _TEMPERATURE = ("max_tokens",), ("temperature",)

LMI = GenerationApi("LMI", _CALLS, _CALLS, _lmi, "inputs", _MAX_NEW, _LMI_TEMPERATURE, _LINES, _ENDLESS)
TGI = GenerationApi(
    "TGI", "/generate", "/generate_stream", _tgi, "inputs", _MAX_NEW, _LMI_TEMPERATURE, _EVENTS, {}, True
)
CHAT = GenerationApi(
    "OpenAI's chat", "/v1/chat/completions", "/v1/chat/completions", _chat, "messages", _MAX, _TEMPERATURE, _EVENTS,
    _IGNORE_EOS,
)  # fmt: skip
MESSAGES = GenerationApi(
    "Anthropic's messages", "/v1/messages", "/v1/messages", _chat, "messages", _MAX, _TEMPERATURE, _EVENTS, {}
)
TRITON = GenerationApi(
    "Triton's generate", "/v2/models/{model}/generate", "/v2/models/{model}/generate_stream", _triton, "text_input",
    _MAX, _TEMPERATURE, _EVENTS, {},
)  # fmt: skip
AT_INVOCATIONS = (
    replace(LMI, content_type=""),  # JSON lines as in LMI, or events where the server is compatible with TGI
    GenerationApi("a chat", _CALLS, _CALLS, _chat, "messages", _MAX, _TEMPERATURE, "", _IGNORE_EOS),
    GenerationApi("a completion", _CALLS, _CALLS, _completion, "prompt", _MAX, _TEMPERATURE, "", _IGNORE_EOS),
)
"""Dialects that `/invocations` may accept. The first dialect that the server accepts is used."""

OF_PROFILE = {"lmi-0.28": LMI, "lmi-0.38": LMI, "tgi": TGI, "openai": CHAT, "anthropic": MESSAGES, "triton": TRITON}
GENERATING = ("sagemaker", *OF_PROFILE)
"""The profiles of servers that generate text."""

PROFILES = (*GENERATING, "decisions", "websockets")


def text_of(value: Any) -> str | None:
    """Return the text of a complete response in any dialect, or None if it contains no text."""
    if isinstance(value, list) and value:
        value = value[0]
    match value:
        case {"generated_text": str(text)} | {"text_output": str(text)} | {"choices": [{"text": str(text)}, *_]}:
            return text
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
        case {"choices": [{"message": {"content": None}}, *_]}:
            return ""
        case {"content": list(blocks)}:
            return "".join(block.get("text", "") for block in blocks if isinstance(block, dict))
    return None


def piece_of(event: Any) -> str:
    """Return the text of one event of a stream in any dialect, or "" if it contains no text."""
    match event:
        case {"token": {"special": True}} | {"token": {"special_token": True}}:
            return ""
        case {"token": {"text": str(text)}} | {"text_output": str(text)} | {"delta": {"text": str(text)}}:
            return text
        case {"choices": [{"delta": {"content": str(text)}}, *_]} | {"choices": [{"text": str(text)}, *_]}:
            return text
    return ""
