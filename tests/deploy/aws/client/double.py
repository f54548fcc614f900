"""AWS as the client sees it, on loopback: a server whose answers a test lays out, faults included.

It answers by HTTP itself, unlike deploy/emulator: what the client must bear is not only what that does.
The caller may do what `Double.policies` allow, and nothing else.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from deploy.emulator.authorization import Permission, Where, allowed, needs_of, needs_of_invocation, needs_of_s3
from deploy.emulator.relay import CONTENT_TYPE, internal_stream_failure, model_stream_error, payload_part
from tests.deploy.doubles.aws import ACCOUNT
from tests.doubles.downloads import serving

Answer = Callable[["Handler"], None]


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Double:
    """Attributes:
    url: where it is.
    answers: given one after another; the last one to all that come after it.
    requests: what came, in order.
    released: set it, and answers that stall go on.
    policies: the caller's, as `lmi deploy iam` prints them.
    denied: what they did not allow.
    """

    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    policies: list[Mapping[str, Any]] = field(default_factory=list)
    denied: list[Permission] = field(default_factory=list)

    def denial(self, request: Request) -> Permission | None:
        """The first thing that the request needs and the caller may not do."""
        need = next((need for need in _needs(request) if not allowed(self.policies, need)), None)
        if need is not None:
            self.denied.append(need)
        return need


def _needs(request: Request) -> Iterator[Permission]:
    authorization = request.headers.get("authorization", "")
    where = Where("us-east-1", ACCOUNT)
    url = urllib.parse.urlsplit(request.path)
    if url.path.startswith("/endpoints/"):
        component = request.headers.get("x-amzn-sagemaker-inference-component")
        return needs_of_invocation(url.path, component, where, bearer=authorization.startswith("Bearer"))
    if target := request.headers.get("x-amz-target"):
        return needs_of("sagemaker", target.rpartition(".")[2], request.json, where)
    bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
    return needs_of_s3(
        request.method, bucket, key, dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True)), b"", where, None
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    double: Double

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        with self.double.lock:
            self.double.requests.append(request)
            if (need := self.double.denial(request)) is not None:
                return fails(403, "AccessDeniedException", f"not authorized to perform: {need}")(self)
            answers = self.double.answers
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return answer(self)

    do_GET = do_PUT = do_POST

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self, content_type: str) -> None:
        self.send_response(200)
        for name, value in (("Content-Type", CONTENT_TYPE), ("X-Amzn-SageMaker-Content-Type", content_type),
                            ("x-Amzn-Invoked-Production-Variant", "AllTraffic"),
                            ("Transfer-Encoding", "chunked")):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def cut(self) -> None:
        self.close_connection = True
        self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is what some tests want; what else fails here, the client sees as a cut connection."""


@contextmanager
def double() -> Iterator[Double]:
    made = Double()
    handler = type("DoubleHandler", (Handler,), {"double": made})
    server = _Server(("127.0.0.1", 0), handler)
    with serving(server) as made.url:
        try:
            yield made
        finally:
            made.released.set()


def says(value: Any, **headers: str) -> Answer:
    """An answer with status 200; `session` of headers stands for X-Amzn-SageMaker-New-Session-Id."""
    named = {f"X-Amzn-SageMaker-{name.replace('_', '-')}": text for name, text in headers.items()}
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda handler: handler.answer(200, body, {"Content-Type": "application/json", **named})


def fails(status: int, code: str, message: str, **members: Any) -> Answer:
    """AWS's own refusal."""
    body = json.dumps({"__type": code, "Message": message, **members}).encode()
    return lambda handler: handler.answer(status, body, {"x-amzn-ErrorType": code, "x-amzn-RequestId": "request-7"})


def model_answers(status: int, message: str) -> Answer:
    """What SageMaker makes of the container's answer, 0: of none."""
    log = "arn:aws:logs:us-east-1:000000000000:log-group:/aws/sagemaker/Endpoints/e"
    return fails(424, "ModelError", f"Received error ({status}) from primary with message {message!r}.",
                 OriginalStatusCode=status, OriginalMessage=message, LogStreamArn=log)  # fmt: skip


def streams(body: bytes, content_type: str = "application/jsonlines", *, part: int = 7, then: str = "") -> Answer:
    """A body in parts of so many bytes, and then its end, or a fault: time, broken, internal, cut, stall."""

    def answer(handler: Handler) -> None:
        handler.begin_stream(content_type)
        for start in range(0, len(body), part):
            handler.chunk(payload_part(body[start : start + part]))
        if then == "time":
            message = "Your model primary did not complete sending the inference response in the allotted time."
            handler.chunk(model_stream_error("ModelInvocationTimeExceeded", message))
        elif then == "broken":
            handler.chunk(model_stream_error("StreamBroken", "The model's container closed the stream."))
        elif then == "internal":
            handler.chunk(internal_stream_failure("boom"))
        elif then == "stall":
            handler.double.released.wait()
        if then in ("cut", "stall"):
            return handler.cut()
        handler.chunk(b"")
        return None

    return answer


def stalls(handler: Handler) -> None:
    """No answer at all."""
    handler.double.released.wait()
    handler.cut()


GOLDEN = Path(__file__).parents[3] / "golden"


class Wire(NamedTuple):
    """A streamed answer."""

    content_type: str
    body: bytes


def golden(name: str, status: int = 200) -> Wire:
    """tests/golden/{name}.txt: the request's line, the status line, the body."""
    _, head, body = (GOLDEN / f"{name}.txt").read_bytes().split(b"\n", 2)
    found, content_type = head.removeprefix(b"< ").split(b" ", 1)
    assert int(found) == status
    return Wire(content_type.decode(), body)


def golden_streams() -> list[str]:
    """The names of all whose answer is a stream with status 200."""
    found = []
    for schema in ("lmi", "tgi", "tgi_compat", "triton", "chat", "openai/chat", "openai/completion"):
        for path in sorted((GOLDEN / schema).glob("*stream*.txt")):
            if path.read_bytes().split(b"\n", 2)[1].startswith((b"< 200 text/event", b"< 200 application/jsonl")):
                found.append(f"{schema}/{path.stem}")
    return found
