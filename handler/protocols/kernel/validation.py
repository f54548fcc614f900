"""Cross-field validation of sampling parameters, and checks against the engine's support and limits."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.values import BY_HANDLER, SAMPLED, Request, Sampling, Task
from handler.protocols.kernel.context import ServerContext

_ONLY_WITH_BEAMS: Sequence[str] = ("length_penalty", "early_stopping")

_WITH_BEAMS = frozenset({
    "num_beams", *_ONLY_WITH_BEAMS, "n", "best_of", "max_new_tokens", "stop_token_ids",
    "return_context_logits", "return_generation_logits", "prompt_top_logprobs", "do_sample", *SAMPLED, *BY_HANDLER,
})  # fmt: skip
"""Sampling fields that the engines' beam searches honour, or that have no effect there."""

DEFAULTS = Sampling._field_defaults


_ROUTES = {
    Task.GENERATION: "/v1/chat/completions, /generate and their like",
    Task.EMBEDDING: "/v1/embeddings, /embed and their like",
    Task.CLASSIFICATION: "/predict",
    Task.RERANK: "/rerank and its like",
    Task.TRANSCRIPTION: "/v1/audio/transcriptions, /v1/audio/translations",
}
_KINDS = {"embed": Task.EMBEDDING, "score": Task.RERANK, "classify": Task.CLASSIFICATION}


def check_task(request: Request, task: Task) -> None:
    """Raise InvalidPayload where the model computes something else than is asked for."""
    generated = Task.TRANSCRIPTION if request.transcribes else Task.GENERATION
    wanted = generated if request.pooling is None else _KINDS[request.pooling.kind]
    if wanted is not task:
        raise InvalidPayload(
            f"this server is for {task.value} (option.task): it answers {_ROUTES[task]}; this is {wanted.value}"
        )


class Named(NamedTuple):
    """A parameter as the client gave it."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={show(self.value)}"

    def refused(self, why: str) -> InvalidParameter:
        return InvalidParameter(f"{self}: {why}")


def check_agreement(sampling: Sampling, names: Mapping[str, Named], context: ServerContext) -> None:
    """Check parameters against each other."""

    def named(field: str) -> Named:
        if field == "structured_output" and field not in names:
            return Named("tools[].function.strict", True)  # which alone sets it without a name
        return names.get(field) or Named(field, getattr(sampling, field))

    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise named("min_new_tokens").refused(f"must be at most max_new_tokens={sampling.max_new_tokens}")
    if "best_of" in names and sampling.best_of < sampling.n:
        raise named("best_of").refused(f"must be at least n={sampling.n}")
    most = context.config.max_rolling_batch_size
    for field in ("n", "best_of", "num_beams"):
        if getattr(sampling, field) > most:
            raise named(field).refused(f"must be at most {most} (option.max_rolling_batch_size)")
    if sampling.structured_output is not None:
        for field in ("ignore_eos", "min_new_tokens"):
            if getattr(sampling, field) != DEFAULTS[field]:
                raise named(field).refused(
                    f"structured output decides where the answer ends; leave out {named('structured_output').name}"
                )
    refuse: Sequence[str]
    if sampling.num_beams > 1:
        if sampling.do_sample:
            raise named("num_beams").refused(f"beam search does not sample; leave out {named('do_sample')}")
        if max(sampling.n, sampling.best_of) > sampling.num_beams:
            raise named("num_beams").refused(f"must be at least n={sampling.n} and best_of={sampling.best_of}")
        refuse, why = [name for name in DEFAULTS if name not in _WITH_BEAMS], "is not available with num_beams > 1"
    else:
        refuse, why = _ONLY_WITH_BEAMS, "has an effect only with num_beams > 1"
    for field in refuse:
        if getattr(sampling, field) != DEFAULTS[field]:
            raise named(field).refused(why)


def check_support(
    sampling: Sampling, given: Collection[str], names: Mapping[str, Named], context: ServerContext
) -> None:
    """Refuse what the engine does not support.

    Args:
        given: the fields that the client or the dialect has set.
    """
    for field, why in context.unsupported.items():
        if field not in given:
            continue
        value = getattr(sampling, field)
        greedy = field in SAMPLED and not sampling.do_sample
        # The chosen token's own log-probability comes with every answer: one "alternative" asks for no more than that.
        neutral = value == DEFAULTS[field] or (field == "top_logprobs" and value <= 1)
        if not greedy and not neutral:
            raise names.get(field, Named(field, value)).refused(f"the engine {context.engine} lacks it: {why}")

    for field, most in context.limits.items():
        value = getattr(sampling, field)
        if value > most and not (field in SAMPLED and not sampling.do_sample):
            raise names.get(field, Named(field, value)).refused(f"the engine {context.engine} takes at most {most:g}")


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def show(value: Any) -> str:
    """Render a value for a message, at most 80 characters."""
    text = ""
    for piece in _ENCODER.iterencode(value[:100] if isinstance(value, str) else value):  # millions would take seconds
        text += piece
        if len(text) > 80:
            return text[:77] + "..."
    return text
