"""Rules for every container on SageMaker: startup and shutdown, /ping, /invocations, limits, metrics, keys."""

from __future__ import annotations

import asyncio
import json
import re
import time

from handler.core.errors import ConfigError
from handler.core.numbers import decimal
from proof.conform import sources
from proof.conform.dialects import Body
from proof.conform.exchange import Response, connect
from proof.conform.rule import (
    SAGEMAKER,
    Failed,
    expect,
    expect_refused,
    expect_response,
    expect_type,
    rule,
    skip,
    succeeded,
)
from proof.conform.server import PROMPT, Server, Start, Stop


async def watch_start(server: Server, seconds: float) -> None:
    """Start the server, and observe it until it is ready.

    Raises:
        ConfigError: the server exited, or is not ready after `seconds`.
    """
    lifetime = server.lifetime
    assert lifetime is not None
    early = None
    deadline = time.monotonic() + seconds
    await lifetime.start()
    while not (response := await server.get("/ping", timeout=server.limits.ping)).ok:
        if await lifetime.has_ended():
            raise ConfigError("lmi conform: the server exited before it was ready; see its output above")
        if response.status == 404 and await _is_ready(server):
            return  # the server has no /ping
        if time.monotonic() > deadline:
            raise ConfigError(f"lmi conform: /ping did not return 200 within {seconds:.0f} s (--ready): {response.got}")
        if response.status and early is None:
            early = await _infer(server)
        await asyncio.sleep(0.05)
    if lifetime.ours:
        lifetime.started = Start(await _infer(server), early)


async def _is_ready(server: Server) -> bool:
    """Return whether a server without /ping reports readiness on a route that other servers use."""
    return any([(await server.get(path)).ok for path in ("/health", "/v2/health/ready", "/v1/models")])


async def _infer(server: Server) -> Response:
    """Send a request to /invocations in the first format that the server does not refuse."""
    for body in (
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}},
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
        {"prompt": PROMPT, "max_tokens": 2},
    ):
        response = await server.post("/invocations", body)
        if not response.refused:
            break
    return response


def _started(server: Server) -> Start:
    if server.lifetime is None or server.lifetime.started is None:
        skip("requires --command, which starts the server")
    return server.lifetime.started


@rule("start.ready", "/ping answers 200 only when the model can serve.", sources.CONTAINER, SAGEMAKER)
async def start_ready(server: Server) -> None:
    response = _started(server).first
    expect(response.ok, "a complete response to the first request after /ping returned 200", response)


@rule("start.early", "Before /ping answers 200, a request gets a status of 500 to 599.", sources.OURS, SAGEMAKER)
async def start_early(server: Server) -> None:
    response = _started(server).early
    if response is None:
        skip("the port was closed until the server was ready")
    expect(response.status >= 500 or response.failure or response.ok, "a status of 500 to 599", response)


# -- shutdown -----------------------------------------------------------------------------------------------------

_RUNNING = 3.0
"""Duration in seconds of the stream that is running when SIGTERM is sent."""


async def _stopped(server: Server) -> Stop:
    """Return the observations after SIGTERM, which is sent when the first rule calls this function."""
    lifetime = server.lifetime
    if lifetime is None:
        skip("requires --command or --container, because it stops the server")
    if lifetime.stopped is None:
        body, _ = await server.long_stream(min(_RUNNING, server.limits.long))
        async with server.asking_for(await server.path(stream=True), body) as (connection, task):
            await connection.begun(2, server.limits.response)
            began = time.monotonic()
            await lifetime.terminate()
            later: list[Response] = []
            while not task.done() and time.monotonic() < began + server.limits.stop:
                await asyncio.sleep(0.2)
                later.append(await server.generate(tokens=2))
            await asyncio.wait([task], timeout=max(0.0, began + server.limits.stop - time.monotonic()))
            ended = await lifetime.wait(began + server.limits.stop - time.monotonic())
            seconds = time.monotonic() - began if ended else None
        lifetime.stopped = Stop(task.result(), later, seconds)
    return lifetime.stopped


@rule("stop.finishes", "After SIGTERM a running stream continues to its end.", sources.CONTAINER, SAGEMAKER, last=True)
async def stop_finishes(server: Server) -> None:
    response = (await _stopped(server)).running
    expect(response.ok and response.is_uncut, "a complete stream", response)
    broken = [event for event in response.events if "error" in event]
    expect(not broken, "a stream without an error", response)


@rule(
    "stop.new-work",
    "After SIGTERM new requests are answered or refused, not cut off.",
    sources.CONTAINER,
    SAGEMAKER,
    last=True,
)
async def stop_new_work(server: Server) -> None:
    for response in (await _stopped(server)).later:
        refused = response.status == 503 or (response.failure and not response.status)
        expect(
            response.ok or (refused and response.failure != "timeout"),
            "status 200, status 503, or no connection",
            response,
        )


@rule("stop.exit", "The process ends within 30 s after SIGTERM.", sources.CONTAINER, SAGEMAKER, last=True)
async def stop_exit(server: Server) -> None:
    if (await _stopped(server)).seconds is None:
        raise Failed(f"exit within {server.limits.stop:g} s of SIGTERM", request="SIGTERM", got="it is still running")


# -- /ping, /invocations and limits --------------------------------------------------------------------------------


_BUSY = 8
"""Number of concurrent requests that are enough to keep a server busy."""

_SERIES = 2000
"""Maximum number of time series. Each of them is a metric in CloudWatch."""


@rule("ping.ready", "GET /ping answers 200 when the model can serve.", sources.CONTAINER, SAGEMAKER)
async def ping_ready(server: Server) -> None:
    response = await server.get("/ping")
    expect(response.ok, "status 200", response)


async def _streams(server: Server) -> list[asyncio.Task[Response]]:
    """Start streams that keep the server busy during the requests of a rule."""
    await server.dialect()
    return [asyncio.create_task(server.generate(tokens=64, stream=True)) for _ in range(_BUSY)]


@rule("ping.in-time", "GET /ping answers within 2 s while requests run.", sources.CONTAINER, SAGEMAKER)
async def ping_in_time(server: Server) -> None:
    limit = server.limits.ping
    busy = await _streams(server)
    try:
        for _ in range(5):
            response = await server.get("/ping", timeout=limit)
            expect(response.ok, f"status 200 within {limit:g} s during {_BUSY} streams", response)
            await asyncio.sleep(0.02)
    finally:
        await asyncio.gather(*busy)


@rule("ping.connection", "A connection is accepted within 250 ms while requests run.", sources.CONTAINER, SAGEMAKER)
async def ping_connection(server: Server) -> None:
    busy = await _streams(server)
    try:
        for _ in range(5):
            start = time.monotonic()
            try:
                (await connect(server.asking.url, server.limits.connect)).close()
            except (OSError, asyncio.TimeoutError):
                raise Failed(
                    f"a connection within {server.limits.connect:g} s during {_BUSY} streams",
                    Response("a connection", failure="no connection", seconds=time.monotonic() - start),
                ) from None
            await asyncio.sleep(0.02)
    finally:
        await asyncio.gather(*busy)


@rule("invocations.answers", "POST /invocations accepts inputs, messages or prompt.", sources.CONTAINER, SAGEMAKER)
async def invocations_bodies(server: Server) -> None:
    bodies: list[Body] = [
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}},
        {"model": await server.model(), "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
        {"model": await server.model(), "prompt": PROMPT, "max_tokens": 2},
    ]
    responses = [await server.post("/invocations", body) for body in bodies]
    best = min(responses, key=lambda response: (not response.ok, response.status == 404))
    expect(best.ok, "status 200 for one of inputs, messages, prompt", best)
    expect(best.value is not None, "JSON", best)


@rule(
    "invocations.headers",
    "Headers that SageMaker adds, and unknown headers, do not affect a request.",
    sources.CONTAINER,
    SAGEMAKER,
)
async def invocations_headers(server: Server) -> None:
    more = {
        "X-Amzn-SageMaker-Inference-Id": "conform-1",
        "X-Amzn-SageMaker-Custom-Attributes": "trace=1",
        "X-Amzn-SageMaker-Accept": "application/json",
        "X-Amzn-SageMaker-Something-New": "1",
        "Accept": "*/*",
    }
    await succeeded(server.generate(headers=more))


@rule("invocations.method", "GET /invocations is refused.", sources.CONTAINER, SAGEMAKER)
async def invocations_method(server: Server) -> None:
    expect_refused(await server.get("/invocations"), ", such as 405")


@rule("invocations.whole-length", "A non-streaming response has a Content-Length or is chunked.", sources.HTTP_1_1)
async def whole_length(server: Server) -> None:
    response = await succeeded(server.generate())
    expect(response.is_uncut, "Content-Length, or Transfer-Encoding: chunked", response)
    expect_type(response, "application/json")


@rule("openai-route.stream", "POST /v1/chat/completions streams server-sent events.", sources.OPENAI_ROUTE, SAGEMAKER)
async def openai_route(server: Server) -> None:
    response = await server.of_profile("openai").generate(tokens=4, stream=True)
    expect_response(response)
    expect_type(response, "text/event-stream")


@rule("openai-route.model", "A chat request may omit the model, or leave it empty.", sources.OPENAI_ROUTE, SAGEMAKER)
async def openai_route_model(server: Server) -> None:
    for more in ({"model": ""}, {}):
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, **more}
        expect_response(await server.post("/v1/chat/completions", body))


@rule("limits.whole-answer", "A response of 64 tokens arrives within 60 s.", sources.CONTAINER, SAGEMAKER)
async def limits_whole(server: Server) -> None:
    limit = server.limits.whole
    response = await server.generate(tokens=64, timeout=limit)
    expect(response.ok and response.seconds < limit, f"a complete response within {limit:g} s", response)


@rule("limits.long-stream", "A stream of more than 60 s is not cut off: it may take 8 minutes.", sources.FAQ, SAGEMAKER)
async def limits_long_stream(server: Server) -> None:
    if not server.asking.slow:
        skip("requires --slow, because it takes a minute")
    limit = server.limits.whole
    body, seconds = await server.long_stream(1.25 * limit)
    if seconds < limit:
        skip(f"this server's longest response takes {seconds:.0f} s")
    async with server.asking_for(await server.path(stream=True), body, 8 * limit) as (_, task):
        response = await task
    if response.failure == "timeout":
        return  # still running
    expect(response.ok, "a complete stream", response)
    if response.seconds < limit:
        skip(f"the stream ended after {response.seconds:.0f} s")


@rule("limits.payload", "A request with a body of 25 MB is answered.", sources.FAQ, SAGEMAKER)
async def limits_payload(server: Server) -> None:
    data = json.dumps(await server.body(tokens=2)).encode()  # JSON may have white space around it
    data += b" " * (server.limits.payload - len(data))
    response = await server.post(await server.path(), data)
    expect(response.ok, f"status 200 for {len(data):,} bytes, most of them white space", response)


@rule("limits.at-once", f"{_BUSY} concurrent requests succeed.", sources.CONTAINER)
async def limits_at_once(server: Server) -> None:
    for response in await asyncio.gather(*(server.generate(tokens=4) for _ in range(_BUSY))):
        expect(response.ok, f"status 200 for each of {_BUSY} concurrent requests", response)


# -- metrics -----------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(
    r"^[a-zA-Z_:][\w:]*"
    r'(\{([a-zA-Z_]\w*="(?:[^"\\]|\\.)*",? ?)*\})?'
    r" +(?:[-+]?[0-9.eE+-]+|NaN|[-+]?Inf)( -?[0-9]+)?$",
    re.ASCII,
)


def samples(response: Response) -> dict[str, float]:
    """Return the values of Prometheus metrics, by name with labels."""
    lines = [line.split(" ") for line in response.text.splitlines() if line and not line.startswith("#")]
    values = {}
    for name, *value in (" ".join(parts).rsplit(" ", 1) for parts in lines):
        try:
            values[name] = decimal(value[0])
        except (ValueError, IndexError):
            continue
    return values


async def _metrics(server: Server) -> Response:
    response = await server.metrics()
    if not response.ok:
        skip(f"{server.asking.metrics} returns no metrics: see metrics.format")
    return response


@rule(
    "metrics.format", "/metrics, or MetricsEndpointPath, returns Prometheus' text format.", sources.METRICS, SAGEMAKER
)
async def metrics_format(server: Server) -> None:
    response = await server.metrics()
    expect(response.ok, "status 200 (--metrics sets another path)", response)
    lines = [line for line in response.text.splitlines() if line and not line.startswith("#")]
    expect(lines, "metrics", response)
    for line in lines:
        if not _SAMPLE.match(line):
            raise Failed(f"Prometheus' format, which this line does not have: {line[:200]}", response)


@rule("metrics.few", "There are few time series, because CloudWatch receives all.", sources.METRICS, SAGEMAKER)
async def metrics_few(server: Server) -> None:
    response = await _metrics(server)
    count = len(samples(response))
    expect(count <= _SERIES, f"at most {_SERIES} time series, not {count}", response)


@rule("metrics.count", "A counter increases by one with each response.", sources.METRICS, SAGEMAKER)
async def metrics_count(server: Server) -> None:
    before = samples(await _metrics(server))
    for _ in range(3):
        await succeeded(server.generate(tokens=2))
    deadline = time.monotonic() + server.limits.abandoned
    while True:
        response = await _metrics(server)
        grown = [name for name, value in samples(response).items() if value - before.get(name, 0.0) == 3]
        if grown:
            return
        if time.monotonic() > deadline:
            raise Failed("a counter that increased by 3 after 3 responses", response)
        await asyncio.sleep(0.2)


# -- keys --------------------------------------------------------------------------------------------------------

ROUTES = (
    *("/invocations", "/predictions/{model}", "/models/{model}/invoke", "/", "/generate", "/generate_stream"),
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/v1/embeddings", "/tokenize", "/detokenize", "/adapters", "/v1/load_lora_adapter"),
    *("/v2/models/{model}/generate", "/v2/models/{model}/generate_stream"),
)
"""Routes of all known containers; a server answers 404 or 405 for routes that it does not have."""


def _keyed(server: Server) -> None:
    if not server.asking.key:
        skip("requires a key: LMI_API_KEY")


@rule("key.every-route", "Without a valid key, every POST route answers 401.", sources.OPENAI_ERRORS)
async def key_every_route(server: Server) -> None:
    _keyed(server)
    body = await server.body(tokens=2)
    wrong = {"authorization": "Bearer wrong", "x-api-key": "wrong"}
    let_in: dict[str, Response] = {}
    for route in ROUTES:
        path = await server.filled(route)
        if (await server.post(path, body)).status in (404, 405, 501):
            continue
        for headers in ({}, wrong):
            response = await server.post(path, body, keyed=False, headers=headers)
            if response.status not in (401, 403):
                let_in.setdefault(path, response)
    for response in let_in.values():
        raise Failed(f"status 401 without the key on {', '.join(let_in)}", response)


@rule("key.right", "A request with the key is answered.", sources.OPENAI_ERRORS)
async def key_right(server: Server) -> None:
    _keyed(server)
    await succeeded(server.generate(tokens=2))


@rule("key.ping", "/ping requires no key, because SageMaker sends none.", sources.CONTAINER, SAGEMAKER)
async def key_ping(server: Server) -> None:
    _keyed(server)
    response = await server.get("/ping", keyed=False)
    expect(response.ok, "status 200 without the key", response)
