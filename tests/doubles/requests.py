"""Requests to a host that serves the tiny model with TensorRT-LLM's double, and what their answers must be like."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.doubles.using import DOUBLES

PROMPT = "Once upon a time"
OPTIONS = {
    "option.llm_engine": "trtllm",
    "option.max_beam_width": "3",
    "option.max_rolling_batch_size": "16",
}


def environment(manners: str) -> dict[str, str]:
    """For a host, in which the double takes TensorRT-LLM's place."""
    here = str(Path(DOUBLES).parents[1])
    return {"PYTHONPATH": os.pathsep.join([here, DOUBLES]), "TLLM_DOUBLE": manners}


class Case(NamedTuple):
    parameters: dict[str, Any]
    check: Callable[[dict[str, Any]], bool]  # of the whole answer
    settled: bool = True  # it is the same each time


def _details(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["details"])


def _length(count: int) -> Callable[[dict[str, Any]], bool]:
    def check(answer: dict[str, Any]) -> bool:
        details = _details(answer)
        tokens = details["tokens"]
        return (
            (details["finish_reason"], details["generated_tokens"], len(tokens)) == ("length", count, count)
            and all(token["log_prob"] <= 0 for token in tokens)
            and "".join(token["text"] for token in tokens) == answer["generated_text"]
        )

    return check


CASES: dict[str, Case] = {
    "greedy": Case({"max_new_tokens": 8, "ignore_eos_token": True}, _length(8)),
    "to the end": Case({"max_new_tokens": 300}, lambda answer: _details(answer)["finish_reason"] == "eos_token"),
    "sampled": Case({"do_sample": True, "seed": 7, "max_new_tokens": 9, "ignore_eos_token": True}, _length(9)),
    "without a seed": Case({"do_sample": True, "max_new_tokens": 9, "ignore_eos_token": True}, _length(9), False),
    "all of sampling": Case(
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
         "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 3, "max_new_tokens": 9, "ignore_eos_token": True},
        _length(9),
    ),
    "stop sequence": Case(
        {"stop_sequences": ["a", "e", "t"], "max_new_tokens": 300, "ignore_eos_token": True},
        lambda answer: _details(answer)["finish_reason"] == "stop_sequence" and not set("aet") & set(
            answer["generated_text"]
        ),
    ),
    "least length": Case(
        {"min_length": 90, "max_new_tokens": 300}, lambda answer: _details(answer)["generated_tokens"] >= 90
    ),
    "several": Case(
        {"n": 3, "do_sample": True, "seed": 5, "max_new_tokens": 4, "ignore_eos_token": True},
        lambda answer: len(_details(answer)["best_of_sequences"]) == 2,
    ),
    "beams": Case(
        {"num_beams": 3, "max_new_tokens": 5},
        lambda answer: len(_details(answer)["best_of_sequences"]) == 2,
    ),
    "prompt's log-probabilities": Case(
        {"decoder_input_details": True, "max_new_tokens": 2},
        lambda answer: "".join(token["text"] for token in _details(answer)["prefill"]) == PROMPT,
    ),
    "full text": Case(
        {"return_full_text": True, "max_new_tokens": 2}, lambda answer: answer["generated_text"].startswith(PROMPT)
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "typical_p": (
        {"typical_p": 0.5, "do_sample": True},
        "the engine trtllm does not support it: it does not implement typical decoding",
    ),
    "top_p": ({"top_p": 2.0, "do_sample": True}, "parameters.top_p=2.0"),
    "too long": ({"max_new_tokens": 100_000}, "max_new_tokens"),
    "too many beams": ({"num_beams": 4}, "parameters.num_beams=4: the engine trtllm accepts at most 3"),
}


def body(parameters: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"details": True, **parameters}, "stream": stream}


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]
