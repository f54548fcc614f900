"""A worker of Dynamo that says a prompt's ids again and again: `python worker.py MODEL_DIRECTORY`.

It writes a line for each request, and one for each that was given up. With `ignore_eos` it says the first three ids, at
100 tokens a second, so that something can happen meanwhile. It then goes on alike after another worker's tokens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker


async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
    print("request", flush=True)
    ids, stop, output = request["token_ids"], request["stop_conditions"], request["output_options"] or {}
    ending = {*(request.get("eos_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())}
    ending |= set(stop.get("stop_token_ids") or ())
    most = stop.get("max_tokens") or 16
    for number in range(most):
        await asyncio.sleep(0.01 if stop.get("ignore_eos") else 0)
        if context.is_stopped():
            print("given up", flush=True)
            return
        id = ids[(len(ids) + number) % 3] if stop.get("ignore_eos") else ids[number % len(ids)]
        chunk: dict[str, Any] = {"token_ids": [id], "index": 0}
        if output.get("logprobs") is not None:
            chunk["log_probs"] = [0.0]
            chunk["top_logprobs"] = [[{"rank": 1, "token_id": id, "token": None, "logprob": 0.0}]]
        if number + 1 >= (stop.get("min_tokens") or 0) and id in ending and not stop.get("ignore_eos"):
            chunk["finish_reason"] = "stop"
        elif number + 1 == most:
            chunk["finish_reason"] = "length"
        yield chunk
        if "finish_reason" in chunk:
            return


async def worker(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("dynamo.backend.generate")
    kinds = ModelType.Chat | ModelType.Completions
    kind = WorkerType.Aggregated
    await register_model(
        ModelInput.Tokens, kinds, endpoint, sys.argv[1], "model", worker_type=kind, ignore_weights=True
    )
    await endpoint.serve_endpoint(generate)


uvloop.install()
asyncio.run(dynamo_worker()(worker)())
