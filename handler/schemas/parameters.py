"""The generation parameters of seed 004, one line each: type, range, neutral value, and the Sampling field it sets.

Null means absent. A value that would have an effect which the engine lacks is refused by name; a neutral one is not.
With `do_sample` false, said or by default, sampling values are range-checked and have no effect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from handler.core import Sampling
from handler.errors import InvalidParameter
from handler.schemas.base import Context

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2048

_LEAST_NORMAL, _MOST = 1.1754943508222875e-38, 3.4028234663852886e38  # of 32-bit floats

SAMPLED = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "seed"})
"""Sampling fields that have no effect on a greedy choice."""

_NOT_WITH_BEAMS = (
    "prompt_logprobs", "min_new_tokens", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sampling fields that the engines' beam searches do not honour."""

_DEFAULTS = {field.name: field.default for field in fields(Sampling)}


class Parameter(NamedTuple):
    """`read` turns the JSON value into the field's, raising ValueError with what would have been right."""

    field: str
    read: Callable[[Any], Any]


class Table(NamedTuple):
    """A dialect's parameters, and where its bodies have them."""

    parameters: Mapping[str, Parameter]
    prefix: str = ""


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def integer(least: int, most: int = (1 << 31) - 1) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}")
        return value

    return read


def number(least: float, most: float = math.inf, *, above: bool = False, below: bool = False) -> Callable[[Any], float]:
    """A finite number in [least, most], without `least` itself when `above`, without `most` itself when `below`.

    Engines compute in 32 bits: what is nothing there, 1e-50 say, is 0 here too.
    """
    wanted = f"must be a number {'above' if above else 'of at least'} {least:g}"
    if most < math.inf:
        wanted += f" and {'below' if below else 'at most'} {most:g}"

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(wanted)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        found = 0.0 if abs(found) < _LEAST_NORMAL else found
        if not math.isfinite(found) or abs(found) > _MOST or found < least or found > most:
            raise ValueError(wanted)
        if (above and found == least) or (below and found == most):
            raise ValueError(wanted)
        return found

    return read


def top_k(value: Any) -> int:
    return max(integer(-1)(value), 0)  # -1 (vLLM, LmiDist) and 0 (LMI) both mean: all


def strings(value: Any) -> tuple[str, ...]:
    """A list of strings; one string stands for a list of one."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    for item in found:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"must hold non-empty strings of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(found)


def stop(value: Any) -> tuple[str, ...]:
    return () if value is False else strings(value)  # the seed's table calls TensorRT-LLM's `stop` a boolean


def token_ids(value: Any) -> tuple[int, ...]:
    read = integer(0)
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise ValueError(f"must be a list of at most {MAX_STOPS} token ids")
    try:
        return tuple(read(item) for item in value)
    except ValueError:
        raise ValueError("must hold token ids, which are integers of at least 0") from None


def _flag_of_count(value: Any) -> bool:
    count = integer(0, 1)  # the log-probability of each prompt token itself, no alternatives
    return bool(count(value))


def nothing(neutral: Any, why: str) -> Callable[[Any], None]:
    """A parameter of which we support the neutral value only."""

    def read(value: Any) -> None:
        if type(value) is not type(neutral) or value != neutral:
            raise ValueError(f"is not supported: {why}")

    return read


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
    "length_penalty": Parameter("length_penalty", number(-math.inf)),
    "early_stopping": Parameter("early_stopping", boolean),
    "ignore_eos_token": Parameter("ignore_eos", boolean),
    "stop_token_ids": Parameter("stop_token_ids", token_ids),
    "include_stop_str_in_output": Parameter("include_stop", boolean),
    "logprobs": Parameter("top_logprobs", integer(0)),
    "prompt_logprobs": Parameter("prompt_logprobs", _flag_of_count),
    "decoder_input_details": Parameter("prompt_logprobs", boolean),
    "skip_special_tokens": Parameter("skip_special_tokens", boolean),
    "spaces_between_special_tokens": Parameter("", boolean),  # tokens are joined as bytes; nothing is put between
    # TensorRT-LLM
    "min_length": Parameter("min_new_tokens", integer(0)),
    "bad_sequences": Parameter("bad_sequences", strings),
    "stop": Parameter("stop", stop),
    # TGI's, which its clients send to LMI too
    "top_n_tokens": Parameter("", nothing(0, "no engine here reports alternatives to its tokens")),
    "watermark": Parameter("", nothing(False, "no engine here marks its text")),
    "grammar": Parameter("", nothing(None, "structured output is not part of this version")),
    "adapter_id": Parameter("", nothing(None, "the engine has no LoRA adapters")),
}

LMI = Table(PARAMETERS, "parameters.")

REQUEST_FIELDS: dict[str, Callable[[Any], Any]] = {
    "details": boolean,
    "return_full_text": boolean,
    "truncate": integer(1),
    "stream": boolean,
    "output_formatter": lambda value: value,
}
"""Names under `parameters` that say something of the request, not of the sampling; the schema reads them."""


def read_parameters(
    given: Mapping[str, Any], context: Context, *, defaults: Mapping[str, Any], table: Table = LMI
) -> Sampling:
    """The sampling that `given` asks for.

    Args:
        given: the client's parameters; names that are not in the table are left to others.
        context: says which engine, and what it lacks.
        defaults: Sampling fields where this dialect's default differs from ours.
        table: the dialect's parameters.

    Raises:
        InvalidParameter: naming the parameter, its value and what would have been right.
    """
    values: dict[str, Any] = dict(defaults)
    names: dict[str, str] = {}
    for name, value in given.items():
        parameter = table.parameters.get(name)
        if parameter is None or value is None:
            continue
        name = f"{table.prefix}{name}"
        try:
            found = parameter.read(value)
        except ValueError as error:
            raise InvalidParameter(f"{name}={show(value)}: {error}") from None
        field = parameter.field
        if not field:
            continue
        if field in names and values[field] != found:
            raise InvalidParameter(f"{name}={show(value)} contradicts {names[field]}")
        values[field], names[field] = found, name
    sampling = Sampling(**values)
    _check_agreement(sampling, names, context)
    _check_support(sampling, names, context)
    return sampling


def _check_agreement(sampling: Sampling, names: Mapping[str, str], context: Context) -> None:
    """What parameters must be to each other."""

    def refuse(field: str, why: str) -> None:
        raise InvalidParameter(f"{names[field]}={show(getattr(sampling, field))}: {why}")

    if sampling.min_new_tokens > sampling.max_new_tokens:
        refuse("min_new_tokens", f"must be at most max_new_tokens={sampling.max_new_tokens}")
    if "best_of" in names and sampling.best_of < sampling.n:
        refuse("best_of", f"must be at least n={sampling.n}")
    for field in ("n", "best_of", "num_beams"):
        if getattr(sampling, field) > context.max_sequences:
            refuse(field, f"must be at most {context.max_sequences} (option.max_rolling_batch_size)")
    if sampling.num_beams > 1:
        if sampling.do_sample:
            refuse("num_beams", "beam search does not sample; leave do_sample false")
        if max(sampling.n, sampling.best_of) > sampling.num_beams:
            refuse("num_beams", f"must be at least n={sampling.n} and best_of={sampling.best_of}")
        for field in _NOT_WITH_BEAMS:
            if getattr(sampling, field) != _DEFAULTS[field]:
                refuse(field, "is not available with num_beams > 1")
    else:
        for field, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(sampling, field) != neutral:
                refuse(field, "has an effect only with num_beams > 1")


def _check_support(sampling: Sampling, names: Mapping[str, str], context: Context) -> None:
    for field, why in context.lacks.items():
        value = getattr(sampling, field)
        greedy = field in SAMPLED and not sampling.do_sample
        # The chosen token's own log-probability comes with every answer: one "alternative" asks for no more than that.
        neutral = value == _DEFAULTS[field] or (field == "top_logprobs" and value <= 1)
        if not greedy and not neutral:
            raise InvalidParameter(
                f"{names.get(field, field)}={show(value)}: the engine {context.engine} lacks it: {why}"
            )


def show(value: Any) -> str:
    """A value in a message, cut short."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
