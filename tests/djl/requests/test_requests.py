"""The request table through DJL in each of its modes: what it answers is what the embedded server answers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from tests import request_table
from tests.app.server import serve
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.request_table import Row
from tests.servers import LiveServer, http, options, wait_for

pytestmark = [pytest.mark.djl, pytest.mark.long]

HANDLER = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo", "option.echo_cues": "true"}
NEVER = "999"


class Mode(NamedTuple):
    """`options` are those of both servers, `djl` those of DJL alone."""

    rows: tuple[Row, ...]
    options: dict[str, str]
    djl: dict[str, str]


_SCHEMA = "async schema"
"""LMI's own of the async mode; the other async modes have rolling batch's, as before 0.33."""

_TGI = {"option.tgi_compat": "true"}
_STEPS = {"option.rolling_batch": "auto"}
_ASYNC = {"option.rolling_batch": "disable", "option.async_mode": "true"}
_STREAMING = {"option.enable_streaming": "true"}
_BATCH = {"batch_size": "4", "max_batch_delay": "10"}
MODES = {
    "rolling": Mode(request_table.ROLLING, {}, _STEPS),
    "rolling tgi": Mode(request_table.ROLLING, _TGI, _STEPS),
    "async": Mode(request_table.ROLLING, {}, _ASYNC),
    "async tgi": Mode(request_table.ROLLING, _TGI, _ASYNC),
    _SCHEMA: Mode(request_table.ROLLING, {"option.lmi_version": "0.36", "option.async_mode": "true"}, _ASYNC),
    "dynamic": Mode(request_table.DYNAMIC, {}, _BATCH),
    "dynamic streaming": Mode(request_table.DYNAMIC_STREAM, _STREAMING, {}),
}


class Answer(NamedTuple):
    """`body` is text, or the value of a JSON body of which only that counts."""

    status: int
    content_type: str
    ignored: str | None
    body: Any


# -- the differences -------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """What some versions cannot do as docs/wire/ has it.

    Attributes:
        reason: why.
        since, before: the versions, `since` included.
        modes: the beginning of their names.
        rows: the rows' names; None for all.
        instead: from the answer that it should be to the one that it is; None where none comes.
    """

    reason: str
    since: str
    before: str
    modes: tuple[str, ...]
    rows: tuple[str, ...] | None
    instead: Callable[[Answer], Answer] | None

    def applies(self, version: str, mode: str, row: Row) -> bool:
        at = newer(version, self.since) and not newer(version, self.before)
        return at and mode.startswith(self.modes) and (self.rows is None or row.name in self.rows)


_ALL = ("rolling", "async", "dynamic")
_EITHER = 0  # in a status's place: 200 or the error's


def _refused(message: str) -> Callable[[Answer], Answer]:
    """Our own refusal, of whichever schema: its error is what counts."""
    return lambda answer: Answer(424, "application/json", None, {"error": message, "code": 424})


DIFFERENCES = (
    Difference(
        "Java reads a form's fields, so a body that only says it is a form is none",
        "0", NEVER, _ALL, ("form that is JSON",),
        _refused("the body is empty"),
    ),
    Difference(
        "query parameters and the body lie in one map, where the first `data` is the body",
        "0", NEVER, _ALL, ("query that is a body",),
        _refused("the body is not valid JSON: Expecting value at line 1 column 1"),
    ),
    Difference(
        "Java cannot write a step with a request that has no content: it ends the worker and tells nobody",
        "0", "0.28", ("rolling",), ("empty form",), None,
    ),
    Difference(
        "Java names the type of all answers itself, after option.output_formatter, and knows no headers of one request",
        "0", "0.28", ("rolling",), None,
        lambda answer: answer._replace(content_type="application/json", ignored=None),
    ),
    Difference(
        "a step's first piece begins the answer even when it is empty, so the status is spent with the first token, "
        "unless the failure follows before Java has looked",
        "0", "0.29", ("rolling",), ("failing: amid the answer",),
        lambda answer: answer._replace(status=_EITHER),
    ),
    Difference(
        "Java looks for an error's status in its body, which it finds in no event",
        "0", "0.29", ("rolling",), ("stream: top_p, as events",),
        lambda answer: answer._replace(body=answer.body.removeprefix("data: ").removesuffix("\n\n")),
    ),
    Difference(
        "Java looks for an error's status in its body, so that one without gets it",
        "0", "0.29", ("rolling",), None,
        lambda answer: answer._replace(body=_error(answer)) if answer.status >= 400 and _codeless(answer) else answer,
    ),
    Difference(
        "Java makes the body of an error itself, and forgets the rest",
        "0.29", NEVER, ("rolling", "async"), None,
        lambda answer: answer if answer.status < 400 else answer._replace(body=_error(answer)),
    ),
)  # fmt: skip


def _error(answer: Answer) -> dict[str, Any]:
    """What all bodies of an error say; some dialects leave the code to the status, or make it a stream's event."""
    value = _told(answer)
    error = value.get("error", _details(value))
    text = error["message"] if isinstance(error, dict) else error  # OpenAI has an object
    return {
        "error": text.removeprefix("Input parsing failed: "),  # which only the async mode says
        "code": value.get("code", answer.status),
    }


def _told(answer: Answer) -> dict[str, Any]:
    value: dict[str, Any] = answer.body
    return json.loads(answer.body.removeprefix("data:")) if isinstance(answer.body, str) else value


def _codeless(answer: Answer) -> bool:
    return isinstance(answer.body, str) and "code" not in _told(answer)


def differences(version: str, mode: str, row: Row) -> list[Difference]:
    return [difference for difference in DIFFERENCES if difference.applies(version, mode, row)]


def is_answered(version: str, mode: str, row: Row) -> bool:
    return all(difference.instead for difference in differences(version, mode, row))


def expected(version: str, mode: str, row: Row, answer: Answer) -> Answer:
    """What this version makes of the embedded server's answer."""
    for difference in differences(version, mode, row):
        assert difference.instead is not None
        answer = difference.instead(answer)
    return answer


# -- asking ----------------------------------------------------------------------------------------------------------


def post(url: str, row: Row) -> Answer:
    found = http.post(f"{url}/invocations{row.query}", content=row.content, headers=row.headers, timeout=30)
    ignored = found.headers.get("x-lmi-ignored-parameters")
    return Answer(found.status_code, found.headers["content-type"], ignored, settled(found.content.decode(), row))


def settled(text: str, row: Row) -> str:
    """Without what differs between two answers to the same request."""
    text = re.sub(r'"id":"((?:(?:chat)?cmpl|decision)-)[^"]+","', r'"id":"\1","', text)
    text = re.sub(r'"created":1\d{9},', '"created":1,', text)
    text = re.sub(r'"Session \S+ created"', '"Session created"', text)
    return re.sub(r'"seed":\d+', '"seed":1', text) if b'"seed"' not in row.content else text


def values(answer: Answer) -> list[Any]:
    """The JSON values of a body, as its content type frames them; [DONE] is one of them."""
    text = answer.body
    if answer.content_type == "application/json":
        return [json.loads(text)]
    if answer.content_type == "application/jsonlines":
        *lines, rest = text.split("\n")
    else:
        assert answer.content_type.startswith("text/event-stream")
        *lines, rest = text.split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        lines = [line.removeprefix("data: ") for line in lines]
    assert lines
    assert rest == ""
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def said(answer: Answer) -> str:
    """The generated text of any schema, or an error's text."""
    found = [value for value in values(answer) if value != "[DONE]"]
    if answer.status >= 400:
        return str(found[0].get("error") or _details(found[0]))
    if answer.content_type == "application/json" and isinstance(found[0], list):
        return "|".join(value["generated_text"] for value in found[0])
    if answer.content_type == "application/json" and "generated_text" in found[0]:
        return str(found[0]["generated_text"])
    if isinstance(found[0].get("text_output"), list):
        return "|".join(found[0]["text_output"])
    if isinstance(found[0].get("outputs"), list):
        return "|".join(map("".join, zip(*(value["outputs"] for value in found if "outputs" in value), strict=True)))
    return "".join(_piece(value) for value in found)


def _details(error: dict[str, Any]) -> str:
    """System One's errors of fields, as their messages."""
    return "".join(f"{'.'.join(detail['loc'][1:])}: {detail['msg']}" for detail in error.get("detail", ()))


def _choice(choice: dict[str, Any]) -> str:
    said = choice if "text" in choice else {"text": (choice.get("message") or choice["delta"]).get("content")}
    return str(said["text"] or "") if choice["index"] == 0 else ""


def _piece(value: dict[str, Any]) -> str:
    if "answers" in value:
        return "".join(answer["choice"] for answer in value["answers"].values())
    if "choices" in value:
        return "".join(_choice(choice) for choice in value["choices"])
    if "text_output" in value:
        return str(value["text_output"])
    return str(value["token"]["text"]) if "token" in value else ""  # else the error at the end of a stream


# -- the servers -----------------------------------------------------------------------------------------------------


class Embedded:
    """The embedded server in each configuration, started when first asked; it is asked every row once."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._servers: dict[str, LiveServer] = {}
        self._answers: dict[tuple[str, str], Answer] = {}

    def answer(self, mode: str, row: Row) -> Answer:
        kind = mode if mode == _SCHEMA else mode.replace("async", "rolling")
        if (kind, row.name) not in self._answers:
            self._answers[kind, row.name] = post(self._server(kind).url, row)
        return self._answers[kind, row.name]

    def close(self) -> None:
        self._stack.close()

    def _server(self, kind: str) -> LiveServer:
        if kind not in self._servers:
            own = {"option.echo_cues": "true", **MODES[kind].options}
            if kind.startswith("dynamic"):
                own["option.rolling_batch"] = "disable"
            arguments = options(*(f"{key}={value}" for key, value in own.items()))
            server = self._stack.enter_context(serve("--engine", "echo", *arguments))
            server.wait_ready()
            self._servers[kind] = server
        return self._servers[kind]


@pytest.fixture(scope="module")
def embedded() -> Iterator[Embedded]:
    found = Embedded()
    with contextlib.closing(found):
        yield found


def start(version: str, mode: str) -> contextlib.AbstractContextManager[DjlServer]:
    """DJL in a mode; before 0.28 no rolling_batch at all is what switches it off."""
    options = {**HANDLER, **MODES[mode].options, **MODES[mode].djl}
    if mode.startswith("dynamic") and newer(version, "0.28"):
        options["option.rolling_batch"] = "disable"
    return djl(version, options)


PLACES = [(version, mode) for mode in MODES for version in versions(since="0.31" if mode.startswith("async") else "0")]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    with start(*request.param) as found:
        yield found


# -- the tests -------------------------------------------------------------------------------------------------------


def _name(row: Row) -> str:
    return row.name.replace(" ", "-")


_HOSTS = [(version, mode.removesuffix(" tgi")) for version, mode in PLACES if mode.endswith(" tgi")]


def asked(version: str, mode: str) -> tuple[Row, ...]:
    """The rows for a place: of those that serve both schemas, every second one in each.

    DJL carries bytes whose schema it does not know. So each row meets each version and mode, and each schema, but not
    each schema in each version and mode.
    """
    host = (version, mode.removesuffix(" tgi"))
    if host not in _HOSTS or len(_HOSTS) == 1:
        return MODES[mode].rows
    return MODES[mode].rows[(_HOSTS.index(host) + mode.endswith(" tgi")) % 2 :: 2]


@pytest.mark.parametrize(
    ("mode", "row"),
    [
        pytest.param(mode, row, id=f"{mode}-{_name(row)}")
        for mode in MODES
        if not mode.startswith("async")
        for row in MODES[mode].rows
    ],
)
def test_embedded_server_says_what_the_table_says(embedded: Embedded, mode: str, row: Row) -> None:
    answer = embedded.answer(mode, row)
    assert answer.status == row.status
    text = said(answer)
    if row.status == 200:
        own_way = " a b c" if "tgi" in mode else " a b "  # TGI shows the stop string, LMI what came before it
        assert text == (own_way if row.says is None else row.says)
    else:
        assert row.says is not None
        assert row.says in text


@pytest.mark.parametrize(
    ("server", "version", "mode", "row"),
    [
        pytest.param((version, mode), version, mode, row, id=f"{version}-{mode}-{_name(row)}")
        for version, mode in PLACES
        for row in asked(version, mode)
        if is_answered(version, mode, row)
    ],
    indirect=["server"],
    scope="module",
)
def test_djl_answers_as_the_embedded_server_in_requests(
    server: DjlServer, embedded: Embedded, version: str, mode: str, row: Row
) -> None:
    wanted = expected(version, mode, row, embedded.answer(mode, row))
    found = post(server.url, row)
    if isinstance(wanted.body, dict):
        found = found._replace(body=_error(found))
    if wanted.status == _EITHER:
        assert found.status in (200, 424)
        found = found._replace(status=_EITHER)
    assert found == wanted


def test_each_row_meets_each_version_and_mode_and_each_schema() -> None:
    def met(kept: Callable[[str, str], object], rows: Callable[[str, str], tuple[Row, ...]]) -> set[tuple[str, object]]:
        return {(row.name, kept(*place)) for place in PLACES for row in rows(*place)}

    def every(version: str, mode: str) -> tuple[Row, ...]:
        return MODES[mode].rows

    for kept in (lambda version, mode: (version, mode.removesuffix(" tgi")), lambda version, mode: mode[-4:] == " tgi"):
        assert met(kept, asked) == met(kept, every)


def test_differences_are_about_rows_that_exist() -> None:
    rows = {row.name for mode in MODES.values() for row in mode.rows}
    assert {name for difference in DIFFERENCES for name in difference.rows or ()} <= rows


@pytest.mark.parametrize("version", [version for version in versions() if not newer(version, "0.28")])
def test_a_request_without_content_has_no_response_before_0_28(version: str) -> None:
    row = next(row for row in request_table.ROLLING if row.name == "empty form")
    with djl(version, {**HANDLER, **_STEPS}, env={"SERVING_CHUNKED_READ_TIMEOUT": "1"}) as server:

        def is_served() -> bool:
            with contextlib.suppress(httpx.HTTPError):  # while Java starts another worker
                status: int = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 3}}).status_code
                return status == 200
            return False

        first = server.worker_pid()
        with pytest.raises(httpx.ReadError):
            post(server.url, row)
        wait_for(is_served, 10, "nobody is served")
        assert server.worker_pid() != first


# -- dynamic batches -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=versions())
def batching(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    """Four requests a batch, and time enough for them to meet."""
    options = {**HANDLER, "batch_size": "4", "max_batch_delay": "1000"}
    if newer(request.param, "0.28"):
        options["option.rolling_batch"] = "disable"
    with djl(request.param, options) as found:
        yield found


BAD = [
    {"inputs": "x", "parameters": {"top_p": 9}},
    {"inputs": "x <refuse>"},
    {"parameters": {}},
    b'{"inputs": "x',
    {"inputs": ["x", "  "]},
    {"inputs": "x", "stream": "yes"},
    b"",
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.decode() if isinstance(bad, bytes) else json.dumps(bad))
@pytest.mark.parametrize("position", [0, 2])
def test_a_batch_of_four_with_a_bad_one(batching: DjlServer, bad: Any, position: int) -> None:
    good: list[tuple[Any, str]] = [
        ({"inputs": "a b", "parameters": {"max_new_tokens": 3}}, '[{"generated_text":" a b a"}]'),
        (
            {"inputs": ["c", "ü 🙂"], "parameters": {"max_new_tokens": 2, "return_full_text": True}},
            '[{"generated_text":"c c c"},{"generated_text":"ü 🙂 ü 🙂"}]',
        ),
        ({"inputs": "d e f", "parameters": {"stop": ["e"], "do_sample": True}}, '[{"generated_text":" d "}]'),
    ]
    bodies = [body for body, _ in good]
    bodies.insert(position, bad)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda body: _send(batching, body), bodies))
    refused = found.pop(position)
    assert [answer.text for answer in found] == [text for _, text in good]
    # One status and one type for all of a batch; that the bad one has 200 shows that the four were one.
    assert {(answer.status_code, answer.headers["content-type"]) for answer in (*found, refused)} == {
        (200, "application/json")
    }
    value = refused.json()
    assert (value["code"], value["message"]) == (424, "invoke handler failure")
    assert value["error"]


def _send(server: DjlServer, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"content-type": "application/json"}
    return http.post(server.url + "/invocations", content=content, headers=headers, timeout=30)


def test_many_batches_bring_everybody_his_own(batching: DjlServer) -> None:
    texts = [f"w{number} " + "v " * (number % 5) for number in range(40)]

    def lengths(number: int) -> dict[str, Any]:
        return {"inputs": texts[number], "parameters": {"max_new_tokens": 1 + number % 7, "return_full_text": True}}

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda number: batching.post(lengths(number)).json(), range(40)))
    for number, (text, answer) in enumerate(zip(texts, found, strict=True)):
        words = text.split()
        continued = "".join(f" {words[step % len(words)]}" for step in range(1 + number % 7))
        assert answer == [{"generated_text": text + continued}]


def test_a_batch_has_no_streams(batching: DjlServer) -> None:
    """Its answers share one type."""
    for fields in ({"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}):
        assert "not supported by DJL's dynamic batching" in str(
            batching.post({**fields, "stream": True}).json()["error"]
        )
    assert batching.post({"inputs": "a", "parameters": {"max_new_tokens": 1}}).json() == [{"generated_text": " a"}]
