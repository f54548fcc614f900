"""A mock of vLLM's gRPC server, which generates one token per step for each request, without a model.

    python -m tests.compare.mock_grpc PORT --pace 50

It listens on loopback, for `lmi serve MODEL --engine grpc -o option.base_url=grpc://127.0.0.1:PORT`. MODEL can be any
model with the demo model's tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as service

_TOKENS = range(257, 321)  # parts of words in the demo model's vocabulary, each of which becomes an event
_CONTEXT = 1 << 20


class Servicer(service.VllmEngineServicer):  # type: ignore[misc]
    """The mock server, which generates a token for every running request in each step.

    Args:
        pace: steps per second.
    """

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._step = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            at = max(at + 1 / self._pace, loop.time())
            await asyncio.sleep(at - loop.time())
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        most, id = request.sampling_params.max_tokens, 0
        for index in range(most):
            await self._step.wait()
            id = _TOKENS[index % len(_TOKENS)]
            scores = messages.OutputLogProbs(token_logprobs=[-0.5], token_ids=[id])
            yield messages.GenerateResponse(
                chunk=messages.GenerateStreamChunk(token_ids=[id], output_logprobs=scores, completion_tokens=index + 1)
            )
        yield messages.GenerateResponse(complete=messages.GenerateComplete(output_ids=[id], finish_reason="length"))

    async def Abort(self, request: Any, context: Any) -> Any:
        return messages.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return messages.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return messages.GetModelInfoResponse(served_model_name="mock", is_generation=True, max_context_length=_CONTEXT)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return messages.GetLoadsResponse(loads=[messages.SchedulerLoad()])


async def serve(port: int, pace: float) -> None:
    servicer = Servicer(pace)
    server = grpc.aio.server()
    service.add_VllmEngineServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await servicer.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--pace", type=float, default=50.0, help="steps per second (default: %(default)s)")
    args = parser.parse_args()
    asyncio.run(serve(args.port, args.pace))


if __name__ == "__main__":
    main()
