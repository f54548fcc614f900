"""OpenAI's request fields, one a line, with those that vLLM's and TGI's clients send to the same routes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from handler.core.errors import InvalidParameter, ModelNotFound
from handler.core.values import Adapter, StructuredOutput
from handler.protocols.assistant import template
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import MAX_TOP_TOKENS, PARAMETERS, Parameter, Table, named, unsupported
from handler.protocols.kernel.readers.adapters import merge_adapters
from handler.protocols.kernel.readers.structured_output import (
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
    response_format,
    tgi_grammar,
)
from handler.protocols.kernel.readers.values import MAX_NAME, boolean, integer, number, string
from handler.protocols.kernel.schema.readers import accepts
from handler.protocols.kernel.schema.shapes import TEXT, Shape, nullable
from handler.protocols.kernel.texts import most_tokens


@accepts(type="integer", minimum=0, maximum=MAX_TOP_TOKENS)
def top_logprobs(value: Any, context: ServerContext) -> int:
    """Read the count. Without alternatives in the engine, 1 asks for the chosen token only, as in LMI."""
    count = integer(0, MAX_TOP_TOKENS)(value)
    return 0 if count == 1 and "top_logprobs" in context.unsupported else count


@accepts(type="object", required=["type"], properties={"type": {"type": "string"}})
def _format(value: Any) -> StructuredOutput | None:
    """Read OpenAI's `response_format`, or TGI's with `value`, which huggingface_hub's client sends."""
    return tgi_grammar(value) if isinstance(value, dict) and "value" in value else response_format(value)


_STRUCTURED_OUTPUT_READERS = {
    "json": json_schema,
    "regex": regex,
    "choice": choice,
    "grammar": grammar,
    "json_object": json_object,
}


@accepts(type="object", properties={name: {} for name in _STRUCTURED_OUTPUT_READERS})
def structured_outputs(value: Any) -> StructuredOutput | None:
    """Read vLLM's `structured_outputs`, an object with exactly one name."""
    wanted = f"must be an object with one of {', '.join(_STRUCTURED_OUTPUT_READERS)}"
    given = {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or not given.keys() <= _STRUCTURED_OUTPUT_READERS.keys():
        raise ValueError(wanted)
    ((name, item),) = given.items()
    return _STRUCTURED_OUTPUT_READERS[name](item)


@accepts(type="integer", minimum=-(1 << 63), maximum=(1 << 64) - 1)
def _seed(value: Any) -> int:
    """Read a signed seed, as OpenAI and vLLM have it."""
    return integer(-(1 << 63), (1 << 64) - 1)(value) % (1 << 64)


@accepts(type="integer", minimum=-1)
def _budget(value: Any) -> int | None:
    """Read vLLM's `thinking_token_budget` (vllm/sampling_params.py); -1 is no limit."""
    budget = integer(-1)(value)
    return budget if budget >= 0 else None


_OF_VLLM: Mapping[str, Parameter] = {
    "truncate_prompt_tokens": Parameter("truncate", most_tokens),
    "structured_outputs": Parameter("structured_output", structured_outputs),
    "use_beam_search": unsupported("there is no beam search on this route", False),
    "prompt_logprobs": unsupported("ask for echo with logprobs on /v1/completions", [], {}),
    "allowed_token_ids": unsupported("the engines have no such thing", [], {}),
    "return_tokens_as_token_ids": unsupported("tokens are shown as text", False),
    "return_token_ids": unsupported("tokens are shown as text", False),
    "logits_processors": unsupported("requests bring no code", [], {}),
}

FOREIGN: Mapping[str, Parameter] = {
    "parameters": unsupported("write its names at the top level", {}),
    "max_new_tokens": unsupported("write max_tokens"),
    "max_output_tokens": unsupported("write max_tokens"),
    "min_new_tokens": unsupported("write min_tokens", 0),
    "min_length": unsupported("write min_tokens", 0),
    "stop_sequences": unsupported("write stop", [], ""),
    "ignore_eos_token": unsupported("write ignore_eos", False),
    "do_sample": unsupported("write temperature=0", True),
    "bad_sequences": unsupported("write bad_words", [], ""),
    "num_return_sequences": unsupported("write n", 1),
    "random_seed": unsupported("write seed"),
    "truncate": unsupported("write truncate_prompt_tokens"),
    "top_n_tokens": unsupported("write logprobs", 0),
    "grammar": unsupported("write response_format"),
    "adapter_id": unsupported("write the adapter's name as model", ""),
    "adapters": unsupported("write the adapter's name as model", "", []),
}
"""Names of LMI, of TGI and of OpenAI's Responses API whose meaning is plain: to ignore them would change the answer."""

_BOTH = {
    **named("openai"),
    "seed": Parameter("seed", _seed),
    "temperature": Parameter("temperature", number(0, 2)),
    "logprobs": Parameter("", boolean),
    "top_logprobs": Parameter("top_logprobs", top_logprobs, informed=True),
    "response_format": Parameter("structured_output", _format),
    **_OF_VLLM,
    **FOREIGN,
}

CHAT = Table(
    {
        **_BOTH,
        "max_completion_tokens": PARAMETERS["max_new_tokens"],
        "functions": unsupported("it has become `tools`", [], {}),
        "function_call": unsupported("it has become `tool_choice`", [], {}),
        "modalities": unsupported("answers are text", ["text"]),
        "audio": unsupported("answers are text", [], {}),
        "web_search_options": unsupported("the model searches nothing", [], {}),
        "echo": unsupported("an answer does not repeat messages", False),
        "add_special_tokens": unsupported("the chat template has them all", False),
        "chat_template": unsupported("write option.chat_template", [], {}),
        **{name: Parameter(name, read) for name, read in template.READERS.items()},
        "include_reasoning": Parameter("include_reasoning", boolean),
        "thinking_token_budget": Parameter("thinking_token_budget", _budget),
    }
)

COMPLETIONS = Table(
    {
        **{name: parameter for name, parameter in _BOTH.items() if name != "top_logprobs"},
        "max_tokens": Parameter("max_new_tokens", integer(0)),
        "logprobs": Parameter("top_logprobs", top_logprobs, informed=True),
        "best_of": PARAMETERS["best_of"],
        "echo": Parameter("echo", boolean),
        "return_token_ids": Parameter("return_token_ids", boolean),
        "suffix": unsupported("the engines only continue a prompt", ""),
        "prompt_embeds": unsupported("a prompt is text or token ids", []),
        "add_special_tokens": unsupported("send token ids for a prompt without them", True),
    }
)

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "reasoning_effort", "verbosity", "request_id", "guided_decoding_backend",
        "tool_prompt", "cache_salt",
    }
)  # fmt: skip
"""Names that clients of OpenAI, vLLM or TGI send and that change no answer: listed in a header, never refused."""

_UNNAMED = ("tgi", "dummy")  # names that clients of TGI send by default
_ADDRESS = re.compile("https?://[^/]", re.IGNORECASE)
"""@huggingface/inference sends the server's address when it was given no model."""


MODEL: Mapping[str, Shape] = {
    "model": {**nullable(TEXT), "description": "The model's or an adapter's name; empty or an http address: the model"}
}
"""What `read_model` reads."""


def read_model(
    body: Mapping[str, Any], context: ServerContext, own: str = "", adapter: Adapter | None = None
) -> tuple[str, Adapter | None]:
    """Read `model`: the name in the answer, and the adapter of that name. An http address is the model itself.

    Args:
        own: the model's name in answers to bodies that name none; "" for `context.own_name`.
        adapter: the one that the request names elsewhere, which replaces `model`; None for that of the headers.

    Raises:
        ModelNotFound: neither the model nor an adapter has that name.
        InvalidPayload: `model` names another adapter than the request does elsewhere.
    """
    own = own or context.own_name
    names = (own, *context.model_names)
    name = _read_name(body)
    if adapter := adapter or context.adapter:
        return adapter.name, merge_adapters(adapter, _find(name, context), "model")
    if not name:
        return own, None
    if name in _UNNAMED or name in names:
        return name, None
    if _ADDRESS.match(name):
        return own, None
    adapter = _find(name, context)
    if adapter is None and "*" not in names:
        raise ModelNotFound(name, served=(*names, *context.adapters.names()))
    return name, adapter


def _read_name(body: Mapping[str, Any]) -> str:
    """Read the text of `model`; "" where it is absent."""
    given = body.get("model")
    if given is None or given == "":
        return ""
    try:
        name = string(given)
    except ValueError as error:
        raise InvalidParameter(f"model: {error}") from None
    if len(name) > MAX_NAME:  # each chunk repeats it
        raise InvalidParameter(f"model: has {len(name)} characters; at most {MAX_NAME}")
    return name


def _find(name: str, context: ServerContext) -> Adapter | None:
    return None if context.no_adapters else context.adapters.find(name)


def harmless(body: Mapping[str, Any], read: Collection[str] = ()) -> list[str]:
    """List the names in HARMLESS that the body has a value for, but those that are read."""
    return [name for name, value in body.items() if name in HARMLESS and name not in read and value is not None]
