"""SageMaker Runtime of a rehearsal: an emulator (deploy/local) for each endpoint, all before one container."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

from multidict import CIMultiDict
from werkzeug.datastructures import EnvironHeaders

from deploy.local.endpoint import Component, Endpoint, Limits, Status
from deploy.local.headers import ASYNC, INFERENCE_ID, to_container
from deploy.local.relay import reset_when_closed
from deploy.local.serving import listening
from deploy.rehearsal import asynchronous
from deploy.rehearsal.capture import configured
from deploy.rehearsal.cloud import Call, body_of, refuse
from deploy.rehearsal.sagemaker import ACCOUNT, Invalid, Thing

if TYPE_CHECKING:
    from deploy.rehearsal.cloud import Cloud

_JSON_LINES = "application/jsonlines"
_CONCURRENT = 4  # asynchronous requests at a time; SageMaker's default of MaxConcurrentInvocationsPerInstance
_PIECE = 2**16  # bytes of a stream to pass on at a time
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}
_NOT_PASSED = {"host", "content-length", *_HOP_BY_HOP}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to this machine
_STATUS = {"Creating": Status.CREATING, "Failed": Status.FAILED}


class Emulators:
    """The emulators of the endpoints, each started when it is first called.

    Args:
        container: URL of the container that answers for all of them.
        loop: where they run, in another thread than the calls of this class.
        healthy: whether the container answers its pings.
    """

    def __init__(
        self,
        container: str,
        loop: asyncio.AbstractEventLoop,
        healthy: Callable[[], bool],
        limits: Limits,
        part_bytes: int | None,
    ) -> None:
        self._container, self._loop, self._healthy = container, loop, healthy
        self._limits, self._part_bytes = limits, part_bytes
        self._running: dict[str, tuple[Endpoint, str]] = {}
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(_CONCURRENT)

    async def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def invoked(self, cloud: Cloud, call: Call, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request to SageMaker Runtime."""
        name, _, route = environ["PATH_INFO"].removeprefix("/endpoints/").partition("/")
        try:
            thing = cloud.sagemaker.look("endpoint", name)
            if route == "async-invocations":
                return self._accept(cloud, name, call.region, environ, start_response)
        except Invalid as error:
            missing = ("endpoint", name) not in cloud.sagemaker.things
            text = f"Endpoint {name} of account {ACCOUNT} not found." if missing else error.message
            return refuse("ValidationError", text, start_response)
        return relayed(self._emulator(cloud, thing, call.region), environ, start_response)

    def _accept(
        self, cloud: Cloud, name: str, region: str, environ: dict[str, Any], start_response: Any
    ) -> list[bytes]:
        """Take an asynchronous request, and do it meanwhile."""
        body, location = body_of(environ), environ.get("HTTP_X_AMZN_SAGEMAKER_INPUTLOCATION")
        if (location is None) == (not body):
            raise Invalid("Exactly one of InputLocation and Body must be given.")
        accepted = asynchronous.accept(cloud, name, region, body, location)
        headers = to_container(CIMultiDict(_headers(environ)), ASYNC, None)
        self._workers.submit(accepted.work, lambda body: self._ask(body, {**headers, INFERENCE_ID: accepted.id}))
        return accepted.answer(start_response)

    def transform(self, line: bytes) -> bytes:
        """Return the container's answer to a line of a transform job; what it refuses is answered too.

        Raises:
            ValueError: it fails, or gives no answer.
        """
        try:
            status, answer = self._post(line, {"Content-Type": _JSON_LINES})
        except OSError as error:
            raise ValueError(f"The container gave no answer: {error}") from None
        if status >= 500:
            raise ValueError(f"Bad HTTP status received from algorithm: {status}")
        return answer

    def _ask(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Ask the container.

        Raises:
            RuntimeError: it refuses, or gives no answer.
        """
        try:
            status, answer = self._post(body, headers)
        except OSError as error:
            raise RuntimeError(f"The container gave no answer: {error}") from None
        if status >= 400:
            text = answer.decode("utf-8", "replace")
            raise RuntimeError(f'Received client error ({status}) from primary with message "{text}".')
        return answer

    def _post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        request = urllib.request.Request(f"{self._container}/invocations", body, dict(headers))
        try:
            with _OPENER.open(request, timeout=self._limits.asynchronous) as reply:
                return int(reply.status), bytes(reply.read())
        except HTTPError as error:
            return error.code, bytes(error.read())

    def _emulator(self, cloud: Cloud, thing: Thing, region: str) -> str:
        """Return the URL of an endpoint's emulator, which then knows the endpoint's state."""
        with self._lock:
            if thing.name not in self._running:
                started = asyncio.run_coroutine_threadsafe(self._start(thing.name), self._loop)
                self._running[thing.name] = started.result()
        endpoint, url = self._running[thing.name]
        endpoint.status = _STATUS.get(thing.status, Status.IN_SERVICE)
        endpoint.healthy = self._healthy()
        sagemaker = cloud.sagemaker
        config = sagemaker.get("endpoint-config", thing.request["EndpointConfigName"])
        endpoint.capture = configured(cloud, config, region)
        endpoint.variant = config.request["ProductionVariants"][0]["VariantName"]
        endpoint.components = {one.name: _component(one) for one in sagemaker.components_of(thing.name)}
        return url

    async def _start(self, name: str) -> tuple[Endpoint, str]:
        endpoint = Endpoint(self._container, name, limits=self._limits, part_bytes=self._part_bytes, account=ACCOUNT)
        started: asyncio.Future[str] = self._loop.create_future()

        async def serve() -> None:
            async with listening(endpoint, None, "127.0.0.1", 0) as url:
                started.set_result(url)
                await self._stop.wait()

        self._tasks.add(asyncio.ensure_future(serve()))
        return endpoint, await started


def relayed(url: str, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
    """Pass a request on, and its answer as it comes."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
    path = urllib.parse.quote(environ["PATH_INFO"].encode("latin-1"))
    query = f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else ""
    try:
        connection.request("POST", path + query, body_of(environ), _headers(environ))
        reply = connection.getresponse()
    except BaseException:
        connection.close()
        raise
    headers = [(name, value) for name, value in reply.getheaders() if name.lower() not in _HOP_BY_HOP]
    start_response(f"{reply.status} {reply.reason}", headers)
    return _pieces(connection, reply, environ["werkzeug.socket"])


def _pieces(
    connection: http.client.HTTPConnection, reply: http.client.HTTPResponse, client: socket.socket
) -> Iterator[bytes]:
    """Yield what comes. A client that leaves closes this, and so the connection to the emulator.

    Where the answer breaks off, the client's connection is reset: this server ends whole answers by closing it.
    """
    try:
        while data := reply.read1(_PIECE):
            yield data
    except (OSError, http.client.HTTPException):
        reset_when_closed(client)
        os.close(client.detach())  # at once: the server would first say that nothing more comes
    finally:
        connection.close()


def _component(thing: Thing) -> Component:
    """Return the emulator's component: asleep until it has started."""
    copies = thing.request["RuntimeConfig"]["CurrentCopyCount"] if thing.status in ("InService", "Updating") else 0
    base = thing.request["Specification"].get("BaseInferenceComponentName")
    return Component(thing.name if base else None, copies)


def _headers(environ: dict[str, Any]) -> dict[str, str]:
    """Return the headers of a request that go on to the emulator."""
    return {name: value for name, value in EnvironHeaders(environ) if name.lower() not in _NOT_PASSED}
