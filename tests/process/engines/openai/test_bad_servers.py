"""The engine openai in front of servers that break off, lie, are silent or slow: each request ends, and alone."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol
from unittest import mock

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Extras, Finish, Sampling
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.openai.engine import load
from handler.engines.openai.kinds import find_kind
from handler.engines.openai.url_engine import UrlEngine
from handler.engines.remote import servers
from handler.engines.remote.engine import RemoteEngine
from tests.app.server import AppServer, serve
from tests.doubles import tiny
from tests.one_test import in_one_test
from tests.process.engines.openai.server import (
    CHUNKED,
    DONE,
    GOOD,
    HANG,
    HEAD,
    Server,
    count,
    event,
    listening,
    status,
)
from tests.servers import options

PATIENCE = 30.0
SAMPLING = Sampling(max_new_tokens=8, logprobs=False, stop_token_ids=(9,))


class Listening(Protocol):
    """A double of a server."""

    url: str


@contextlib.contextmanager
def engine(
    *servers: Listening, timeout: float = PATIENCE, model: Path | None = None, **options: Any
) -> Iterator[UrlEngine]:
    given = {
        "base_url": tuple(server.url for server in servers),
        "base_url_kind": "vllm",
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": timeout,
        **options,
    }
    found = load(EngineConfig(Config(engine_options=given), model=model))
    assert isinstance(found, UrlEngine)
    try:
        with mock.patch("handler.engines.remote.engine._PAUSE", 0.01):
            yield found
    finally:
        found.close()


class Words(str):
    """What a client gets of an error; `log` is what it does not get."""

    log = ""
    retry_after: float | None = None


class Result(NamedTuple):
    """What came of a request."""

    ids: list[int]
    finish: Finish | None
    error: Words


def failed(*ids: int, error: str) -> Result:
    """What comes of a request that fails after these ids."""
    return Result(list(ids), Finish.ERROR, Words(error))


def run(found: RemoteEngine[Any], *keys: int) -> dict[int, Result]:
    """Step until each of the requests has ended."""
    ids: dict[int, list[int]] = {key: [] for key in keys}
    results: dict[int, Result] = {}
    deadline = time.monotonic() + PATIENCE
    while len(results) < len(keys):
        assert time.monotonic() < deadline, results
        step = found.step()
        for key, id in zip(step.keys, step.ids, strict=True):
            ids[key].append(id)
        for output in step.others:
            ids[output.key] += output.ids
            if output.finish is not None:
                results[output.key] = Result(ids[output.key], output.finish, _words(output))
    return results


def _words(output: Output) -> Words:
    words = Words(f"{'to the client: ' * output.refused}{output.error or ''}")
    words.log, words.retry_after = output.detail, output.retry_after
    return words


def one(found: RemoteEngine[Any], sampling: Sampling = SAMPLING, key: int = 1) -> Result:
    found.add(EngineRequest(key, [1, 2], sampling))
    return run(found, key)[key]


FIVE = event(5)
ENDING = event(6, finish="length")
WHOLE = {
    "half events": (HEAD, FIVE[:9], FIVE[9:-1], FIVE[-1:] + ENDING[:40], ENDING[40:] + DONE),
    "chunks": (CHUNKED, b"%x\r\n%b\r\n" % (len(FIVE), FIVE), b"%x\r\n%b\r\n0\r\n\r\n" % (len(ENDING), ENDING)),
    "carriage returns": (HEAD, (FIVE + ENDING).replace(b"\n", b"\r\n")),
    "a burst": (HEAD, event(5, 6, finish="length") + DONE),
    "events at once": (HEAD, FIVE + ENDING + DONE),
    "empty events": (HEAD, event(), b": alive\n\n", FIVE, event(), event(6), event(finish="length") + DONE),
    "a count": (HEAD, FIVE + ENDING + b'data: {"choices": [], "usage": {}}\n\n' + DONE),
    "a count before the end": (HEAD, FIVE + count(None), ENDING + DONE),
    "no text": (HEAD, event(5, text=""), event(6, text="", finish="length")),
    "a role": (HEAD, b"event: message\nid: 1\n" + FIVE, ENDING),
}


@in_one_test("script", WHOLE.values(), ids=WHOLE)
def test_events_come_in_any_pieces(script: tuple[bytes, ...]) -> None:
    with listening(script) as server, engine(server) as found:
        assert one(found) == ([5, 6], Finish.LENGTH, "")
        assert len(server.received) == 1


ENDS = {
    "the end token": (event(3, finish="stop"), [5, 3], Finish.EOS),
    "the end token, left out": (event(finish="stop"), [5], Finish.EOS),
    "a stop token": (event(9, finish="stop", stop_reason=9), [5, 9], Finish.STOP),
    "a stop token without a reason": (event(9, finish="stop"), [5, 9], Finish.STOP),
    "a stop token, left out": (event(finish="stop", stop_reason=9), [5], Finish.STOP),
}


@in_one_test(("last", "ids", "finish"), ENDS.values(), ids=ENDS)
def test_the_last_id_says_how_an_answer_ended(last: bytes, ids: list[int], finish: Finish) -> None:
    with listening((HEAD, FIVE, last, DONE)) as server, engine(server) as found:
        assert one(found) == (ids, finish, "")


def finish_of(found: UrlEngine, *, goes_on: bool = False) -> Output:
    """Return what ends an answer, after 5."""
    found.add(EngineRequest(1, [1, 2], SAMPLING, goes_on=goes_on))
    ids: list[int] = []
    while True:
        step = found.step()
        ids += step.ids
        for output in step.others:
            ids += output.ids
            if output.finish is not None:
                assert ids == [5, 6]
                return output


LATER = b'data: {"choices": [], "usage": '
COUNTS: dict[str, tuple[tuple[bytes, ...], int | None]] = {
    "behind the end": ((FIVE, ENDING, count(1), DONE), 1),
    "with the end": ((FIVE + ENDING + count(1) + DONE,), 1),
    "in pieces": ((FIVE, ENDING[:9], ENDING[9:] + count(1)[:9], count(1)[9:-1], b"\n"), 1),
    "more than the prompt": ((FIVE, ENDING, count(3), DONE), 2),
    "none": ((FIVE, ENDING, count(0), DONE), None),
    "no details": ((FIVE, ENDING, count(None), DONE), None),
    "null": ((FIVE, ENDING, count(None, prompt_tokens_details=None), DONE), None),
    "a text": ((FIVE, ENDING, count("1"), DONE), None),
    "less than none": ((FIVE, ENDING, count(-1), DONE), None),
    "a list": ((FIVE, ENDING, LATER + b"[]}\n\n", DONE), None),
    "no event": ((FIVE, ENDING, DONE), None),
    "another event first": ((FIVE, ENDING, b"event: error\ndata: x\n\n", count(1)), None),
    "a connection that ends": ((FIVE, ENDING), None),
}


@in_one_test(("script", "cached"), COUNTS.values(), ids=COUNTS)
def test_the_end_has_how_much_of_the_prompt_was_cached(script: tuple[bytes, ...], cached: int | None) -> None:
    with listening((HEAD, *script)) as server, engine(server) as found:
        output = finish_of(found)
        assert (output.ids[-1:], output.finish, output.error) == ([6], Finish.LENGTH, None)
        assert output.extras == (None if cached is None else Extras(num_cached_tokens=cached))
        assert server.received[0].body["stream_options"] == {"include_usage": True}
        assert one(found, key=2) == ([5, 6, 7], Finish.LENGTH, "")


def test_an_end_waits_no_longer_for_a_count_than_a_connection_for_its_end() -> None:
    broken = CHUNKED + b"%x\r\n%b\r\n" % (len(FIVE + ENDING), FIVE + ENDING), b"50\r\ndata: "
    with listening((HEAD, FIVE, ENDING, HANG), broken) as server, engine(server, timeout=0.5) as found:
        for _ in range(2):
            output = finish_of(found)
            assert (output.ids[-1:], output.finish, output.extras) == ([6], Finish.LENGTH, None)
        assert len(server.received) == 2


def test_what_was_computed_for_a_thought_is_not_said_to_have_been_cached() -> None:
    with listening((HEAD, FIVE, ENDING, count(2), DONE)) as server, engine(server) as found:
        assert finish_of(found, goes_on=True).extras is None


NO = {"error": {"message": "no such thing", "type": "x", "code": 400}}
DOWN = {"object": "error", "message": "down", "code": 503}
UNDER_200 = b'data: {"error": {"message": "no such thing", "code": 400}}\n\n' + DONE
LOST = b'data: {"error": {"message": "worker lost"}}\n\n' + DONE
OF_THE_REQUEST = {
    "400": status(400, NO),
    "400, flat": status(400, {"message": "no such thing", "code": 400}),
    "413": status(413, NO),
    "422": status(422, {"detail": "no such thing"}),
    "an error event": HEAD + UNDER_200,
    "an error's JSON under 200": status(200, NO),
}
LOCATION = "Location: http://elsewhere/\r\n"
OF_THE_OPERATOR = {
    "401": (status(401, "who?"), "answered 401", "who?; set its key in the variable OPENAI_API_KEY"),
    "403": (status(403, NO), "answered 403", "OPENAI_API_KEY"),
    "404": (status(404, NO), "answered 404", "option.base_url_model"),
    "405": (status(405, NO), "answered 405", "check that the address ends with /v1"),
    "a redirect": (status(307, "", LOCATION), "answered 307", "redirects to 'http://elsewhere/'"),
    "text without ids": (HEAD + event(text="Hi", finish="stop"), "sent text without token ids", "base_url_kind"),
    "a status of an event": (HEAD + UNDER_200.replace(b"400", b"404"), "answered 404", "no such thing"),
}


@in_one_test("answer", OF_THE_REQUEST.values(), ids=OF_THE_REQUEST)
def test_a_request_that_the_server_refuses_ends_with_its_words_alone(answer: bytes) -> None:
    code = next(code for code in (413, 422, 400) if f" {code} ".encode() in answer or code == 400)
    with listening((answer,)) as server, engine(server) as found:
        result = one(found)
        assert result == failed(error="to the client: no such thing")
        assert result.error.log == f"{server.url} refused the request with {code}"
        assert len(server.received) == 1, "it is not tried again"
        assert one(found, key=2) == ([5, 6, 7], Finish.LENGTH, "")


def test_after_the_first_token_a_refusal_is_a_failure() -> None:
    with listening((HEAD, FIVE, UNDER_200)) as server, engine(server) as found:
        result = one(found)
        log = f"{server.url} refused the request with 400: no such thing"
        assert result == failed(5, error="the vllm server refused the request with 400")
        assert result.error.log == log


@in_one_test(("answer", "plain", "words"), OF_THE_OPERATOR.values(), ids=OF_THE_OPERATOR)
def test_operator_errors_are_logged_and_another_server_answers(answer: bytes, plain: str, words: str) -> None:
    with listening(*[(answer,)] * 3) as server, engine(server) as found:
        result = one(found)
        assert result == failed(error=f"the vllm server {plain}")
        assert result.error.log.startswith(f"{server.url} {plain}")
        assert words in result.error.log
        assert one(found, key=2) == ([5, 6, 7], Finish.LENGTH, "")
    with listening((answer,)) as wrong, listening() as right, engine(wrong, right) as found:
        for key in range(1, 5):
            assert one(found, key=key) == ([5, 6, 7], Finish.LENGTH, "")
        assert (len(wrong.received), len(right.received)) == (1, 4)


NO_END = "ended its response without a finish_reason"
UNREADABLE = "sent an event that cannot be read"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\nHi!"
FAILED = {
    "500": (status(500, {"error": {"message": "down"}}), "answered 500", "500: down"),
    "502": (status(502, DOWN), "answered 502", "502: down"),
    "599 of an event": (HEAD + b'data: {"error": {"message": "down", "code": 599}}\n\n', "answered 599", "599: down"),
    "no status": (HEAD + b'data: {"error": {"message": "down", "code": 600}}\n\n', "answered 500", "500: down"),
    "500 at a time": (status(500, DOWN, "Retry-After: 9\r\nConnection: close\r\n"), "answered 500", "500: down"),
    "an error event": (HEAD + LOST, "answered 500", "worker lost"),
    "Dynamo's error event": (HEAD + b"event: error\n: worker lost\n\n", "answered 500", "worker lost"),
    "an error event after a ping": (HEAD + b": ping\n\nevent: error\n: worker lost\n\n", "answered 500", "worker lost"),
    "a page": (PAGE, "answered 200 without events", "text/html: Hi!"),
    "compressed": (HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\nx", "sent a compressed response", "gzip"),
    "nothing": (b"", "closed the connection", ""),
    "no HTTP": (b"SSH-2.0\r\n\r\n", "closed the connection", ""),
    "headers without end": (HEAD[:-2] + b"X: y\r\n" * 2000, "closed the connection", ""),
    "a header without end": (HEAD[:-2] + b"X: " + b"y" * 100_000, "closed the connection", ""),
    "an end": (HEAD, NO_END, ""),
    "an early end": (HEAD + DONE, NO_END, ""),
    "half a chunk": (CHUNKED + b"50\r\ndata: ", "closed the connection", ""),
    "a chunk of a wrong size": (CHUNKED + b"zz\r\ndata: ", "closed the connection", ""),
    "no JSON": (HEAD + b"data: {\n\n", UNREADABLE, ""),
    "no choices": (HEAD + b'data: {"id": 1}\n\n', UNREADABLE, ""),
    "nested": (HEAD + b"data: " + b"[" * 100_000 + b"\n\n", UNREADABLE, ""),
    "a list": (HEAD + b"data: [1]\n\n", UNREADABLE, ""),
    "wrong ids": (HEAD + event().replace(b"[]", b'["a"]', 1), UNREADABLE, ""),
    "negative ids": (HEAD + event().replace(b"[]", b"[-1]", 1), UNREADABLE, ""),
    "no number": (HEAD + event().replace(b"[]", b"[NaN]", 1), UNREADABLE, ""),
    "another reason": (HEAD + event(finish="abort"), "ended the request for an unknown reason", "abort"),
}  # fmt: skip


@in_one_test(("answer", "plain", "words"), FAILED.values(), ids=FAILED)
def test_a_failure_is_tried_again_before_the_first_token(answer: bytes, plain: str, words: str) -> None:
    with listening((answer,), GOOD, *[(answer,)] * 3) as server, engine(server) as found:
        assert one(found) == ([5, 6, 7], Finish.LENGTH, "")
        result = one(found, key=2)
        assert result == failed(error=f"the vllm server {plain}")
        assert result.error.retry_after is None
        assert words in result.error.log
        assert len(server.received) == 5


BUSY_WORDS = b'data: {"error": {"message": "down", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}\n\n'
OVERLOADED = b'data: {"type": "error", "error": {"type": "overloaded_error", "message": "down"}}\n\n'
BUSY = {
    "503": (status(503, DOWN), 503),
    "429": (status(429, DOWN), 429),
    "529": (status(529, DOWN), 529),
    "an error event": (HEAD + b'data: {"error": {"message": "down", "code": 503}}\n\n', 503),
    "OpenAI's words": (HEAD + BUSY_WORDS, 429),
    "Anthropic's words": (HEAD + OVERLOADED, 429),
    "an error's JSON under 200": (status(200, DOWN), 503),
}


@in_one_test(("answer", "code"), BUSY.values(), ids=BUSY)
def test_a_busy_server_is_tried_again_and_then_the_client_may_come_again(answer: bytes, code: int) -> None:
    with listening((answer,), GOOD, *[(answer,)] * 3) as server, engine(server) as found:
        assert one(found) == ([5, 6, 7], Finish.LENGTH, "")
        result = one(found, key=2)
        assert result == failed(error=f"the vllm server is busy: it answered {code}")
        assert result.error.retry_after == 0, "it does not say when"
        assert result.error.log == f"{server.url} answered {code}: down"
        assert len(server.received) == 5


@pytest.mark.parametrize(("answer", "code"), [one for one in BUSY.values() if one[0].startswith(HEAD)])
def test_after_the_first_token_a_busy_server_is_a_failure(answer: bytes, code: int) -> None:
    with listening((HEAD + FIVE + answer.removeprefix(HEAD),)) as server, engine(server) as found:
        result = one(found)
        assert result == failed(5, error=f"the vllm server answered {code}")
        assert result.error.retry_after is None


BROKEN = {
    name: script
    for name, script in FAILED.items()
    if script[0].startswith((HEAD, CHUNKED)) and name != "a chunk of a wrong size"  # of which aiohttp says nothing
}
"""The answers that can have begun."""


@in_one_test("at_once", [False, True])
@in_one_test(("answer", "plain", "words"), BROKEN.values(), ids=BROKEN)
def test_after_the_first_token_a_failure_ends_the_request_and_no_other(
    answer: bytes, plain: str, words: str, at_once: bool
) -> None:
    begun = CHUNKED + b"%x\r\n%b\r\n" % (len(FIVE), FIVE) if answer.startswith(CHUNKED) else HEAD + FIVE
    rest = answer.removeprefix(CHUNKED).removeprefix(HEAD)
    script = (begun + rest,) if at_once else (begun, rest)
    with listening(script) as server, engine(server) as found:
        for key in (1, 2):
            found.add(EngineRequest(key, [1], SAMPLING))
        broken, whole = sorted(run(found, 1, 2).values(), key=lambda result: len(result.ids))
        assert (broken.ids, broken.finish) == ([5], Finish.ERROR)
        assert broken.error == f"the vllm server {plain}"
        assert words in broken.error.log
        assert whole == ([5, 6, 7], Finish.LENGTH, "")
        assert len(server.received) == 2


@pytest.mark.parametrize("script", [(HANG,), (HEAD[:20], HANG), (HEAD, HANG), (HEAD, FIVE, HANG)])
def test_silence_ends_a_request_and_its_connection(script: tuple[bytes, ...]) -> None:
    with listening(script) as server, engine(server, timeout=0.3) as found:
        result = one(found)
        assert result.finish is Finish.ERROR
        assert "sent no token for 0.3 s (option.base_url_timeout)" in result.error
        assert server.left.acquire(timeout=PATIENCE)


def test_a_standstill_of_this_machine_is_no_silence_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ahead = time.monotonic, [0.0]
    monkeypatch.setattr("handler.engines.base.time", SimpleNamespace(monotonic=lambda: clock() + ahead[0]))
    with listening((HEAD, FIVE, HANG)) as server, engine(server, timeout=3.0) as found:
        found.add(EngineRequest(1, [1], SAMPLING))
        while not found.step().keys:
            pass
        ahead[0] = 100.0
        looked_until = clock() + 1.5  # the engine looks every 0.75 s
        while clock() < looked_until:
            assert found.step().others == []
        while not (others := found.step().others):
            pass
        assert others[0].error == "the vllm server sent no token for 3 s (option.base_url_timeout)"


def test_more_tokens_than_were_asked_for_end_a_request() -> None:
    with listening((HEAD, *[FIVE] * 7, event(5, 5), ENDING)) as server, engine(server) as found:
        result = one(found)
        assert (result.ids, result.finish) == ([5] * 7, Finish.ERROR)
        assert "sent more tokens than max_tokens=8" in result.error


def test_a_connection_that_was_closed_while_nothing_ran_is_no_failure() -> None:
    script = (CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(ENDING), ENDING))
    with listening(script, script) as first, listening() as second, engine(first, second) as found:
        for key in (1, 2):
            assert one(found, key=key) == ([6], Finish.LENGTH, "")
            assert first.ended.acquire(timeout=PATIENCE)
        assert (len(first.received), len(second.received)) == (2, 0)


def test_what_a_server_keeps_open_after_the_end_delays_nobody() -> None:
    with listening((HEAD, FIVE, ENDING, HANG)) as server, engine(server, timeout=0.5) as found:
        assert one(found) == ([5, 6], Finish.LENGTH, "")
        while not server.left.acquire(blocking=False):
            assert found.step().others == []


def test_who_leaves_is_left_there_too() -> None:
    with listening((HEAD, FIVE, HANG), (HANG,)) as server, engine(server) as found:
        found.add(EngineRequest(1, [1], SAMPLING))
        found.add(EngineRequest(2, [1], SAMPLING))
        num_tokens = 0
        while not num_tokens or len(server.received) < 2:  # requests are sent within steps
            num_tokens += len(found.step().keys)
        for key in (1, 2, 3):
            found.cancel(key)
        for _ in range(2):
            assert server.left.acquire(timeout=PATIENCE)  # nothing steps the engine any more
        assert one(found, key=4) == ([5, 6, 7], Finish.LENGTH, "")


@pytest.mark.parametrize(("pause", "count", "received"), [(3600.0, 3, (1, 3)), (0.0, 1, (1, 1))])
def test_a_server_that_fails_is_left_out_for_a_pause(
    monkeypatch: pytest.MonkeyPatch, pause: float, count: int, received: tuple[int, int]
) -> None:
    monkeypatch.setattr(servers, "_PAUSE", pause)
    down = (status(503, DOWN),)
    with listening(down, down) as first, listening() as second, engine(first, second) as found:
        for key in range(count):
            assert one(found, key=key) == ([5, 6, 7], Finish.LENGTH, "")
        assert (len(first.received), len(second.received)) == received


def test_requests_go_where_the_fewest_tokens_are() -> None:
    with listening() as first, listening() as second, engine(first, second) as found:
        for key, tokens in enumerate((40, 10, 10, 10)):
            found.add(EngineRequest(key, [1], SAMPLING._replace(max_new_tokens=tokens)))
        run(found, *range(4))
        assert (len(first.received), len(second.received)) == (1, 3)


def test_a_body_says_every_neutral_value() -> None:
    with listening() as server, engine(server) as found:
        one(found, Sampling(max_new_tokens=3, temperature=0.5, top_k=4, seed=2**64 - 1))
        one(found, Sampling(do_sample=True, top_p=0, seed=2**64 - 1, logprobs=False, stop_token_ids=(9,)), 2)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "n": 1}
    greedy, sampled = (received.body for received in server.received)
    assert greedy.items() >= {**neutral, "temperature": 0.0, "top_k": -1, "top_p": 1.0, "max_tokens": 3}.items()
    assert "seed" not in greedy
    assert (greedy["logprobs"], greedy["prompt"], greedy["model"]) == (0, [1, 2], "served")
    assert sampled.items() >= {**neutral, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "seed": -1}.items()
    assert (sampled["stop_token_ids"], "logprobs" in sampled) == ([9], False)


def test_a_bias_that_the_server_would_cut_is_refused() -> None:
    with listening() as server, engine(server) as found, pytest.raises(ValueError, match="logit_bias"):
        found.add(EngineRequest(1, [1], SAMPLING._replace(logit_bias=((3, 101.0),))))


def test_alternatives_have_the_ids_that_their_names_say() -> None:
    tops = {"token_id:5": -3.0, "token_id:7": -0.5, "token_id:8": -1.0}
    scores = {"tokens": ["token_id:5"], "token_logprobs": [-3.0], "top_logprobs": [tops]}
    with listening((HEAD, event(5, finish="length", logprobs=scores))) as server, engine(server) as found:
        found.add(EngineRequest(1, [1], SAMPLING._replace(top_logprobs=2)))
        while not (step := found.step()).others:
            pass
        assert step.others[0].tops == [[(7, -0.5), (8, -1.0)]]
        assert step.others[0].logprobs == [-3.0]
        assert server.received[0].body.items() >= {"logprobs": 2, "return_tokens_as_token_ids": True}.items()


OWNERS = {"vllm": "vllm", "vllm-frontend-rs": "vllm", "nvidia": "dynamo", "lmi-handler": "lmi"}


@pytest.mark.parametrize(("owner", "kind"), OWNERS.items())
def test_a_server_says_what_it_is(owner: str, kind: str) -> None:
    with listening(owner=owner) as server:
        assert find_kind((server.url,)) == kind
        with engine(server, base_url_kind="auto") as found:
            assert (found.info.version, found.info.max_total_tokens) == (kind, 64)


def test_a_server_that_does_not_say_what_it_is_needs_the_option() -> None:
    with listening(owner="me") as server:
        with pytest.raises(ConfigError, match=r"base_url_kind=auto.* owned by me"):
            find_kind((server.url,))
        with pytest.raises(ConfigError, match=r"answered 404: .* ends with /v1") as refused:
            find_kind((server.url.removesuffix("/v1"),))
        assert str(refused.value).count("/v1") == 1
    with pytest.raises(
        ConfigError, match=r"base_url_kind=auto: no server has reported its kind.*: http.*/v1: cannot be reached"
    ):
        find_kind((server.url,))
    with pytest.raises(ConfigError, match="it must end with /v1"):
        find_kind((server.url.removesuffix("/v1"),))


def test_the_key_is_sent_over_https(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import trustme  # vLLM's environment, which collects this file too, lacks it

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with listening(tls=tls) as server:
        with pytest.raises(ConfigError, match="certificate"):  # nobody knows the authority
            find_kind((server.url,))
        with pytest.raises(ConfigError, match="certificate"), engine(server):
            pass
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert find_kind((server.url,)) == "vllm"
        with engine(server) as found:
            assert one(found) == ([5, 6, 7], Finish.LENGTH, "")
        assert server.received[0].headers["authorization"] == "Bearer secret"


def test_without_https_no_authorities_are_read() -> None:
    """Reading them takes 20 ms and more."""
    with listening() as server, mock.patch.object(ssl, "create_default_context", side_effect=AssertionError):
        assert find_kind((server.url,)) == "vllm"
        with engine(server) as found:
            assert one(found) == ([5, 6, 7], Finish.LENGTH, "")


# -- a server that refuses a request: its words reach the client as its dialect has wrong requests ---------------------


MESSAGE = "the engine refused the request: no such thing"
REFUSAL_NO = status(400, {"error": {"message": "no such thing", "code": 400}})
CHAT = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
NOTHING = {"finish_reason": "error", "generated_tokens": None, "inputs": None}
LMI = {"generated_text": "", "details": {**NOTHING, "tokens": None}, "error": MESSAGE, "code": 424}
LINE = {"token": {"id": -1, "text": "", "log_prob": -1, "special_token": True}, **LMI, "details": NOTHING}
OPENAI = {"error": {"message": MESSAGE, "type": "invalid_request_error", "param": None, "code": None}}
ANTHROPIC = {"type": "error", "error": {"type": "invalid_request_error", "message": MESSAGE}}
TGI = {"error": f"Input validation error: {MESSAGE}", "error_type": "validation"}
TRITON = {"error": MESSAGE}
INPUTS = {"inputs": "hi"}

REFUSALS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "lmi": ("/invocations", INPUTS, 424, LMI),
    "lmi, a stream": ("/invocations", {**INPUTS, "stream": True}, 424, LINE),
    "lmi's chat": ("/invocations", CHAT, 424, LMI),
    "chat": ("/v1/chat/completions", CHAT, 400, OPENAI),
    "chat, a stream": ("/v1/chat/completions", {**CHAT, "stream": True}, 400, OPENAI),
    "completions": ("/v1/completions", {"prompt": "hi"}, 400, OPENAI),
    "responses": ("/v1/responses", {"input": "hi"}, 400, OPENAI),
    "responses, a stream": ("/v1/responses", {"input": "hi", "stream": True}, 400, OPENAI),
    "messages": ("/v1/messages", CHAT, 400, ANTHROPIC),
    "messages, a stream": ("/v1/messages", {**CHAT, "stream": True}, 400, ANTHROPIC),
    "tgi": ("/generate", INPUTS, 422, TGI),
    "tgi, a stream": ("/generate_stream", INPUTS, 200, TGI),
    "mindie": ("/", INPUTS, 422, {"error": TGI["error"]}),
    "triton": ("/v2/models/model/generate", {"text_input": "hi", "max_tokens": 4}, 400, TRITON),
    "triton, a stream": ("/v2/models/model/generate_stream", {"text_input": "hi", "max_tokens": 4}, 400, TRITON),
}


@pytest.fixture(scope="module")
def behind() -> Iterator[Server]:
    with listening() as server:
        yield server


@pytest.fixture(scope="module")
def front(behind: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    model = tiny.make(tmp_path_factory.mktemp("tiny"))
    given = options(f"option.base_url={behind.url}", "option.base_url_kind=vllm", "option.root_schema=mindie")
    with serve(str(model), "--engine", "openai", *given) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("name", REFUSALS)
def test_each_dialect_says_that_the_request_is_wrong(behind: Server, front: AppServer, name: str) -> None:
    path, body, code, expected = REFUSALS[name]
    behind.scripts[:] = [(REFUSAL_NO,)]
    before = front.metric('lmi_requests_total{outcome="refused"}')
    answer = front.post(body, path)
    found = answer.text.removeprefix("data:").strip() if code == 200 else answer.text
    assert (answer.status_code, json.loads(found)) == (code, expected)
    assert front.metric('lmi_requests_total{outcome="refused"}') == before + 1


CACHED = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "stream_options": {"include_usage": True}}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    "messages": ("/v1/messages", CHAT),
}


@in_one_test("stream", [False, True])
@in_one_test("name", CACHED)
def test_each_dialect_says_how_much_of_the_prompt_the_server_had_cached(
    behind: Server, front: AppServer, name: str, stream: bool
) -> None:
    path, body = CACHED[name]
    asked = {field: value for field, value in body.items() if stream or field != "stream_options"}
    for script, cached in ((count(1), 1), (count(None), 0)):
        behind.scripts[:] = [(HEAD, FIVE, ENDING, script, DONE)]
        answer = front.post({**asked, "stream": stream}, path)
        *_, last = (json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if '"usage":{' in line)
        counts = last.get("response", last)["usage"]
        match name:
            case "chat" | "completions":
                assert counts.get("prompt_tokens_details") == ({"cached_tokens": cached} if cached else None)
            case "responses":
                assert counts["input_tokens_details"]["cached_tokens"] == cached
            case _:
                assert counts["cache_read_input_tokens"] == cached
                assert counts["output_tokens"] == 2


def test_a_key_that_is_missing_there_is_no_fault_of_the_client(behind: Server, front: AppServer) -> None:
    behind.scripts[:] = [(status(401, "who?"),)] * 3
    answer = front.post(CHAT, "/v1/chat/completions")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "request failed in the engine: the vllm server answered 401"
    assert f"{behind.url} answered 401: who?; set its key in the variable OPENAI_API_KEY" in front.log


def test_in_a_stream_that_has_begun_it_is_the_last_event(behind: Server, front: AppServer) -> None:
    behind.scripts[:] = [(HEAD, event(5), b'data: {"error": {"message": "no such thing", "code": 400}}\n\n')]
    answer = front.post({**CHAT, "stream": True}, "/v1/chat/completions")
    assert answer.status_code == 200
    assert "the vllm server refused the request with 400" in answer.text
    assert "refused the request with 400: no such thing" in front.log
