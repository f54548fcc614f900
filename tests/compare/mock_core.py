"""A mock engine core for vLLM's Rust front end, which generates one token per step for each request, without a model.

It uses the protocol of vLLM 0.33 with ZeroMQ and msgpack. In each step, one message has the tokens of all requests.

    python -m tests.compare.mock_core tcp://127.0.0.1:PORT --pace 50
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import msgspec
import zmq

_IDENTITY = b"\x00\x00"  # rank 0, two bytes, little endian
_ADD, _ABORT, _UTILITY = b"\x00", b"\x01", b"\x03"
_LENGTH = 1  # the finish reason
_IDLE = 1.0  # seconds to wait for a request if no pace is set
_TOKENS = range(257, 321)  # parts of words in the demo model's vocabulary, each of which becomes an event
_STATE = {"local": True, "headless": True, "parallel_config_hash": None}
_READY = {
    "max_model_len": 1 << 20,
    "num_gpu_blocks": 10_000,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "bfloat16",
    "vllm_version": "0.33.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 4096,
    "max_num_batched_tokens": 8192,
    "instance_id": "mock",
    "supports_lora": False,
    "max_loras": 0,
}


class Sampling(msgspec.Struct):
    max_tokens: int


class Request(msgspec.Struct, array_like=True):
    """The first fields of a request."""

    id: str
    prompt_ids: msgspec.Raw
    images: msgspec.Raw
    sampling: Sampling


class Core:
    """An engine core, with its running requests and its sockets to the front end.

    Args:
        handshake: address on which the front end waits for cores.
    """

    def __init__(self, handshake: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pack = msgspec.msgpack.Encoder().encode
        self._request = msgspec.msgpack.Decoder(Request).decode
        self._last_steps: dict[str, int] = {}  # the last step of each request
        self._step = 0
        self._handshake = self._dealer(handshake)
        self._handshake.send(self._pack({"status": "HELLO", **_STATE}))
        addresses = msgspec.msgpack.decode(self._handshake.recv())["addresses"]
        self._input = self._dealer(addresses["inputs"][0])
        self._input.send(self._pack(_READY))
        self._output = self._context.socket(zmq.PUSH)
        self._output.sndhwm = 0  # no limit, so that a step never waits for the front end
        self._output.connect(addresses["outputs"][0])
        self._handshake.send(self._pack({"status": "READY", **_STATE}))

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.identity = _IDENTITY
        socket.connect(address)
        return socket

    def run(self, pace: float) -> None:
        """Run `pace` steps per second forever, or as many steps as possible if `pace` is 0."""
        due = time.monotonic()
        while True:
            idle = _IDLE if not self._last_steps else 0.0
            self._receive(max(0.0, due - time.monotonic()) if pace else idle)
            if time.monotonic() >= due:
                due += 1 / pace if pace else 0.0
                self._advance()

    def _receive(self, seconds: float) -> None:
        """Read all messages that have arrived. If there are none, wait for at most `seconds`."""
        if not self._input.poll(math.ceil(seconds * 1000)):
            return
        while True:
            try:
                kind, *frames = self._input.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if kind == _ADD:
                request = self._request(frames[0])
                self._last_steps[request.id] = self._step + request.sampling.max_tokens
            elif kind == _ABORT:
                for id in msgspec.msgpack.decode(frames[0]):
                    self._last_steps.pop(id, None)
            elif kind == _UTILITY:
                self._send([], [msgspec.msgpack.decode(frames[0])[1], None, [None, None]])

    def _advance(self) -> None:
        """Generate one token for each request."""
        if not self._last_steps:
            return
        self._step += 1
        step, tokens = self._step, (_TOKENS[self._step % len(_TOKENS)],)
        end = (None, None, None, _LENGTH)
        ended = [id for id, last in self._last_steps.items() if last <= step]
        outputs: list[tuple[Any, ...]] = [(id, tokens) for id, last in self._last_steps.items() if last > step]
        self._send([*outputs, *((id, tokens, *end) for id in ended)])
        for id in ended:
            del self._last_steps[id]

    def _send(self, outputs: list[tuple[Any, ...]], utility: list[Any] | None = None) -> None:
        self._output.send(self._pack((0, outputs, None, time.monotonic(), *([utility] if utility else ()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("handshake", help="address at which the front end waits for cores")
    parser.add_argument("--pace", type=float, default=50.0, help="tokens per second of each request, or 0 for no limit")
    arguments = parser.parse_args()
    Core(arguments.handshake).run(arguments.pace)


if __name__ == "__main__":
    main()
