"""What vLLM says of its requests, as this package's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.core import Finish
from handler.engines.base import Output


@dataclass
class Running:
    """A request in vLLM that is not a beam's."""

    key: int
    stops: frozenset[int]  # ids that end it as STOP, not as EOS
    num_tops: int  # alternatives that were asked for
    plain: bool  # its outputs hold nothing but the chosen token


def output_of(running: Running, result: Any) -> Output:
    output = result.outputs[0]
    ids, finish = list(output.token_ids), _finish(output, running.stops)
    if finish is Finish.ERROR:
        return Output(running.key, (), (), finish, error=f"vLLM ended it as {output.finish_reason!r}")
    positions = output.logprobs or ()
    prompt = result.prompt_logprobs
    return Output(
        running.key,
        ids,
        [position[id].logprob for id, position in zip(ids, positions, strict=True)],
        finish,
        prompt_logprobs=_prompt_logprobs(result.prompt_token_ids, prompt) if prompt else None,
        tops=[ranked(position)[: running.num_tops] for position in positions] if running.num_tops else None,
    )


def _finish(output: Any, stops: frozenset[int]) -> Finish | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return Finish.LENGTH
        case (
            "stop"
        ):  # stop_reason is None or an id that the model's generation_config.json names, where it is an end token
            return Finish.STOP if output.token_ids and output.token_ids[-1] in stops else Finish.EOS
        case _:
            return Finish.ERROR


def ranked(position: Mapping[int, Any]) -> list[tuple[int, float]]:
    """All ids of a position, the most likely first; the chosen one is among them, whatever its rank."""
    found = sorted(position.items(), key=lambda item: item[1].rank)
    return [(id, logprob.logprob) for id, logprob in found]


def _prompt_logprobs(ids: Sequence[int], positions: Sequence[Any]) -> list[float | None]:
    return [None if not found else found[id].logprob for id, found in zip(ids, positions, strict=True)]
