"""Hostile tensors, messages and streams at Triton's two doors: the event loop goes on, and memory stays bounded."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import h2.connection
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.attacks.test_memory import memory
from tests.attacks.watch import answering
from tests.servers import PATIENCE, ServerProcess, free_port, http, options, serve, wait_for

INFER = "/v2/models/model/infer"
HEADER = "inference-header-content-length"
SIZE = 15_000_000  # bytes of a message, about; the limit is 16 MiB
MOST = 300_000_000  # bytes of resident memory beyond those before
LEFT = 150_000_000  # when all have gone: the allocator keeps some


class Doors(NamedTuple):
    server: ServerProcess
    port: int

    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", own)


@contextlib.contextmanager
def serving() -> Iterator[Doors]:
    port = free_port()
    own = ("option.max_rolling_batch_size=64", "job_queue_size=200")
    with serve("--engine", "echo", "--grpc-port", str(port), *options(*own)) as server:
        server.wait_ready()
        yield Doors(server, port)


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with serving() as doors:
        yield doors


@pytest.fixture(scope="module")
def calm_doors() -> Iterator[Doors]:
    """A server that has no memory of large messages to give back."""
    with serving() as doors:
        yield doors


# -- HTTP --------------------------------------------------------------------------------------------------------------


def tensor(name: str, datatype: str, *values: Any, **members: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1, len(values)], "data": [*values], **members}


TEXT, LENGTH = tensor("text_input", "BYTES", "a"), tensor("max_tokens", "INT32", 4)
DEPTH = 20_000


def infer(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": [*inputs], **members}).encode()


def announced(name: str, datatype: str, elements: int, size: int) -> bytes:
    tail = {"name": name, "datatype": datatype, "shape": [1, elements], "parameters": {"binary_data_size": size}}
    return infer(TEXT, LENGTH, tail)


class Attack(NamedTuple):
    document: bytes
    data: bytes | None = None
    encoding: str = "identity"


BODIES: dict[str, Callable[[], Attack]] = {
    "data in lists in lists": lambda: Attack(
        infer(TEXT, {**LENGTH, "data": 0}).replace(b'"data": 0', b'"data": ' + b"[" * DEPTH + b"4" + b"]" * DEPTH)
    ),
    "many elements": lambda: Attack(infer(TEXT, LENGTH, tensor("stop_words", "BYTES", *["a"] * 500_000))),
    "many tensors": lambda: Attack(infer(TEXT, LENGTH, *[tensor("temperature", "FP32", 1)] * 100_000)),
    "many outputs": lambda: Attack(infer(TEXT, LENGTH, outputs=[{"name": "text_output"}] * 300_000)),
    "many parameters": lambda: Attack(infer(TEXT, LENGTH, parameters={f"p{number}": 1 for number in range(200_000)})),
    "a long shape": lambda: Attack(infer(TEXT, {**LENGTH, "shape": [1] * 500_000})),
    "a long name": lambda: Attack(infer(TEXT, {**LENGTH, "name": "a" * 5_000_000})),
    "a long datatype": lambda: Attack(infer(TEXT, {**LENGTH, "datatype": "a" * 5_000_000})),
    "more elements than any memory": lambda: Attack(infer(TEXT, {**LENGTH, "shape": [1, 1 << 63]})),
    "a number without end": lambda: Attack(infer(TEXT, LENGTH).replace(b"[4]", b"[" + b"9" * 500_000 + b"]")),
    "many empty texts": lambda: Attack(announced("stop_words", "BYTES", 2_000_000, 8_000_000), bytes(8_000_000)),
    "many numbers": lambda: Attack(announced("stop_token_ids", "INT32", 2_000_000, 8_000_000), bytes(8_000_000)),
    "a text that runs over": lambda: Attack(
        announced("stop_words", "BYTES", 1, 8_000_000), struct.pack("<I", 0xFFFFFFFF) + bytes(8_000_000 - 4)
    ),
    "a size that runs over": lambda: Attack(announced("stop_words", "BYTES", 1, 1 << 62), bytes(1_000_000)),
    "text that is not UTF-8": lambda: Attack(
        announced("stop_words", "BYTES", 1, 8_000_000), struct.pack("<I", 8_000_000 - 4) + b"\xff" * (8_000_000 - 4)
    ),
    "a bomb of zeros": lambda: Attack(gzip.compress(bytes(500 << 20), 1), encoding="gzip"),
    "a bomb of lists": lambda: Attack(gzip.compress(b"[" * (60 << 20), 1), encoding="gzip"),
    "a bomb behind a document": lambda: Attack(
        gzip.compress(announced("stop_words", "BYTES", 15_000_000, 60_000_000) + bytes(60_000_000), 1), encoding="gzip"
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_no_body_stops_the_event_loop(doors: Doors, name: str) -> None:
    document, data, encoding = BODIES[name]()
    headers = {"content-encoding": encoding}
    if data is not None or name == "a bomb behind a document":
        length = len(announced("stop_words", "BYTES", 15_000_000, 60_000_000)) if data is None else len(document)
        headers[HEADER] = str(length)
    before = memory(doors.server)
    with answering(doors.server):
        found = http.post(doors.server.url + INFER, content=document + (data or b""), headers=headers)
    assert found.status_code in (200, 400), found.text[:500]
    assert len(found.content) < 2000
    assert memory(doors.server) - before < MOST


# -- gRPC --------------------------------------------------------------------------------------------------------------


def message(**inputs: Any) -> Any:
    """A request whose contents are raw."""
    request = service_pb2.ModelInferRequest(model_name="model", id="7")
    for name, value in {"text_input": "a b c", "max_tokens": 4, **inputs}.items():
        if isinstance(value, str):
            datatype, data = "BYTES", struct.pack("<I", len(value)) + value.encode()
        elif isinstance(value, bool):
            datatype, data = "BOOL", bytes([value])
        else:
            datatype, data = "INT32", struct.pack("<i", value)
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        request.raw_input_contents.append(data)
    return request


def with_tensor(**members: Any) -> bytes:
    request = message()
    request.inputs.add(name="stop_words", datatype="BYTES", **members)
    return bytes(request.SerializeToString())


def field(number: int, data: bytes) -> bytes:
    """A field of a message in its wire format."""
    size, length = len(data), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


EMPTY = SIZE // 2  # fields without content in a message
INPUTS, OUTPUTS, RAW, PARAMETERS = 5, 6, 7, 4
SHAPE, CONTENTS, BYTES = 3, 5, 8
MESSAGES: dict[str, Callable[[], bytes]] = {
    "no message": lambda: b"\xff" * SIZE,
    "many inputs": lambda: field(INPUTS, b"") * EMPTY,
    "many outputs": lambda: field(OUTPUTS, b"") * EMPTY,
    "many contents": lambda: field(RAW, b"") * EMPTY,
    "many parameters": lambda: b"".join(field(PARAMETERS, field(1, b"%d" % number)) for number in range(1_000_000)),
    "many contents behind one": lambda: field(RAW, bytes(SIZE // 2)) + field(RAW, b"") * (EMPTY // 2),
    "a long shape": lambda: field(INPUTS, field(SHAPE, bytes(SIZE))),
    "many typed elements": lambda: field(INPUTS, field(CONTENTS, field(BYTES, b"") * EMPTY)),
    "a large element": lambda: field(INPUTS, field(CONTENTS, field(BYTES, bytes(SIZE)))),
    "some typed elements": lambda: field(INPUTS, field(CONTENTS, field(BYTES, b"") * 400_000)),
    "some sizes": lambda: field(INPUTS, field(SHAPE, b"\1" * 900_000)),
    "lists in lists": lambda: bytes([INPUTS << 3 | 3]) * SIZE,
    "a long text": lambda: message(text_input="\0" * (9 << 20)).SerializeToString(),
    "texts of nothing": lambda: (
        message().SerializeToString()
        + field(INPUTS, field(1, b"stop_words") + field(2, b"BYTES") + field(SHAPE, b"\1\x80\x89\x7a"))
        + field(RAW, bytes(8_000_000))
    ),
}
"""Bytes of a request, most of about SIZE."""


@pytest.mark.parametrize("name", MESSAGES)
def test_no_message_stops_the_event_loop(doors: Doors, name: str) -> None:
    data, before = MESSAGES[name](), memory(doors.server)
    with doors.channel() as channel, answering(doors.server):
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            call(data, timeout=PATIENCE)
    assert refused.value.code().name in ("INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED"), refused.value.details()
    assert len(refused.value.details()) < 1000
    assert memory(doors.server) - before < MOST
    wait_for(lambda: memory(doors.server) - before < LEFT, PATIENCE, "the memory is not given back")


@pytest.mark.parametrize("many", [1000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_a_stream_of_many_requests(calm_doors: Doors, many: int) -> None:
    before = memory(calm_doors.server)

    def requests() -> Iterator[Any]:
        for number in range(many):
            request = message(max_tokens=1)
            request.id = str(number)
            if number % 10 == 9:
                request.model_name = "nope"
            yield request

    with calm_doors.channel() as channel, answering(calm_doors.server):
        found = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests(), timeout=5 * PATIENCE)
        ids = [(int(one.infer_response.id), bool(one.error_message)) for one in found]
    assert sorted(ids) == [(number, number % 10 == 9) for number in range(many)]
    assert memory(calm_doors.server) - before < MOST * many // 10_000


class HalfOpen:
    """A connection that speaks HTTP/2 by hand, as no client of gRPC's does."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._connection = h2.connection.H2Connection()
        self._connection.initiate_connection()
        self._flush()

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str = "ModelStreamInfer") -> int:
        """Begin a call; return the stream."""
        stream = self._connection.get_next_available_stream_id()
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":authority": "localhost",
            ":path": f"/inference.GRPCInferenceService/{method}",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        self._connection.send_headers(stream, [*headers.items()])
        self._flush()
        return stream

    def send(self, stream: int, data: bytes) -> None:
        """Send bytes of a call, as the server takes them."""
        position = 0
        while position < len(data):
            window = self._connection.local_flow_control_window(stream)
            size = min(window, self._connection.max_outbound_frame_size, len(data) - position)
            if not size:
                self._connection.receive_data(self._socket.recv(1 << 16))
                self._flush()
                continue
            self._connection.send_data(stream, data[position : position + size])
            position += size
            self._flush()

    def _flush(self) -> None:
        self._socket.sendall(self._connection.data_to_send())


def ask(calm_doors: Doors) -> str:
    """The code of a neighbour's call."""
    with calm_doors.channel() as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message(), timeout=PATIENCE)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


def test_streams_that_stay_empty(calm_doors: Doors) -> None:
    before = memory(calm_doors.server)
    with contextlib.ExitStack() as stack, answering(calm_doors.server):
        for _ in range(20):
            connection = stack.enter_context(contextlib.closing(HalfOpen(calm_doors.port)))
            for _ in range(100):
                connection.call()
        assert ask(calm_doors) == "OK"
        held = memory(calm_doors.server) - before
    assert held < MOST


def test_messages_that_never_end(calm_doors: Doors) -> None:
    before = memory(calm_doors.server)
    half = struct.pack(">BI", 0, SIZE) + bytes(SIZE - 1)
    with contextlib.ExitStack() as stack, answering(calm_doors.server):
        connections = [stack.enter_context(contextlib.closing(HalfOpen(calm_doors.port))) for _ in range(15)]
        with ThreadPoolExecutor(8) as threads:
            [*threads.map(lambda one: one.send(one.call("ModelInfer"), half), connections)]
        assert ask(calm_doors) == "OK"
        held = memory(calm_doors.server) - before
    assert held < MOST
    wait_for(lambda: memory(calm_doors.server) - before < LEFT, PATIENCE, "the memory is not given back")


def test_clients_that_read_nothing(calm_doors: Doors) -> None:
    """Each has its prompt come back; the memory of all is that of `option.requests_total_bytes`."""
    before = memory(calm_doors.server)
    long = message(text_input="a " * 3_500_000, max_tokens=1, exclude_input_in_output=False, stream=True)
    data = long.SerializeToString()
    with contextlib.ExitStack() as stack, answering(calm_doors.server):
        for _ in range(60):
            connection = stack.enter_context(contextlib.closing(HalfOpen(calm_doors.port)))
            stream = connection.call()
            connection.send(stream, struct.pack(">BI", 0, len(data)) + data)
        assert ask(calm_doors) == "OK"
        wait_for(lambda: memory(calm_doors.server) - before < MOST, PATIENCE, "the memory of all is kept")
    wait_for(lambda: memory(calm_doors.server) - before < LEFT, PATIENCE, "the memory is not given back")
