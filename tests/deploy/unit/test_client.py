"""The client's parts: streamed answers, odd ones, retries, and sessions among threads."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.hooks import HierarchicalEmitter
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.client import ModelFailed as RetryModelFailed
from deploy.client import NoCapacity, NotSent, NotStarted, Patience, Predictor, Throttled
from deploy.client.errors import ModelFailed, RequestFailed, StreamBroken
from deploy.client.runtime import Runtime, with_retries
from deploy.client.streaming import Event, Finish, Raw, ResponseEnd, ResponseEvents, Token
from tests.deploy.aws.client.double import GOLDEN, Wire, golden, golden_streams
from tests.examples.programs import ROOT
from tests.one_test import in_one_test

# -- streamed answers, read in pieces of every size --------------------------------------------------------------------


SHOWN = 'Deep "Learning" 😀\n'


def read(content_type: str, pieces: Iterable[bytes]) -> tuple[list[Event], RequestFailed | None]:
    """The events, and how it ended."""
    reader = ResponseEvents(content_type)
    found: list[Event] = []
    try:
        for piece in pieces:
            found.extend(reader.feed(piece))
        found.extend(reader.finish())
    except RequestFailed as error:
        failed = error
    else:
        return found, None
    assert list(failed.arrived) == reader.arrived == found
    return found, failed


def whole(wire: Wire) -> list[Event]:
    events, error = read(wire.content_type, [wire.body])
    assert error is None
    return events


def cut(body: bytes, places: Sequence[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(borders)]


def text(events: Iterable[Event], index: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Token) and e.shown and e.index == index)


def test_lmis_lines() -> None:
    events = whole(golden("lmi/stream_details"))
    assert events[0] == Token("Deep", 304, -0.05)
    assert events[4:] == [
        Token("", 2, -0.125, special=True),
        Finish("eos_token", SHOWN, {"finish_reason": "eos_token", "generated_tokens": 5, "inputs": "What is"}),
    ]
    assert text(events) == SHOWN


def test_lmis_last_line_without_details_is_an_end_too() -> None:
    events = whole(golden("lmi/stream"))
    assert events[-1] == Finish(None, SHOWN)
    assert events == whole(golden("lmi/stream_sse"))


def test_tgis_special_tokens_are_beside_the_text() -> None:
    events = whole(golden("tgi/stream_details"))
    assert events[-2] == Token("</s>", 2, -0.125, special=True, shown=False)
    assert events[-1].reason == "eos_token"  # type: ignore[union-attr]
    compatible = whole(golden("tgi_compat/stream"))
    assert text(events) == text(compatible) == SHOWN
    assert compatible[-1].generated_text == SHOWN  # type: ignore[union-attr]


def test_openais_chunks() -> None:
    events = whole(golden("openai/chat/stream_usage"))
    assert text(events) == SHOWN
    assert Finish("stop") in events
    assert isinstance(events[-1], Raw)
    assert events[-1].data["usage"]["completion_tokens"] == 5
    assert whole(golden("openai/chat/stream_logprobs"))[0] == Token("Deep", logprob=-0.05)
    assert text(whole(golden("openai/completion/stream"))) == SHOWN


def test_several_answers_are_kept_apart() -> None:
    events = whole(golden("openai/chat/stream_n"))
    assert text(events) == SHOWN
    assert text(events, 1) == 'Deep "Learning"'
    assert {event.index for event in events if isinstance(event, Finish)} == {0, 1}


def test_parts_of_tool_calls_are_there_as_they_came() -> None:
    events = whole(golden("openai/chat/stream_tools"))
    assert text(events) == "Wait. "
    calls = [e.data["choices"][0]["delta"]["tool_calls"][0] for e in events if isinstance(e, Raw)]
    assert calls[0]["function"]["name"] == "weather"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Köln"}
    assert Finish("tool_calls") in events


def test_lmis_chat_lines() -> None:
    events = whole(golden("chat/stream"))
    assert text(events) == SHOWN
    assert events[-1] == Finish("eos_token")


def test_tritons_events() -> None:
    events = whole(golden("triton/stream_extras"))
    assert text(events) == SHOWN
    assert events[0] == Token("Deep", logprob=-0.05)
    assert events[-1] == Finish("stop")
    assert text(whole(golden("triton/stream"))) == SHOWN


@in_one_test("name", ["lmi/stream_fails", "lmi/stream_fails_sse", "tgi_compat/stream_fails",
                                  "triton/stream_fails", "openai/chat/stream_fails", "openai/completion/stream_fails",
                                  "chat/stream_fails", "chat/stream_fails_sse"])  # fmt: skip
def test_a_failure_within_comes_after_what_had_arrived(name: str) -> None:
    wire = golden(name)
    events, error = read(wire.content_type, [wire.body])
    assert type(error) is ModelFailed
    assert str(error).startswith("the model failed during the response: engine failure: it was killed by signal 9")
    assert error.original_status in (424, None)
    assert text(events).startswith("Deep")
    assert len(events) in (1, 2)


def test_every_golden_stream_is_read() -> None:
    names = golden_streams()
    assert len(names) > 40
    for name in names:
        wire = golden(name)
        events, error = read(wire.content_type, [wire.body])
        failing = any(word in name for word in ("fails", "bad", "wrong", "lacking"))
        assert failing == (error is not None), name
        assert failing or any(isinstance(event, Token) for event in events) or name.endswith("named_tool"), name


@in_one_test("name", golden_streams())
def test_byte_by_byte_is_the_same(name: str) -> None:
    wire = golden(name)
    for content_type in (wire.content_type, ""):
        _same(
            read(content_type, [wire.body]), read(content_type, [wire.body[i : i + 1] for i in range(len(wire.body))])
        )


@in_one_test("name", [name for name in golden_streams() if not name.startswith("triton/")])
def test_the_last_message_of_a_bidirectional_stream_is_recognized(name: str) -> None:
    """Each line or event is a message there, and nothing follows the last one."""
    request = (GOLDEN / f"{name}.txt").read_text().partition("\n")[0].removeprefix("> ")
    end = ResponseEnd(json.dumps({**json.loads(request), "stream": True}).encode())
    lines = [line.removeprefix(b"data:").strip() for line in golden(name).body.split(b"\n")]
    ends = [end.is_last(line) for line in lines if line.startswith(b"{")]
    assert ends == [False] * (len(ends) - 1) + [True], name


@pytest.mark.parametrize("body", [b'{"inputs": "a"}', b'{"inputs": "a", "stream": false}', b"[]", b"no JSON"])
def test_a_response_that_is_not_a_stream_is_one_message(body: bytes) -> None:
    assert ResponseEnd(body).is_last(b'{"generated_text": "a"}')


def test_a_client_without_aws_s_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aws_sdk_sagemaker_runtime_http2", None)
    with pytest.raises(NotSent, match="aws_sdk_sagemaker_runtime_http2 is not installed") as raised:
        Predictor("local", "us-east-1", bidirectional=True)
    advice = "Python 3.12" if sys.version_info < (3, 12) else "lmi-handler[bidirectional-client]"
    assert advice in raised.value.advice


@pytest.mark.parametrize("more", [{"component": "a"}, {"adapter": "a"}, {"routing_target": "a"}])
def test_bidirectional_streams_have_no_component(more: dict[str, str]) -> None:
    with pytest.raises(NotSent, match="bidirectional cannot be combined with component"):
        Predictor("local", "us-east-1", bidirectional=True, **more)  # type: ignore[arg-type]


OTHERS = {
    "pretty JSON": Wire("application/json", json.dumps({"generated_text": 'a "}\\" é', "x": [{}]}, indent=2).encode()),
    "JSON without line ends": Wire("", b'{"token":{"text":"a","id":1}} {"token":{"text":"b"},"generated_text":"ab"}'),
    "CRLF lines": Wire("application/jsonlines", b'{"token":{"text":"a"}}\r\n{"token":{"text":"b"},"details":{}}'),
    "CRLF events": Wire("text/event-stream", b': hi\r\n\r\ndata: {"text_output":"a"}\r\n\r\ndata:{"text_output":"b"}'),
    "CR events": Wire("", b'id: 1\rdata: {"text_output":\rdata: "a"}\r\rdata: {"text_output":"b"}\r\r'),
    "no empty line": Wire("text/event-stream", b'data: {"text_output":"a"}\ndata: {"text_output":"b"}\ndata: [DONE]\n'),
    "lines with a mark": Wire("application/jsonlines", b'\xef\xbb\xbf{"text_output":"a"}\n\n\n{"text_output":"b"}'),
    "events with a mark": Wire("", b'\xef\xbb\xbfdata: {"text_output":"ab"}\n\n'),
    "a wrong type": Wire("text/event-stream", b'\n{"outputs":["a"]}\n{"outputs":["b"]}\n'),
    "another wrong type": Wire("application/json", b'event: x\ndata: {"outputs":["ab"]}\n\n'),
    "TGI's list": Wire("application/json", b'[{"generated_text":"ab","details":{"finish_reason":"length"}}]'),
    "a line that is not JSON": Wire("application/json", b'not "JSON {\n{"text_output":"ab"}\n7\n"x"'),
    "an event that is not JSON": Wire("text/event-stream", b'data: {oops\n\ndata: {"text_output":"ab"}\n\n'),
    "nothing": Wire("application/jsonlines", b""),
    "white space": Wire("application/json", b" \n "),
    "cut within a value": Wire("application/jsonlines", b'{"token":{"text":"ab"}}\n{"token":{"te'),
    "cut within an event": Wire("text/event-stream", b'data: {"token":{"text":"ab"}}\n\ndata: {"tok'),
    "cut between": Wire("application/jsonlines", b'{"token":{"text":"ab"}}\n'),
}  # fmt: skip


def test_pretty_json_is_one_answer() -> None:
    assert whole(OTHERS["pretty JSON"]) == [Finish(None, 'a "}\\" é')]


@in_one_test("name", ["JSON without line ends", "CRLF lines", "CRLF events", "CR events", "no empty line",
                                  "lines with a mark", "a wrong type"])  # fmt: skip
def test_framings(name: str) -> None:
    tokens = [event.text for event in whole(OTHERS[name]) if isinstance(event, Token)]
    assert tokens == ["a", "b"]


def test_what_is_no_json_is_shown_as_it_is() -> None:
    assert whole(OTHERS["a line that is not JSON"]) == [Raw('not "JSON {'), Token("ab"), Raw(7), Raw("x")]
    assert whole(OTHERS["an event that is not JSON"]) == [Raw("{oops"), Token("ab")]


@pytest.mark.parametrize("name", ["cut within a value", "cut within an event", "cut between"])
def test_an_answer_that_ends_too_early_is_broken(name: str) -> None:
    events, error = read(*_pieces(OTHERS[name]))
    assert type(error) is StreamBroken
    assert text(events) == "ab"


@pytest.mark.parametrize("name", ["nothing", "white space"])
def test_an_empty_answer_has_no_events(name: str) -> None:
    assert whole(OTHERS[name]) == []


@pytest.mark.parametrize("wire", [Wire("text/plain", "été 🙂".encode()), Wire("", "hallo 🙂".encode())])
def test_plain_text_comes_in_whole_characters(wire: Wire) -> None:
    events, error = read(wire.content_type, [wire.body[i : i + 1] for i in range(len(wire.body))])
    assert error is None
    assert "".join(event.data for event in events if isinstance(event, Raw)) == wire.body.decode()
    assert "\ufffd" not in wire.body.decode()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*golden_streams(), *OTHERS]), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_borders_give_the_same_events(name: str, places: list[int]) -> None:
    wire = OTHERS.get(name) or golden(name)
    _same(read(wire.content_type, [wire.body]), read(wire.content_type, cut(wire.body, places)))


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=60),
    st.lists(st.integers(0, 60), max_size=8),
    st.sampled_from(["application/json", "text/event-stream"]),
)
def test_any_bytes_in_any_borders(body: bytes, places: list[int], content_type: str) -> None:
    """Text that is not JSON may come in other pieces."""
    (one, error), (other, likewise) = read(content_type, [body]), read(content_type, cut(body, places))
    _same((_joined(one), error), (_joined(other), likewise))


def _pieces(wire: Wire) -> tuple[str, list[bytes]]:
    return wire.content_type, [wire.body]


Ended = tuple[Sequence[Event | str], RequestFailed | None]


def _same(one: Ended, other: Ended) -> None:
    assert one[0] == other[0]
    assert (type(one[1]), str(one[1])) == (type(other[1]), str(other[1]))


def _joined(events: list[Event]) -> list[Event | str]:
    found: list[Event | str] = []
    for event in events:
        text = event.data if isinstance(event, Raw) and isinstance(event.data, str) else None
        if text is not None and found and isinstance(found[-1], str):
            found[-1] += text
        else:
            found.append(event if text is None else text)
    return found


# -- when a request is tried again, by a clock of ours -----------------------------------------------------------------


class Clock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def tried(error: Exception, patience: Patience) -> Clock:
    clock = Clock()

    def attempt() -> None:
        raise error

    with pytest.raises(type(error)):
        with_retries(attempt, patience, clock=clock, sleep=clock.sleep)
    return clock


def test_pauses_grow_up_to_the_longest() -> None:
    pauses = tried(Throttled("x"), Patience(busy=300, first=1, longest=8)).pauses
    for pause, most in zip(pauses[:6], [1, 2, 4, 8, 8, 8], strict=True):
        assert most / 2 <= pause <= most
    assert max(pauses) <= 8


def test_all_ends_within_the_limit_of_its_kind() -> None:
    patience = Patience(busy=30, cold=600)
    assert tried(Throttled("x"), patience).now == pytest.approx(130)
    assert tried(NoCapacity("x"), patience).now == pytest.approx(700)


def test_what_may_have_begun_is_not_tried_again() -> None:
    assert tried(RetryModelFailed("x"), Patience()).pauses == []


def test_an_answer_ends_it_and_every_pause_was_reported() -> None:
    clock, seen = Clock(), []
    outcomes = iter([Throttled("one"), NoCapacity("two")])

    def attempt() -> str:
        if (error := next(outcomes, None)) is not None:
            raise error
        return "answer"

    def report(error: NotStarted, pause: float) -> None:
        seen.append((str(error), pause))

    assert with_retries(attempt, Patience(), report, clock=clock, sleep=clock.sleep) == "answer"
    assert seen == [("one", clock.pauses[0]), ("two", clock.pauses[1])]


# -- answers that no server should give --------------------------------------------------------------------------------


_WRONG = [{"message": 5}, {"delta": [1]}, {"index": [], "text": "a"}]


@in_one_test("choice", [None, 1, "text", [1], *_WRONG])
def test_choices_that_are_none(choice: object) -> None:
    reader = ResponseEvents("text/event-stream")
    text = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
    assert [*reader.feed(text), *reader.finish()] == [Raw({"choices": [choice]})]


def test_details_that_are_no_object() -> None:
    value = {"token": {"text": "a"}, "details": "none"}
    reader = ResponseEvents("application/jsonlines")
    assert [*reader.feed(json.dumps(value).encode()), *reader.finish()] == [Raw(value)]


def test_nesting_deeper_than_python_goes_is_text() -> None:
    reader = ResponseEvents("application/jsonlines")
    text = 100_000 * "[" + 100_000 * "]"
    assert [*reader.feed(text.encode() + b"\n"), *reader.finish()] == [Raw(text)]


def test_a_long_line_is_looked_through_once() -> None:
    """8 MB in pieces of 4 KB took a minute, and 32 MB take sixteen: the test's own limit ends such a reader."""
    reader = ResponseEvents("text/event-stream")
    list(reader.feed(b"data: "))
    for _ in range(8192):
        list(reader.feed(4096 * b"x"))
    list(reader.feed(b"\r"))
    [event] = [*reader.feed(b"\n\n"), *reader.finish()]
    assert event == Raw(8192 * 4096 * "x")


# -- boto3's sessions are not safe among threads: only one of them may make a client at a time -------------------------


def test_threads_make_one_client_at_a_time() -> None:
    made: list[object] = []
    making = threading.Lock()

    def client(*_: Any, **__: Any) -> object:
        assert making.acquire(blocking=False), "two clients are being made at once"
        time.sleep(0.02)
        making.release()
        made.append(SimpleNamespace(meta=SimpleNamespace(events=HierarchicalEmitter())))
        return made[-1]

    runtime = Runtime("e", "us-east-1", session=SimpleNamespace(client=client, region_name="us-east-1"))
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda kind=kind: found.append(getattr(runtime, kind)))
        for kind in 4 * ["_client", "_streaming"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert len(found) == 8


# -- what it brings along ----------------------------------------------------------------------------------------------


def test_the_predictor_needs_no_package_but_boto3() -> None:
    """So that an environment of SageMaker's SDK, whose packages are others, can import it."""
    code = "import json, sys, deploy.client; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    modules = json.loads(done.stdout)
    names = {name.partition(".")[0] for name in modules}
    assert not names & {"orjson", "yaml", "pydantic", "moto", "httpx", "aiohttp", "requests"}
    ours = {name for name in modules if name.startswith("deploy.")}
    assert {name.split(".")[1] for name in ours} == {"client", "credentials", "errors", "web_pages"}
    of_handler = {name for name in modules if name.partition(".")[0] == "handler"}
    assert of_handler == {"handler", "handler.core", "handler.core.event_stream"}
