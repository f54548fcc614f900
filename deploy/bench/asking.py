"""One measured request: by SageMaker's stream or by the OpenAI route."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import urllib3

from deploy.client import Finish, Predictor, Raw, RequestFailed, Stream, Token
from deploy.client.aws.failures import FROM_AWS, failure

_WORDS = ("river", "stone", "amber", "cloud", "seven", "paper", "green", "north", "table", "music", "early", "horse")


@dataclass(frozen=True)
class Result:
    """What became of one request; times of the monotonic clock.

    Attributes:
        start: when it was sent; in an open loop when it was due, so that a late generator hides nothing.
        arrivals: of each piece of text, in order.
        end: the answer's, or the failure's.
        tokens: as the endpoint counted them, else the pieces.
        error: what kind of failure; empty without one.
    """

    start: float
    arrivals: tuple[float, ...]
    end: float
    tokens: int
    error: str = ""


Ask: TypeAlias = Callable[[float, int], Result]
"""Sends request number n, due at a time."""


def prompt(number: int, words: int) -> str:
    """Another text for each request, so that no cache of prompts answers for the model; the same in every run."""
    chosen = random.Random(number)
    return " ".join([f"Story {number}:", *(chosen.choice(_WORDS) for _ in range(words - 2))])


def by_invocations(predictor: Predictor, words: int, max_tokens: int, parameters: dict[str, Any]) -> Ask:
    """LMI's and TGI's schema through InvokeEndpointWithResponseStream."""

    def ask(start: float, number: int) -> Result:
        fixed = {"max_new_tokens": max_tokens, "details": True}
        body = {"inputs": prompt(number, words), "parameters": {**fixed, **parameters}, "stream": True}
        return measured(start, lambda: predictor.predict_stream(body))

    return ask


def by_openai(predictor: Predictor, words: int, max_tokens: int, parameters: dict[str, Any], connections: int) -> Ask:
    """Chat completions through the OpenAI route."""
    route = predictor.openai_route()
    pool = urllib3.PoolManager(maxsize=connections, timeout=urllib3.Timeout(connect=10, read=120), retries=False)

    def opened(number: int) -> Stream:
        messages = [{"role": "user", "content": prompt(number, words)}]
        fixed = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Authorization": f"Bearer {route.token()}", "Content-Type": "application/json"}
        body = json.dumps({"model": "", "messages": messages, **fixed, **parameters})
        try:
            response = pool.request(
                "POST", f"{route.base_url}/chat/completions", body=body, headers=headers, preload_content=False
            )
        except FROM_AWS as error:
            raise failure(error) from error
        if response.status != 200:
            response.close()
            raise RequestFailed("", original_status=response.status)
        return Stream(response.stream(), response.headers.get("Content-Type", ""), response.close)

    return lambda start, number: measured(start, lambda: opened(number))


def measured(start: float, opened: Callable[[], Stream], clock: Callable[[], float] = time.monotonic) -> Result:
    arrivals: list[float] = []
    counted = 0
    try:
        for event in opened():
            if isinstance(event, Token):
                arrivals.append(clock())
            counted = _counted(event) or counted
    except RequestFailed as error:
        status = f" {error.original_status}" if error.original_status else ""
        return Result(start, tuple(arrivals), clock(), counted or len(arrivals), f"{type(error).__name__}{status}")
    return Result(start, tuple(arrivals), clock(), counted or len(arrivals), "" if arrivals else "no tokens")


def _counted(event: Any) -> int | None:
    match event:
        case Finish(details={"generated_tokens": int(number)} | {"completion_tokens": int(number)}):
            return number
        case Raw(data={"usage": {"completion_tokens": int(number)}}):
            return number
    return None
