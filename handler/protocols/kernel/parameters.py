"""LMI's generation parameters, one a line: type, range, neutral value, and the Sampling field that it sets.

Source: docs.djl.ai, "LMI handlers Inference API Schema" (0.28). Null means absent. A value that the engine does not
support is refused by name, unless it is neutral. Without `do_sample`, sampling values are checked and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.framing import FRAMINGS
from handler.core.values import Sampling
from handler.protocols.kernel.base import ServerContext
from handler.protocols.kernel.readers.adapters import named_adapter
from handler.protocols.kernel.readers.structured_output import (
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
    tgi_grammar,
)
from handler.protocols.kernel.readers.values import (
    INT32,
    INT64,
    STRING_OR_STRINGS,
    accepts,
    boolean,
    integer,
    logit_bias,
    number,
    strings,
    token_ids,
)
from handler.protocols.kernel.validation import DEFAULTS, Named, check_agreement, check_support

MAX_TOP_TOKENS = 20  # alternatives to a token: OpenAI's limit, and vLLM's default; TGI's is 5

SEVERAL = "*"
"""Stands in the place of a field where `read` returns a mapping of fields."""


class Parameter(NamedTuple):
    """One parameter. `read` turns a JSON value into the field's value, or raises ValueError with what would be right.

    Where `read` returns None, or the field is "", the value is right and changes nothing. With `informed`, `read` takes
    the context too. A field that is not in Sampling goes to `ParsedParameters.others`.
    """

    field: str
    read: Callable[..., Any]
    informed: bool = False


def unsupported(why: str, *neutral: Any) -> Parameter:
    """Make a parameter of which only neutral values are accepted; a boolean is no number."""

    @accepts(**({"const": neutral[0]} if len(neutral) == 1 else {"enum": [*neutral]} if neutral else {"type": "null"}))
    def read(value: Any) -> None:
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral):
            raise ValueError(f"is not supported: {why}")

    return Parameter("", read)


class ParsedParameters(NamedTuple):
    """The fields that a client's parameters set.

    Attributes:
        names: field -> the client's name for it, for the fields that it set.
        others: fields that are not in Sampling.
    """

    sampling: Sampling
    names: Mapping[str, str]
    others: Mapping[str, Any]


class Table(NamedTuple):
    """A dialect's parameters; `prefix` is the path to them in a body."""

    parameters: Mapping[str, Parameter]
    prefix: str = ""


@accepts(type="integer", minimum=-1, maximum=INT32)
def top_k(value: Any) -> int:
    return max(integer(-1)(value), 0)  # -1 (vLLM, LmiDist) and 0 (LMI) both mean: all


@accepts(anyOf=[*STRING_OR_STRINGS, {"const": False}])
def stop(value: Any) -> tuple[str, ...]:
    return () if value is False else strings(value)  # LMI's document calls TensorRT-LLM's `stop` a boolean


@accepts(type="integer", minimum=0, maximum=1)
def _flag_of_count(value: Any) -> bool:
    count = integer(0, 1)  # the log-probability of each prompt token itself, no alternatives
    return bool(count(value))


@accepts(type="integer", minimum=0, maximum=MAX_TOP_TOKENS)
def _alternatives(value: Any) -> int:
    count = integer(0, MAX_TOP_TOKENS)(value)
    return count if count > 1 else 0  # one is the chosen token's own, which every token has


@accepts(type="integer", minimum=0, maximum=MAX_TOP_TOKENS)
def _top_tokens(value: Any, context: ServerContext) -> int:
    """Read TGI's count. One alternative is the most likely token, not the chosen one."""
    count = integer(0, MAX_TOP_TOKENS)(value)
    if count and (why := context.unsupported.get("top_logprobs")):
        raise ValueError(f"the engine {context.engine} lacks it: {why}")
    return count


PARAMETERS: dict[str, Parameter] = {
    # common to all of LMI's backends
    "do_sample": Parameter("do_sample", boolean),
    "seed": Parameter("seed", integer(0, (1 << 64) - 1)),
    "temperature": Parameter("temperature", number(0)),
    "repetition_penalty": Parameter("repetition_penalty", number(0, above=True)),
    "top_k": Parameter("top_k", top_k),
    "top_p": Parameter("top_p", number(0, 1)),
    "max_new_tokens": Parameter("max_new_tokens", integer(1)),
    "stop_sequences": Parameter("stop", strings),
    # LmiDist and vLLM
    "typical_p": Parameter("typical_p", number(0, 1, above=True)),
    "min_p": Parameter("min_p", number(0, 1, below=True)),
    "presence_penalty": Parameter("presence_penalty", number(-2, 2)),
    "frequency_penalty": Parameter("frequency_penalty", number(-2, 2)),
    "n": Parameter("n", integer(1)),
    "best_of": Parameter("best_of", integer(1)),
    "num_beams": Parameter("num_beams", integer(1)),
    "length_penalty": Parameter("length_penalty", number(-20, 20)),
    "early_stopping": Parameter("early_stopping", boolean),
    "ignore_eos_token": Parameter("ignore_eos", boolean),
    "stop_token_ids": Parameter("stop_token_ids", token_ids),
    "include_stop_str_in_output": Parameter("include_stop", boolean),
    "logprobs": Parameter("top_logprobs", _alternatives),
    "prompt_logprobs": Parameter("prompt_logprobs", _flag_of_count),
    "decoder_input_details": Parameter("prompt_logprobs", boolean),
    "skip_special_tokens": Parameter("skip_special_tokens", boolean),
    "spaces_between_special_tokens": Parameter("", boolean),  # tokens are joined as bytes; nothing is put between
    "logit_bias": Parameter("logit_bias", logit_bias),
    "guided_json": Parameter("structured_output", json_schema),
    "guided_json_object": Parameter("structured_output", json_object),
    "guided_regex": Parameter("structured_output", regex),
    "guided_choice": Parameter("structured_output", choice),
    "guided_grammar": Parameter("structured_output", grammar),
    # TensorRT-LLM
    "min_length": Parameter("min_new_tokens", integer(0)),
    "bad_sequences": Parameter("bad_sequences", strings),
    "stop": Parameter("stop", stop),
    # TGI's, which its clients send to LMI too
    "top_n_tokens": Parameter("top_logprobs", _top_tokens, informed=True),
    "watermark": unsupported("no engine here marks its text", False),
    "grammar": Parameter("structured_output", tgi_grammar),
    "adapter_id": Parameter("adapter", named_adapter, informed=True),
    # vLLM's, for its chats and completions
    "priority": Parameter("priority", integer(-INT64 - 1, INT64)),
}

LMI = Table(PARAMETERS, "parameters.")

REQUEST_FIELDS: dict[str, Callable[[Any], Any]] = {
    "details": boolean,
    "return_full_text": boolean,
    "truncate": integer(1),
    "stream": boolean,
    "output_formatter": accepts(enum=[*FRAMINGS])(lambda value: value),
}
"""Names under `parameters` that concern the request, not the sampling; the dialect reads them."""


def read_all(
    given: Mapping[str, Any], context: ServerContext, *, defaults: Mapping[str, Any], table: Table
) -> ParsedParameters:
    """Read all parameters in `given` that the table lists.

    Args:
        given: the client's parameters; other readers take the names that the table lacks.
        context: the engine's name and limits.
        defaults: Sampling fields whose default differs in this dialect.
        table: the dialect's parameters.

    Raises:
        InvalidParameter: naming the parameter, its value and what would be right.
    """
    values: dict[str, Any] = dict(defaults)
    names: dict[str, Named] = {}
    for key, value in given.items():
        parameter = table.parameters.get(key)
        if parameter is None or value is None:
            continue
        named = Named(f"{table.prefix}{key}", value)
        try:
            result = parameter.read(value, context) if parameter.informed else parameter.read(value)
        except ValueError as error:
            raise named.refused(str(error)) from None
        for field, item in (result if parameter.field == SEVERAL else {parameter.field: result}).items():
            if not field or item is None:
                continue
            if field in names and values[field] != item:
                raise InvalidParameter(f"{named} contradicts {names[field].name}")
            values[field], names[field] = item, named
    others = {field: values.pop(field) for field in [*values] if field not in DEFAULTS}
    sampling = Sampling(**values)
    check_agreement(sampling, names, context)
    check_support(sampling, names, context)
    return ParsedParameters(sampling, {field: named.name for field, named in names.items()}, others)
