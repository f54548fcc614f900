"""The engine openai in front of several servers: one that is ill or another's draws no requests, and tells nobody."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import pytest

from handler.core.errors import ConfigError
from handler.core.values import Finish
from handler.engines.base import EngineRequest
from handler.engines.openai import client
from handler.engines.openai.kinds import find_kind
from handler.engines.openai.url_engine import UrlEngine
from handler.engines.remote import engine as remote_engine
from handler.engines.remote import servers
from tests.one_test import in_one_test
from tests.process.engines.openai.server import CHUNKED, GOOD, HANG, HEAD, event, listening, status
from tests.process.engines.openai.test_bad_servers import PATIENCE, SAMPLING, engine, failed, one, run
from tests.servers import wait_for

WHOLE = ([5, 6, 7], Finish.LENGTH, "")
KEY = "sk-proj-0123456789abcdef"
SAYS_ALL = f"<b>{KEY}</b> of http://10.1.2.3:8000/v1 at /opt/ml/model/serve.py: ValueError: temperature is too hot"


def models(name: Any = "served", owner: str = "vllm", most: Any = 64) -> dict[str, Any]:
    return {"data": [{"id": name, "owned_by": owner, "max_model_len": most}]}


def settle(found: UrlEngine) -> None:
    """Step until all streams have ended."""
    deadline = time.monotonic() + PATIENCE
    while any(server.outstanding for server in found._servers):
        assert time.monotonic() < deadline
        found.step()


def burst(found: UrlEngine, count: int, at_once: int = 16) -> int:
    """Send requests, some at a time; return how many came back whole."""
    whole = 0
    for first in range(1, count, at_once):
        keys = range(first, first + at_once)
        for key in keys:
            found.add(EngineRequest(key, [1, 2], SAMPLING))
        whole += sum(result == WHOLE for result in run(found, *keys).values())
    return whole


@pytest.mark.parametrize("code", [301, 307, 401, 403, 404, 405, 418, 429, 500, 503])
def test_a_server_that_refuses_at_once_draws_no_traffic(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr("tests.process.engines.openai.server.PAUSE", 0.002)
    with listening() as ill, listening() as well, engine(ill, well) as found:
        ill.always = (status(code, "no"),)
        assert burst(found, 192) == 192
        assert len(well.received) == 192
        assert len(ill.received) <= 16, "those of the first burst"


def test_a_server_that_answers_again_is_asked_and_gets_one_request_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_PAUSE", 0.3)
    with listening((status(401, "no"),)) as ill, listening() as well, engine(ill, well) as found:
        assert one(found) == WHOLE
        assert (len(ill.received), ill.num_asked) == (1, 1)
        time.sleep(0.35)
        assert one(found, key=2) == WHOLE, "this one has it asked"
        wait_for(lambda: ill.num_asked == 2, 10, "it is not asked")
        for key in range(3, 9):
            found.add(EngineRequest(key, [1, 2], SAMPLING))
        assert list(run(found, *range(3, 9)).values()) == [WHOLE] * 6
        assert 1 < len(ill.received) <= 4


@pytest.mark.parametrize(
    "answer",
    [
        models("another"),
        models(most=32),
        models(owner="lmi-handler"),
        status(401, "no"),
        status(200, "<html>"),
        status(200, "[" * 100_000),
        status(200, {"data": {"a": 1}}),
        status(200, models(most="64")),
        status(200, models(most=-1)),
        status(200, models(name=["served"])),
        b"",
    ],
)
def test_a_server_that_comes_back_as_another_stays_out(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(servers, "_PAUSE", 0.05)
    with listening() as ill, listening() as well, engine(ill, well, base_url_kind="auto") as found:
        ill.models, ill.scripts = answer, [(status(500, "going down"),)]
        for key in range(1, 6):
            assert one(found, key=key) == WHOLE
            time.sleep(0.1)
        assert len(ill.received) == 1
        assert ill.num_asked > 1


def test_a_request_that_another_model_refuses_goes_to_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_ASK_AGAIN", 0.0)
    refusal = (status(400, {"error": {"message": "maximum context length is 32"}}),)
    with listening(refusal) as ill, listening() as well, engine(ill, well) as found:
        ill.models = models(most=32)
        assert one(found) == WHOLE
        assert (len(ill.received), len(well.received)) == (1, 1)


def test_at_the_start_all_are_asked_and_the_least_context_counts(capfd: pytest.CaptureFixture[str]) -> None:
    with listening() as first, listening() as second, listening() as other, listening() as locked:
        second.models, other.models, locked.models = models(most=48), models("another"), status(401, "no")
        with engine(first, second, other, locked) as found:
            assert found.info.max_total_tokens == 48
            for key in range(1, 9):
                assert one(found, key=key) == WHOLE
            assert (len(other.received), len(locked.received)) == (0, 0)
    said = capfd.readouterr().err
    assert (
        f"{other.url} serves another model: 'another' instead of 'served'; other servers are preferred for 1 s" in said
    )
    assert f"{locked.url} answered 401: " in said


def test_none_that_will_ever_serve_is_refused_by_name() -> None:
    with listening() as first, listening() as second:
        first.models, second.models = status(401, "no"), status(301, "")
        with pytest.raises(ConfigError) as refused, engine(first, second):
            pass
    for server, words in ((first, "answered 401"), (second, "redirects")):
        assert f"option.base_url={server.url}: answered" in str(refused.value)
        assert words in str(refused.value)


def test_servers_of_several_kinds_are_refused_by_name() -> None:
    with listening(owner="vllm") as first, listening(owner="lmi-handler") as second:
        with pytest.raises(ConfigError, match=r"of different kinds: .*: vllm; .*: lmi"):
            find_kind((first.url, second.url))
        second.models = status(503, "no")
        assert find_kind((first.url, second.url + "/")) == "vllm"


def test_a_slow_answer_of_models_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MODELS_TIMEOUT", 0.5)
    with listening() as server:
        server.models = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"  # and then nothing
        with pytest.raises(ConfigError, match="base_url_kind=auto: no server has reported its kind"):
            find_kind((server.url,))


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422, 429, 500, 503])
@pytest.mark.parametrize("page", [False, True])
def test_clients_get_no_key_address_path_html_or_exception(
    monkeypatch: pytest.MonkeyPatch, code: int, page: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "UpstreamsOwnKey")
    words = f"<!DOCTYPE html><html><body><h1>{SAYS_ALL}</h1>UpstreamsOwnKey</body></html>"
    body = words if page else {"error": {"message": f"{SAYS_ALL}; UpstreamsOwnKey {'long ' * 5000}"}}
    with listening(*[(status(code, body),)] * 3) as server, engine(server) as found:
        result = one(found)
    said, log = result.error, result.error.log
    for secret in ("sk-proj", "OwnKey", "http", "10.1.2.3", "localhost", "/opt", "<", "Error"):
        assert secret not in said, said
    assert len(said) < 400
    assert str(code) in log
    assert "OwnKey" not in log
    assert KEY not in log
    assert len(log) <= 1000
    useful = "temperature is too hot" in said
    assert useful == (code in (400, 413, 422) and not page)
    if code >= 423 or code in (401, 404):
        assert said == f"the vllm server {'is busy: it ' * (code in (429, 503))}answered {code}"
        assert "temperature is too hot" in log


def test_retry_after_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (status(429, "later", "Retry-After: 20\r\nConnection: close\r\n"),)
    with listening(busy) as first, listening() as second, engine(first, second) as found:
        assert one(found) == WHOLE
        now = found._loop.time()
        assert found._servers[0].is_out(now + 19)
        assert not found._servers[0].is_out(now + 21)


def busy(value: str, code: int = 503, more: str = "") -> tuple[bytes, ...]:
    """An answer with a Retry-After."""
    return (status(code, "later", f"Retry-After: {value}\r\n{more}Connection: close\r\n"),)


DATE = "Date: Sun, 06 Nov 1994 08:49:27 GMT\r\n"
WAITS = {
    "7": 7.0,
    " 7 ": 7.0,
    "60": 60.0,
    "86400": 60.0,
    "9" * 400: 60.0,
    "Sun, 06 Nov 1994 08:49:37 GMT": 10.0,
    "Sunday, 06-Nov-94 08:49:37 GMT": 10.0,
    "Sun Nov  6 08:49:37 1994": 10.0,
    "Sun, 06 Nov 1994 08:49:17 GMT": 0.0,
    "Sun, 06 Nov 9994 08:49:37 GMT": 60.0,
    "Sun, 99 Nov 1994 99:49:37 GMT": 0.0,
    "Sun, 06 Nov 99999999999 08:49:37 +9999": 0.0,
    "-7": 0.0,
    "7.5": 0.0,
    "0": 0.0,
    "": 0.0,
    "\u0663".encode().decode("latin-1"): 0.0,
    "soon": 0.0,
}


@in_one_test("value", WAITS)
def test_a_client_is_told_to_wait_as_long_as_the_server_says(value: str) -> None:
    again = [busy(value, more=DATE)] * 3
    with listening(*again) as server, engine(server) as found:
        result = one(found)
        assert result == failed(error="the vllm server is busy: it answered 503")
        assert result.error.retry_after == WAITS[value]
        assert len(server.received) == (1 if WAITS[value] else 3), "one that says when is left alone until then"


def test_a_date_is_compared_with_this_clock_where_the_answer_has_none() -> None:
    with listening(busy(formatdate(time.time() + 30, usegmt=True))) as server, engine(server) as found:
        assert 20 < (one(found).error.retry_after or 0) <= 30


DOWN = (status(500, "down"),)


@in_one_test(
    ("scripts", "retry_after"),
    [
        ([busy("9"), busy("4"), busy("20")], 4.0),
        ([busy("9"), busy("4", 429), DOWN], 4.0),
        ([busy("9"), busy(""), busy("")], 9.0),
        ([busy(""), DOWN, DOWN], 0.0),
        ([busy("9"), (b"",), DOWN], 9.0),
    ],
)
def test_of_several_the_first_that_has_room_again_says_when(
    scripts: list[tuple[bytes, ...]], retry_after: float
) -> None:
    with listening() as first, listening() as second, listening() as third, engine(first, second, third) as found:
        for server, script in zip((first, second, third), scripts, strict=True):
            server.always = script
        result = one(found)
        assert result.finish is Finish.ERROR
        assert result.error.startswith("the vllm server is busy: it answered")
        assert result.error.retry_after == retry_after
        assert sum(len(server.received) for server in (first, second, third)) <= 5


def test_busy_servers_beside_one_with_room_cost_nobody_anything() -> None:
    with listening() as first, listening() as second, listening() as third, engine(first, second, third) as found:
        first.always, second.always = busy("9"), busy("", 429)
        for key in range(1, 9):
            assert one(found, key=key) == WHOLE


def test_a_server_whose_models_are_busy_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(busy("", 500)) as server, engine(server) as found:
        server.models = busy("5")[0]
        result = one(found)
        assert result == failed(error="the vllm server is busy: it answered 503")
        assert result.error.retry_after == 5.0


def test_many_failures_at_once_are_one_pause() -> None:
    server = servers.RemoteServer("")
    assert [server.failed(0.0) for _ in range(50)] == [1.0] + [0.0] * 49
    assert [server.failed(at, wait) for at, wait in ((1, 0), (3, 0), (7, 1e9), (100, 0))] == [2.0, 4.0, 30.0, 16.0]


def test_a_request_that_kills_its_servers_is_moved_once() -> None:
    with (
        listening((b"",)) as first,
        listening((b"",)) as second,
        listening() as third,
        engine(first, second, third) as found,
    ):
        assert one(found)[::2] == ([], "the vllm server closed the connection")
        assert (len(first.received), len(second.received), len(third.received)) == (1, 1, 0)


def test_an_idle_connection_that_is_reset_is_no_failure() -> None:
    answer = (CHUNKED, *(b"%x\r\n%b\r\n" % (len(part), part) for part in GOOD[1:]), b"0\r\n\r\n")
    with listening() as first, listening() as second, engine(first, second) as found:
        first.always, first.resets = answer, True
        for key in range(1, 4):
            assert one(found, key=key) == WHOLE
            settle(found)
        assert (len(first.received), len(second.received)) == (3, 0)
        assert found._servers[0].serves(found._loop.time())


def test_what_follows_the_end_is_read_for_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_LINGER", 0.3)
    with listening((HEAD, event(5, finish="length"), HANG)) as server, engine(server, timeout=60.0) as found:
        assert one(found)[:2] == ([5], Finish.LENGTH)
        settle(found)
        assert server.left.acquire(timeout=PATIENCE)


@in_one_test("score", ['"-1"', "null", "[1]", "1e999", "true"])
def test_a_log_probability_is_a_number(score: str) -> None:
    scores = b'{"token_logprobs": [%b], "top_logprobs": [{"token_id:5": %b}]}' % ((score.encode(),) * 2)
    bad = event(5, finish="length", logprobs=0).replace(b'"logprobs": 0', b'"logprobs": ' + scores)
    with listening(*[(HEAD, bad)] * 3) as server, engine(server) as found:
        assert one(found, SAMPLING._replace(top_logprobs=1))[::2] == (
            [],
            "the vllm server sent an event that cannot be read",
        )
