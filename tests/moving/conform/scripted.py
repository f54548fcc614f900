"""A small server that holds every rule of `lmi conform`, or breaks exactly one: `Scripted(broken="ping.ready")`.

It repeats the prompt's words, one a token, in the APIs of all profiles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator

from websockets.frames import CloseCode

from tests.moving.conform.decisions import Form
from tests.moving.conform.mutants import MUTANTS
from tests.moving.conform.websockets import PATHS, Session, Socket, offers
from tests.moving.conform.wire import INPUTS, Refused, Reply, Request, Value, infer, read, refusal, write

PACE = 0.004
"""Seconds a token."""


class Scripted:
    """The server, on the event loop that runs.

    Args:
        profile: whose form /invocations has.
        key: empty: it needs none.
        slow_start: seconds until it can serve.
        gauge: whether /metrics shows running requests; without it one token is made at a time.
    """

    sockets: tuple[str, ...] = PATHS
    """Paths that open a WebSocket."""

    def __init__(
        self, broken: str = "", profile: str = "lmi-0.28", key: str = "", slow_start: float = 0.0, gauge: bool = True
    ) -> None:
        self.broken = broken
        self.profile = profile
        self.key = key
        self.gauge = gauge
        self.port = 0
        self.form = Form()
        self.running = 0
        self.stopping = False
        self._ready = time.monotonic() + slow_start
        self._engine = asyncio.Lock()
        self._served = 0
        self._ids = itertools.count(1)
        self._sessions: set[str] = set()
        self._adapters: set[str] = set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port or port, limit=1 << 16)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._close()
        self._server = None  # a request that ends now opens none again
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def drain(self) -> None:
        """Return when what runs has ended, as after SIGTERM."""
        self.stopping = True
        while (self.running and self.broken != "stop.finishes") or self.broken == "stop.exit":
            await asyncio.sleep(0.01)

    def breaks(self, *rules: str) -> bool:
        return self.broken in rules

    # -- bytes ---------------------------------------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            request = await self._read(reader)
            if request is not None and offers(request) and request.path in self.sockets:
                await self._converse(Socket(request, reader, writer), request.path)
            elif request is not None:
                await self.answer(request, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))

    async def answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = await self.reply_to(request)
        if (mutate := MUTANTS.get(self.broken)) is not None:
            mutate(request, reply)
        if self.breaks("limits.at-once") and self.running >= 3:
            reply = Reply({"error": "full"}, 503)
        reply.headers.setdefault("x-request-id", str(next(self._ids)))
        with self._counted(reply):
            made = asyncio.ensure_future(self.send(reply, writer))
            gone = asyncio.ensure_future(reader.read(1))
            for task in (made, gone):
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # clients may go
            await asyncio.wait([made, gone], return_when=asyncio.FIRST_COMPLETED)
            if not made.done() and self.breaks("disconnect.stream", "disconnect.whole"):
                await self._go_on()
            made.cancel()
            gone.cancel()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await made

    @contextlib.contextmanager
    def _counted(self, reply: Reply) -> Iterator[None]:
        self.running += bool(reply.made)
        if (
            self.running and reply.events is not None and self.breaks("ping.connection")
        ):  # not in a probe's whole answer
            self._close()
        try:
            yield
        finally:
            self.running -= bool(reply.made)
            self._served += bool(reply.made) and not self.breaks("metrics.count")
            if not self.running and self.breaks("ping.connection") and self._server and not self._server.is_serving():
                await_later = asyncio.ensure_future(self.listen())
                self._connections.add(await_later)
                await_later.add_done_callback(self._connections.discard)

    async def send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        head = [f"HTTP/1.1 {reply.status} Said", f"content-type: {reply.content_type}", "connection: close"]
        head += [f"{name}: {value}" for name, value in reply.headers.items()]
        if reply.events is None:
            await self._pause(reply.made)
            body = reply.body
            head += [f"content-length: {len(body)}"] if "no-length" not in reply.headers else []
            writer.write(("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + body)
            await writer.drain()
            return
        pieces = [reply.encode(event) for event in reply.events] + ([reply.tail] if reply.tail else [])
        if "whole" in reply.headers:
            await self._pause(reply.made)
            body = b"".join(pieces)
            writer.write(("\r\n".join([*head, f"content-length: {len(body)}"]) + "\r\n\r\n").encode() + body)
            return
        writer.write(("\r\n".join([*head, "transfer-encoding: chunked"]) + "\r\n\r\n").encode())
        if "held" in reply.headers:
            await self._pause(reply.made)
        for piece in pieces:
            if "held" not in reply.headers:
                await self._pause(1)
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        if "cut" not in reply.headers:
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def _pause(self, tokens: int) -> None:
        """Make tokens."""
        if self.gauge:
            await asyncio.sleep(tokens * PACE)
            return
        for _ in range(tokens):
            async with self._engine:  # a crowd slows it down
                await asyncio.sleep(PACE)

    async def _go_on(self) -> None:
        """Compute an abandoned answer: slowly, and until the clients of a crowd have had some more answers."""
        if self.gauge:
            await self._pause(2000)
        until = self._served + 5
        while not self.gauge and self.running > 1 and self._served < until:
            async with self._engine:
                await asyncio.sleep(2 * PACE)

    # -- WebSockets ----------------------------------------------------------------------------------------------

    async def _converse(self, socket: Socket, path: str) -> None:
        """Answer messages one after another."""
        await socket.accept()
        session = Session(self.profile)
        for event in session.begin(path):
            await self._tell(socket, Request("TEXT", path, {}, b""), event)
        async for message in self._messages(socket):
            try:
                message.body.decode()
            except UnicodeDecodeError:
                await socket.fail(CloseCode.INTERNAL_ERROR if self.breaks("bidirectional.utf-8") else CloseCode(1007))
                return
            for event in session.events(message):
                await self._pause(1)
                await self._tell(socket, message, event)

    async def _tell(self, socket: Socket, message: Request, event: Value) -> None:
        reply = Reply(event)
        if (mutate := MUTANTS.get(self.broken)) is not None:
            mutate(message, reply)
        await socket.send(reply.value)

    async def _messages(self, socket: Socket) -> AsyncIterator[Request]:
        """The socket's messages, which are read while others are answered."""
        if self.breaks("bidirectional.ping"):
            async for message in socket.messages():
                yield message
            return
        arrived = asyncio.Queue[Request | None]()

        async def pump() -> None:
            async for message in socket.messages():
                arrived.put_nowait(message)
            arrived.put_nowait(None)

        task = asyncio.ensure_future(pump())
        try:
            while (arrival := await arrived.get()) is not None:
                yield arrival
        finally:
            task.cancel()

    # -- routes --------------------------------------------------------------------------------------------------

    async def reply_to(self, request: Request) -> Reply:
        ready = time.monotonic() >= self._ready
        if request.path == "/ping":
            if self.breaks("ping.in-time") and self.running:
                await asyncio.sleep(1)
            lies = self.breaks("start.ready")
            return Reply(b"", 200 if ready or lies else 503)
        if self.stopping:
            return Reply({"error": "stopping"}, 500 if self.breaks("stop.new-work") else 503)
        if not ready:
            return Reply({"error": "loading"}, 404 if self.breaks("start.early") else 503)
        if self.key and not self._has_key(request):
            status = 403 if self.breaks("key.right") else 401  # 401 ends the run
            return Reply({"error": {"message": "no key", "type": "e", "param": None, "code": None}}, status)
        if request.method == "POST" and self.form.decides(request):
            return self.form.reply(request)
        dialect = self._dialect(request.path)
        try:
            if request.method != "POST" or dialect is None:
                return self._other(request)
            if request.path == "/invocations" and b'"requestType"' in request.body:
                return self._session(request)
            self._check_headers(request)
            asked = read(dialect, request.body, whole_path=request.path.endswith("/generate"))
            if request.path == "/generate_stream" or request.path.endswith("/generate_stream"):
                asked.stream = True
            if request.path == "/v1/messages/count_tokens":
                return Reply({"input_tokens": len(asked.words)})
            if self.breaks("bad.alone") and self._hurt > time.monotonic():
                raise Refused("hurt by a neighbour", 500)
            return write(dialect, asked, self.profile, request.path)
        except Refused as error:
            if self.breaks("bad.alone"):
                self._hurt = time.monotonic() + 1
            return refusal(
                dialect,
                str(error),
                error.status,
                self.profile,
                b'"stream": true' in request.body or request.path == "/generate_stream",
            )

    _hurt = 0.0

    def _has_key(self, request: Request) -> bool:
        if self.breaks("key.every-route") and request.path == "/v1/completions":
            return True
        if self.breaks("key.right"):
            return False
        return self.key in (request.headers.get("authorization", "")[7:], request.headers.get("x-api-key"))

    def _dialect(self, path: str) -> str | None:
        if path in ("/invocations", "/predictions/model"):
            return "tgi" if self.profile == "tgi" else "lmi"
        if path.startswith("/v2/models/") and path.endswith(("/generate", "/generate_stream")):
            return "triton"
        return {
            "/": "tgi",
            "/generate": "tgi",
            "/generate_stream": "tgi",
            "/v1/chat/completions": "chat",
            "/v1/completions": "completion",
            "/v1/messages": "anthropic",
            "/v1/messages/count_tokens": "anthropic",
        }.get(path)

    def _check_headers(self, request: Request) -> None:
        status = 424 if self.profile.startswith("lmi") else 400
        session = request.headers.get("x-amzn-sagemaker-session-id")
        if session and session not in self._sessions and not self.breaks("sessions.unknown"):
            raise Refused("session not found", status)
        if session and self.breaks("sessions.use"):
            raise Refused("sessions do not work", status)
        adapter = request.headers.get("x-amzn-sagemaker-adapter-identifier")
        if adapter and (
            self.breaks("adapters.use") or (adapter not in self._adapters and not self.breaks("adapters.unknown"))
        ):
            raise Refused("adapter not found", status)
        if "x-amzn-sagemaker-something-new" in request.headers and self.breaks("invocations.headers"):
            raise Refused("an unknown header", 400)
        if "anthropic-version" in request.headers and self.breaks("anthropic.version"):
            raise Refused("an unknown header", 400)

    def _session(self, request: Request) -> Reply:
        session = request.headers.get("x-amzn-sagemaker-session-id", "")
        if b"NEW_SESSION" in request.body:
            name = f"00000000-0000-4000-8000-00000000000{len(self._sessions) + 1}"
            self._sessions.add(name)
            told = f"{name}; Expires=2026-11-24T10:00:00Z"
            headers = {"X-Amzn-SageMaker-New-Session-Id": told, "X-Amzn-SageMaker-Session-Id": told}
            return Reply({"result": f"Session {name} created"}, headers=headers)
        if not self.breaks("sessions.closed"):
            self._sessions.discard(session)
        return Reply({"result": f"Session {session} closed"}, headers={"X-Amzn-SageMaker-Closed-Session-Id": session})

    def _other(self, request: Request) -> Reply:
        match request.method, request.path:
            case "GET", "/health" | "/v2/health/live" | "/v2/health/ready" | "/v2/models/model/ready" | "/":
                return Reply(b"")
            case "GET", "/metrics":
                return Reply(self._metrics(), content_type="text/plain")
            case "GET", "/v1/models":
                model = {"id": "model", "object": "model", "created": 0, "owned_by": "us"}
                listed = {"name": "model", "description": "", "release_date": "2026-11-29"}
                return Reply({"object": "list", "data": [model], **({} if self.form.is_vllm else {"models": [listed]})})
            case "GET", "/info":
                names = (
                    "model_id",
                    "max_concurrent_requests",
                    "max_input_tokens",
                    "max_total_tokens",
                    "version",
                    "sha",
                )
                return Reply({**dict.fromkeys(names, 1), "model_id": "model"})
            case "GET", "/v2":
                return Reply({"name": "us", "version": "1", "extensions": ["generate"]})
            case "GET", "/v2/models/model":
                inputs = [{"name": name, "datatype": kind, "shape": [-1, 1]} for name, kind in INPUTS.items()]
                outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [-1, -1]}]
                about = {"name": "model", "versions": ["1"], "platform": "us"}
                return Reply({**about, "inputs": inputs, "outputs": outputs})
            case "POST", "/v2/models/model/infer":
                return infer(request)
            case "POST", "/v2/repository/index":
                return Reply([{"name": "model", "version": "1", "state": "READY"}])
            case "POST", "/tokenize":
                return Reply([{"id": 1, "text": "one", "start": 0, "stop": 3}])
            case "POST", "/adapters":
                name = json.loads(request.body).get("name", "")
                self._adapters.add(name)
                return Reply({"status": "registered"})
            case "DELETE", path if path.startswith("/adapters/"):
                name = path.rpartition("/")[2]
                if name not in self._adapters:
                    return Reply({"error": "unknown"}, 404)
                if not self.breaks("adapters.delete"):
                    self._adapters.discard(name)
                return Reply({"status": "unregistered"})
            case "GET", path if offers(request) and self._dialect(path):
                return Reply({"error": "this route has no WebSocket"}, 426)
            case "GET", path if self._dialect(path) or self.form.decides(request):
                return Reply({"error": "Method Not Allowed"}, 405)
        return Reply({"code": 404, "type": "ResourceNotFoundException", "message": "not found"}, 404)

    def _metrics(self) -> bytes:
        running = self.running if self.gauge else 0
        lines = [
            "# TYPE tgi_request_count counter",
            f"tgi_request_count {self._served}",
            "tgi_queue_size 0",
            *([f"tgi_batch_current_size {running}"] if self.gauge else []),
            'latency_bucket{le="+Inf",model="a b"} 1.0',
        ]
        return "\n".join([*lines, ""]).encode()


# -- a process of its own ----------------------------------------------------------------------------------------


async def _serve(arguments: argparse.Namespace) -> None:
    server = Scripted(arguments.broken, slow_start=arguments.slow_start)
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    await server.listen(arguments.port)
    await terminated.wait()
    await server.drain()
    await server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--broken", default="")
    parser.add_argument("--slow-start", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args()))
