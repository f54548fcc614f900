"""Send measured requests: by InvokeEndpointWithResponseStream or by the OpenAI route."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import urllib3

from deploy.client import Finish, Predictor, Raw, RequestFailed, Stream, Token
from deploy.client.aws.failures import FROM_AWS, failure
from handler.bench.load import Ask, Result

_WORDS = ("river", "stone", "amber", "cloud", "seven", "paper", "green", "north", "table", "music", "early", "horse")


Send: TypeAlias = Callable[[int], Result]
"""Send request number n, and wait for its whole answer. Blocks."""


def in_threads(send: Send, pool: ThreadPoolExecutor) -> Ask:
    """Return `send` for the load generator, run on the pool's threads: boto3 and urllib3 block."""

    async def ask(number: int) -> Result:
        return await asyncio.get_running_loop().run_in_executor(pool, send, number)

    return ask


def prompt(number: int, words: int) -> str:
    """Return the prompt of request number n: different from all others, so that no prefix cache helps."""
    chosen = random.Random(number)
    return " ".join([f"Story {number}:", *(chosen.choice(_WORDS) for _ in range(words - 2))])


def by_invocations(predictor: Predictor, words: int, max_tokens: int, parameters: dict[str, Any]) -> Send:
    """Send LMI's schema through InvokeEndpointWithResponseStream."""

    def send(number: int) -> Result:
        fixed = {"max_new_tokens": max_tokens, "details": True}
        body = {"inputs": prompt(number, words), "parameters": {**fixed, **parameters}, "stream": True}
        return measure_stream(lambda: predictor.predict_stream(body))

    return send


def by_openai(predictor: Predictor, words: int, max_tokens: int, parameters: dict[str, Any], connections: int) -> Send:
    """Send chat completions through the OpenAI route."""
    route = predictor.openai_route()
    pool = urllib3.PoolManager(maxsize=connections, timeout=urllib3.Timeout(connect=10, read=120), retries=False)

    def open_stream(number: int) -> Stream:
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

    return lambda number: measure_stream(lambda: open_stream(number))


def measure_stream(open_stream: Callable[[], Stream], clock: Callable[[], float] = time.monotonic) -> Result:
    """Open a stream, read it to its end, and note when each piece of text arrived."""
    start = clock()
    arrivals: list[float] = []
    counted: int | None = None
    try:
        for event in open_stream():
            if isinstance(event, Token):
                arrivals.append(clock())
            counted = _token_count(event) or counted
    except RequestFailed as failed:
        error = " ".join([type(failed).__name__, *([str(failed.original_status)] if failed.original_status else [])])
    else:
        error = "" if arrivals else "no tokens"
    return Result(start, arrivals, clock(), error, counted)


def _token_count(event: Any) -> int | None:
    """Return the number of tokens if the event has it."""
    match event:
        case Finish(details={"generated_tokens": int(number)} | {"completion_tokens": int(number)}):
            return number
        case Raw(data={"usage": {"completion_tokens": int(number)}}):
            return number
    return None
