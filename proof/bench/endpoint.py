"""`lmi deploy bench`, which measures an endpoint under load and recommends a target concurrency for its scaling."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import urllib3

from deploy.cli.arguments import add_endpoint_arguments, add_parameters, parameters_of, predictor_of
from deploy.cli.views import out, table
from deploy.client import Finish, Predictor, Raw, RequestFailed, Stream, Token
from deploy.client.errors import FROM_AWS, failure
from deploy.client.runtime import IMPATIENT
from proof.bench.client import Ask, Result, closed_loop, open_loop, percentiles, poisson_times, prompt
from proof.bench.report import (
    add_arguments,
    errors,
    first_token_times,
    gaps,
    print_result,
    progress_bar,
    response_times,
)

HEADROOM = 0.7
"""The recommended concurrency as a fraction of the knee, because load may grow during the minutes of a scale-out."""

_STILL_RISING = 1.15  # ratio between the throughputs of a level and the previous one


def summary(load: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Return the metrics of one level. Times are in milliseconds, and cover only successful requests."""
    good = [result for result in results if not result.error]
    seconds = max(result.end for result in results) - min(result.start for result in results)
    return {
        **load,
        "requests": len(results),
        "errors": errors(results),
        "requests_per_second": round(len(good) / seconds, 3),
        "tokens_per_second": round(sum(result.num_tokens for result in good) / seconds, 1),
        "ttft_ms": _milliseconds(first_token_times(good)),
        "itl_ms": _milliseconds(gaps(good)),
        "latency_ms": _milliseconds(response_times(good)),
        "mean_latency_ms": round(1000 * statistics.fmean(response_times(good)), 2) if good else None,
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    values = percentiles([1000 * value for value in seconds])
    return {name: None if value is None else round(value, 2) for name, value in values.items()}


@dataclass(frozen=True)
class Advice:
    """Advice on scaling.

    Attributes:
        knee: number of concurrent requests beyond which latency grows, or None if it is unknown.
        concurrency: recommended value of scaling.concurrency, or None if it is unknown.
        text: the advice as a sentence.
    """

    knee: float | None
    concurrency: float | None
    text: str


def advice(levels: Sequence[Mapping[str, Any]]) -> Advice:
    """Find the knee, which is the load beyond which latency grows.

    Below the knee, a response takes as long as without other requests. Beyond it, throughput is at its maximum, and
    only the waiting time grows. The knee is the maximum throughput multiplied by the latency without other requests,
    which is approximated by the latency at the lowest level.

    Args:
        levels: results of `summary` for closed loops, in ascending order of `clients`.
    """
    good = [level for level in levels if not level["errors"] and level["mean_latency_ms"]]
    if len(good) < 2:
        return Advice(None, None, "No advice on scaling.concurrency: at least two levels without errors are needed.")
    maximum = max(level["requests_per_second"] for level in good)
    knee = max(min(maximum * good[0]["mean_latency_ms"] / 1000, float(good[-1]["clients"])), 1.0)
    concurrency = round(max(HEADROOM * knee, 1.0), 1)
    text = f"Latency grows beyond about {knee:.1f} concurrent requests. Use scaling.concurrency: {concurrency:g}."
    last, before = (level["requests_per_second"] for level in reversed(good[-2:]))
    if last > _STILL_RISING * before:
        text += " Throughput still rose at the last level. Measure with more clients, as the endpoint may sustain more."
    return Advice(round(knee, 1), concurrency, text)


def rows(levels: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table: a header, and one row per level."""
    head = ["load", "requests", "errors", "req/s", "tok/s", "TTFT p50", "p90", "p99 ms", "ITL p50", "p99 ms",
            "latency p50", "p99 ms"]  # fmt: skip
    return [head, *map(_row, levels)]


def _row(level: Mapping[str, Any]) -> list[str]:
    times = [level["ttft_ms"][p] for p in ("p50", "p90", "p99")]
    times += [level[name][p] for name in ("itl_ms", "latency_ms") for p in ("p50", "p99")]
    cells = [f"{level['clients']} at once" if "clients" in level else f"{level['rate']:g}/s", str(level["requests"])]
    cells.append(", ".join(f"{count} {kind}" for kind, count in level["errors"].items()) or "0")
    cells += [f"{level['requests_per_second']:.2f}", f"{level['tokens_per_second']:.1f}"]
    return [*cells, *("-" if time is None else f"{time:.1f}" for time in times)]


# -- send measured requests through InvokeEndpointWithResponseStream or the OpenAI route -------------------------------


Send: TypeAlias = Callable[[int], Result]
"""A function that takes the index of a request, sends the request, and blocks until the response is complete."""


def in_threads(send: Send, pool: ThreadPoolExecutor) -> Ask:
    """Return an asynchronous version of `send`. It runs on threads of the pool, because boto3 and urllib3 block."""

    async def ask(number: int) -> Result:
        return await asyncio.get_running_loop().run_in_executor(pool, send, number)

    return ask


def by_invocations(predictor: Predictor, words: int, max_tokens: int, parameters: dict[str, Any]) -> Send:
    """Return a function that sends requests in LMI's schema through InvokeEndpointWithResponseStream."""

    def send(number: int) -> Result:
        fixed = {"max_new_tokens": max_tokens, "details": True}
        body = {"inputs": prompt(number, words), "parameters": {**fixed, **parameters}, "stream": True}
        return measure_stream(lambda: predictor.predict_stream(body))

    return send


def by_openai(predictor: Predictor, words: int, max_tokens: int, parameters: dict[str, Any], connections: int) -> Send:
    """Return a function that sends chat completions through the OpenAI route."""
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


def measure_stream(open_stream: Callable[[], Stream]) -> Result:
    """Open a stream, read it to the end, and record the arrival time of each chunk of text."""
    start = time.monotonic()
    arrivals: list[float] = []
    counted: int | None = None
    try:
        for event in open_stream():
            if isinstance(event, Token):
                arrivals.append(time.monotonic())
            counted = _token_count(event) or counted
    except RequestFailed as failed:
        error = " ".join([type(failed).__name__, *([str(failed.original_status)] if failed.original_status else [])])
    else:
        error = "" if arrivals else "no tokens"
    return Result(start, arrivals, time.monotonic(), error, counted)


def _token_count(event: Any) -> int | None:
    """Return the number of tokens that the event reports, or None if it does not report any."""
    match event:
        case Finish(details={"generated_tokens": int(number)} | {"completion_tokens": int(number)}):
            return number
        case Raw(data={"usage": {"completion_tokens": int(number)}}):
            return number
    return None


# -- measure an endpoint at rising load, one level after another -------------------------------------------------------


MAX_THREADS = 512
"""Maximum number of concurrent requests in an open loop."""


@dataclass(frozen=True)
class EndpointPlan:
    """The levels of a measurement.

    Attributes:
        clients: the number of clients for each level that is a closed loop. Ignored if there are rates.
        rates: the requests per second for each level that is an open loop.
        requests: number of requests in each level. None means 4 per client but at least 8, or 50 in an open loop.
    """

    clients: tuple[int, ...]
    rates: tuple[float, ...] = ()
    requests: int | None = None

    @property
    def connections(self) -> int:
        return MAX_THREADS if self.rates else max(self.clients)


def measure(plan: EndpointPlan, send: Send, warm_up: Send, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure an endpoint, and return one `summary` per level.

    Args:
        warm_up: a function that sends the first request, which is not measured. This wakes an endpoint that is scaled
            to zero.
        report: a function that is called with a line of text at the beginning of each level.

    Raises:
        RequestFailed: the first request failed.
    """
    first = warm_up(0)
    if first.error:
        raise RequestFailed(f"the warm-up request failed: {first.error}", "Try `lmi deploy stream`.")
    with ThreadPoolExecutor(plan.connections) as pool:
        ask = in_threads(send, pool)
        numbers = itertools.count(1)
        if plan.rates:
            return [_open_level(plan, rate, ask, numbers, report) for rate in plan.rates]
        return [_closed_level(plan, clients, ask, numbers, report) for clients in plan.clients]


def _closed_level(
    plan: EndpointPlan, clients: int, ask: Ask, numbers: Iterator[int], report: Callable[[str], None]
) -> dict[str, Any]:
    requests = plan.requests or max(8, 4 * clients)
    report(f"{requests} requests, {clients} concurrent ...")
    shared = iter(list(itertools.islice(numbers, requests)))  # each client sends the next request that is left
    return summary({"clients": clients}, asyncio.run(closed_loop(ask, [shared] * clients)))


def _open_level(
    plan: EndpointPlan, rate: float, ask: Ask, numbers: Iterator[int], report: Callable[[str], None]
) -> dict[str, Any]:
    requests = plan.requests or 50
    report(f"{requests} requests, {rate:g} per second ...")
    chosen = list(itertools.islice(numbers, requests))
    arrivals = zip(chosen, poisson_times(rate, seed=chosen[0]), strict=False)
    return summary({"rate": rate}, asyncio.run(open_loop(ask, arrivals, time.monotonic())))


# -- the command line of `lmi deploy bench` ----------------------------------------------------------------------------


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure an endpoint under load",
        description="Stream responses at rising load. The command prints time to first token, time between tokens, "
        "throughput and errors, with advice on scaling.concurrency. The last line is JSON. AWS bills you for the "
        "requests. `lmi bench --compare` compares results.",
    )
    add_endpoint_arguments(parser)
    add_parameters(parser)
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument(
        "--clients",
        type=_numbers(int),
        default=[1, 2, 4, 8, 16],
        metavar="N,N,...",
        help="numbers of concurrent requests; one measurement per N (default: 1,2,4,8,16)",
    )
    loads.add_argument(
        "--rate",
        type=_numbers(float),
        metavar="R,R,...",
        help="send R requests per second without waiting for responses; one measurement per R",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests in each measurement (default: 4 per client and at least 8, or 50 with --rate)",
    )
    parser.add_argument("--words", type=int, default=100, help="words per prompt (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per response (default: %(default)s)")
    parser.add_argument(
        "--route",
        choices=["invocations", "openai"],
        default="invocations",
        help="use InvokeEndpointWithResponseStream or chat completions (default: %(default)s)",
    )
    add_arguments(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    plan = EndpointPlan(tuple(arguments.clients), tuple(arguments.rate or ()), arguments.requests)
    with progress_bar(len(plan.rates or plan.clients)) as advance:

        def report(text: str) -> None:
            advance(text)
            print(text, file=sys.stderr)

        levels = measure(plan, *_senders(arguments, plan.connections), report)
    values = advice(levels) if not plan.rates else None
    _print_table(levels)
    if values is not None:
        print(values.text)
    document = {
        "endpoint": arguments.name,
        "route": arguments.route,
        "words": arguments.words,
        "max_tokens": arguments.max_tokens,
        "levels": levels,
        "knee": values and values.knee,
        "scaling_concurrency": values and values.concurrency,
    }
    return print_result(arguments.output, document) or int(all(level["requests_per_second"] == 0 for level in levels))


def _senders(arguments: argparse.Namespace, connections: int) -> tuple[Send, Send]:
    """Return the functions that send the measured requests, and the warm-up request."""
    body = (arguments.words, arguments.max_tokens, parameters_of(arguments))
    predictor = predictor_of(arguments)
    if arguments.route == "openai":
        send = by_openai(predictor, *body, connections)
        return send, send
    impatient = predictor_of(arguments, patience=IMPATIENT, connections=connections)
    return by_invocations(impatient, *body), by_invocations(predictor, *body)


def _print_table(levels: Sequence[Mapping[str, Any]]) -> None:
    head, *lines = rows(levels)
    levels_table = table(head, lines)
    for column in levels_table.columns[1:]:
        column.justify = "right"
    out().print(levels_table)


def _numbers(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> list[float]:
        try:
            values = [kind(item) for item in text.split(",")]
        except ValueError:
            values = []
        if not values or any(not 0 < item <= 10_000 for item in values):
            raise argparse.ArgumentTypeError("must be numbers above 0, separated by commas")
        return values

    return parse
