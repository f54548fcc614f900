"""Two recordings of one request: each route of the API's document, with one value of its answer changed.

A value that a server makes anew for each response, an id or a time, may differ. In the document they end with `0`, or
are one fixed number.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.operations import INFERENCE, OPERATIONS, example_response
from handler.protocols.registry import INVOCATIONS, POOLED_INVOCATIONS, POOLED_ROUTES, ROOTS, dialects_of
from handler.protocols.registry import ROUTES as DIALECTS_BY_ROUTE
from proof.replay.comparison import Class, class_of, traits
from proof.replay.content import NEAR
from proof.replay.exchange import Request, Response
from proof.replay.noise import Noise
from proof.routes import ROUTES, Source, source_of
from tests.unit.replay.mutations import DIALECTS, generic, mutants, recorded, why_equal

Asked = tuple[Request, Response, Any]
"""A request, its answer, and the answer's value."""


def test_the_table_has_every_operation_of_the_api_document() -> None:
    documented = {*OPERATIONS, *(("POST", path) for path in (*INFERENCE, *DIALECTS_BY_ROUTE))}
    assert documented <= ROUTES.keys()
    for method, path in documented:
        concrete = path.replace("{model}", "m").replace("{version}", "1").replace("{", "").replace("}", "")
        assert source_of(method, concrete) is ROUTES[method, path]
        assert path == "/" or source_of(method, f"/behind/a/proxy{concrete}/") is ROUTES[method, path]


@pytest.mark.parametrize(
    ("method", "path", "source"),
    [
        ("GET", "/v2/models/stats", Source.STATE),
        ("GET", "/v2/models/llama", Source.REQUEST),
        ("POST", "/v1/responses/compact", Source.SAMPLING),
        ("POST", "/", Source.SAMPLING),
        ("POST", "/reranking", Source.REQUEST),
        ("POST", "/completion", None),
        ("PATCH", "/v1/embeddings", None),
    ],
)
def test_what_answers_are_made_from(method: str, path: str, source: Source | None) -> None:
    assert source_of(method, path) is source


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/pooling", "/classify", "/chat_tokenize"])
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_request_that_generates_nothing_is_not_sampled(path: str, field: str) -> None:
    body = json.dumps({field: "a", "temperature": 0.7}).encode()
    attributes = {"x-amzn-sagemaker-custom-attributes": f"a=b;route={path}"}
    for request in (Request("1", path, {}, body), Request("1", "/invocations", attributes, body)):
        assert traits(request).greedy
    assert not traits(Request("1", "/invocations", {}, body)).greedy


# -- each route, one value changed ---------------------------------------------------------------------------------


def documented() -> Iterator[Asked]:
    """Yield a request and a whole answer of each route, in each of its formats."""
    for (method, path), operation in OPERATIONS.items():
        kind, _, value = operation.responses[min(operation.responses)]
        body = json.dumps(operation.body["example"]).encode() if operation.body else b""
        yield asked(method, path, body, kind, value)
    invocations = [{"/invocations": one} for one in (*INVOCATIONS.values(), *POOLED_INVOCATIONS.values())]
    roots = [{"/": one} for one in ROOTS.values()]
    known = set[str]()
    for by_path in (DIALECTS_BY_ROUTE, *POOLED_ROUTES.values(), *invocations, *roots):
        for path, dialect in by_path.items():
            for one in dialects_of(dialect):
                if DESCRIPTIONS[one.name].response is not None and not {path, one.name} <= known:
                    known |= {path, one.name}
                    example = json.dumps({**one.description.example, "do_sample": False}).encode()
                    yield asked("POST", path, example, "application/json", example_response(one))


def asked(method: str, path: str, body: bytes, kind: str, value: Any) -> Asked:
    text = json.dumps(value) if "json" in kind else str(value)
    return (
        Request("1", path.replace("{", "").replace("}", ""), {}, body, method),
        Response(200, kind, text.encode()),
        value,
    )


PLACES = {f"{request.method} {request.path} {at}": (request, answer, value)
          for at, (request, answer, value) in enumerate(documented())}  # fmt: skip


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*place, name))
    else:
        yield place, value


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 3 + 10
    return f"{value[:-1]}{'y' if value.endswith('x') else 'x'}" if value else "x"


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    holder = copy
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = new
    return copy


def is_fresh(place: tuple[Any, ...], value: Any, request: Request, *, first: bool) -> bool:
    """Return whether a value of the API's document is an id or a time. The id of a described model is its name."""
    name = next((str(part) for part in reversed(place) if isinstance(part, str)), "")
    if isinstance(value, int) and 1760000000 <= value < 1770000000:
        return True
    if re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)", str(value)):
        return True
    if name in ("ns", "signature", "encrypted_content", "seed"):
        return True
    is_described = request.method == "GET" and re.search("/models|/adapters", request.path) is not None
    is_id = name == "id" or name.endswith("_id")
    return is_id and (not is_described or (first and source_of("GET", request.path) is not Source.REQUEST))


def compared(request: Request, old: Response, new: Response, *, first: bool) -> Class:
    noise, wanted = Noise(NEAR), traits(request)
    if not first:
        asyncio.run(noise.real(request, wanted, old, old, None, old))
    return class_of(asyncio.run(noise.real(request, wanted, old, new, None, old)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_one_changed_value_is_a_difference(name: str, first: bool) -> None:
    request, answer, value = PLACES[name]
    assert compared(request, answer, answer, first=first) is Class.EQUAL
    missed = []
    if "json" not in answer.content_type:
        new = answer._replace(body=answer.body + b"x")
        assert compared(request, answer, new, first=first) in (Class.TEXT, Class.SHAPE, Class.FRAMING)
    for place, old in leaves(value) if "json" in answer.content_type else ():
        if place and old is not None and not is_fresh(place, old, request, first=first):
            new = answer._replace(body=json.dumps(put(value, place, changed(old))).encode())
            ties = () if place[-1] == "argmax_is_label" else (Class.TIE,)  # it follows from the probabilities
            if compared(request, answer, new, first=first) in (Class.EQUAL, Class.UNKNOWN, *ties):
                missed.append((place, old))
    assert missed == []


def test_left_out_values_are_named_and_say_nothing() -> None:
    """An answer in which all values are volatile proves nothing."""
    request = Request("1", "/v1/embeddings", {}, b"{}")

    def answer(**value: Any) -> Response:
        return Response(200, "application/json", json.dumps(value).encode())

    noise = Noise(NEAR)
    pair = answer(id="embd-1", created=1, model="m"), answer(id="embd-2", created=2, model="m")
    assert asyncio.run(noise.real(request, traits(request), *pair, None, pair[0])) == []
    assert set(noise.learnt) == {"/v1/embeddings: value $.id", "/v1/embeddings: value $.created"}
    pair = answer(id="embd-1", created=1), answer(id="embd-2", created=2)
    (one,) = asyncio.run(Noise(NEAR).real(request, traits(request), *pair, None, pair[0]))
    assert (one.cls, one.kind) == (Class.UNKNOWN, "nothing was compared")


def test_an_id_that_the_client_sent_is_compared() -> None:
    request = Request("1", "/v2/models/m/generate", {}, json.dumps({"id": "42", "text_input": "a"}).encode())
    old, new = (Response(200, "", json.dumps({"id": id, "text_output": "a"}).encode()) for id in ("42", "43"))
    assert compared(request, old, new, first=True) is Class.TEXT


def test_sampled_text_is_not_equal() -> None:
    """Nothing of a plain text is compared if it is sampled, whether or not a server can be asked again."""
    request = Request("1", "/generate", {}, json.dumps({"inputs": "a", "parameters": {"do_sample": True}}).encode())
    old, new = Response(200, "text/plain", b"one two"), Response(200, "text/plain", b"three four")

    async def again(_: Request) -> Response:
        return Response(200, "text/plain", b"five six")

    for ask in (None, again):
        (one,) = asyncio.run(Noise(NEAR).real(request, traits(request), old, new, ask, old))
        assert one.cls is Class.UNKNOWN


def test_a_fraction_that_a_server_varies_is_still_compared_in_other_requests() -> None:
    """A reference that gave other scores once does not hide an inverted ranking."""
    request = Request("1", "/rerank", {}, b"{}")

    def ranked(*scores: float) -> Response:
        results = [{"index": at, "score": score} for at, score in enumerate(scores)]
        return Response(200, "application/json", json.dumps({"model": "m", "results": results}).encode())

    noise, repeats = Noise(NEAR, later=0.0), iter([ranked(0.6, 0.2), *[ranked(0.9, 0.1)] * 3])

    async def again(_: Request) -> Response:
        return next(repeats)

    def found(old: Response, new: Response) -> Class:
        return class_of(asyncio.run(noise.real(request, traits(request), old, new, again, old)))

    assert found(ranked(0.9, 0.1), ranked(0.7, 0.1)) is Class.TIE
    assert found(ranked(0.9, 0.1), ranked(0.1, 0.9)) is Class.TEXT


def test_a_request_that_changes_the_state_is_sent_once() -> None:
    request = Request("1", "/v1/files/a", {}, b"", "DELETE")

    async def again(_: Request) -> Response:
        raise AssertionError("sent again")

    old, new = (
        Response(200, "application/json", b'{"id": "a", "deleted": %s}' % value) for value in (b"true", b"false")
    )
    assert class_of(asyncio.run(Noise(NEAR).real(request, traits(request), old, new, again, old))) is Class.TEXT


# -- the recorded answers of each dialect, streams too -------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_changed_value_of_a_recorded_answer_is_a_difference(dialect: str) -> None:
    missed, known = [], set[Any]()
    for one in recorded(dialect):
        for mutant in mutants(one, known):
            name = next((part for part in reversed(mutant.place) if isinstance(part, str)), "")
            is_id = isinstance(mutant.old, str) and re.fullmatch(r"(\w+_)?id|signature", name)
            if mutant.operation != "change" or is_id or name == "seed" or mutant.old in (1711997860, 1711997861):
                continue
            wanted = traits(one.request, greedy=True)
            pair = one.answer, mutant.answer
            cls = class_of(asyncio.run(Noise(NEAR).real(one.request, wanted, *pair, None, pair[0])))
            if cls in (Class.EQUAL, Class.UNKNOWN) and not why_equal(one, mutant):
                missed.append((generic(mutant.place), mutant.old, mutant.new))
    assert missed == []
