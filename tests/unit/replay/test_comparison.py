"""Differences and ties, by the answers alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proof.replay.comparison import Class, Seen, Traits, class_of, findings, traits
from proof.replay.content import (
    NEAR,
    NotJson,
    Token,
    is_near_tie,
    read_documents,
    scalars_by_path,
    tokens_by_choice,
    values_by_path,
)
from proof.replay.exchange import Request, Response
from proof.replay.journal import Example, Histogram
from proof.replay.noise import Noise
from proof.replay.report import describe

GREEDY, SAMPLED = Traits(True), Traits(False)


def answer(*documents: Any, status: int = 200, content_type: str = "application/json", end: str = "") -> Response:
    body = "\n".join(json.dumps(one) for one in documents) + end
    return Response(status, content_type, body.encode())


def class_between(old: Response, new: Response, wanted: Traits = GREEDY) -> Class:
    return class_of(findings(old, new, wanted, Seen()))


@pytest.mark.parametrize(
    ("old", "new", "tie"),
    [
        (Token("a", -0.70, {}), Token("b", -0.75, {}), True),
        (Token("a", -0.01, {}), Token("b", -0.01, {}), False),  # two models that are sure of different things
        (Token("a", -0.70, {}), Token("b", -2.0, {}), False),
        (Token("a", -0.70, {"b": -0.80}), Token("b", -0.75, {"a": -0.76}), True),
        (Token("a", -0.70, {"b": -3.0}), Token("b", -0.75, {}), False),  # no tie on one side
        (Token("a", -0.70, {"b": -0.71}), Token("b", -0.2, {"a": -2.0}), False),
        (Token("a", None, {}), Token("b", None, {}), False),
    ],
)
def test_a_near_tie(old: Token, new: Token, tie: bool) -> None:
    assert is_near_tie(old, new, NEAR) is tie


def called(arguments: str) -> Response:
    function = {"name": "f", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    return answer({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})


@pytest.mark.parametrize(
    ("old", "new", "cls"),
    [
        ('{"on": true}', '{"on": 1}', Class.TEXT),
        ('{"on": 1}', '{"on": true}', Class.TEXT),
        ('{"n": 5}', '{"n": 5.0}', Class.TEXT),
        ('{"a": [false]}', '{"a": [0]}', Class.TEXT),
        ('{"a": {"b": null}}', '{"a": {"b": 0}}', Class.TEXT),
        ('{"n": 5.0}', '{"n": 5}', Class.EQUAL),  # as JavaScript and Go write it
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', Class.EQUAL),
    ],
)
def test_the_types_in_a_calls_arguments(old: str, new: str, cls: Class) -> None:
    assert class_between(called(old), called(new)) is cls


@pytest.mark.parametrize(
    ("old", "new", "cls"),
    [
        ([0.0008, 0.0002], [0.0002, 0.0008], Class.TEXT),  # an inverted ranking
        ([3e-7, 1e-7], [1e-7, 3e-7], Class.TEXT),
        ([0.8, 0.2], [0.8001, 0.2001], Class.TIE),
        ([1.0, 0.5], [1, 0.5], Class.EQUAL),
        ([1, 0.5], [1.0, 0.5], Class.SHAPE),
    ],
)
def test_scores_of_a_ranking(old: list[float], new: list[float], cls: Class) -> None:
    def ranked(scores: list[float]) -> Response:
        return answer({"data": [{"index": place, "score": score} for place, score in enumerate(scores)]})

    assert class_between(ranked(old), ranked(new)) is cls


@pytest.mark.parametrize(
    ("new", "cls"), [([0.3001, 1e-4, -0.2], Class.TIE), ([0.3, 0.02, -0.2], Class.TEXT)], ids=["near", "far"]
)
def test_the_numbers_of_a_vector(new: list[float], cls: Class) -> None:
    def embedded(vector: list[float]) -> Response:
        return answer({"data": [{"index": 0, "embedding": vector}]})

    assert class_between(embedded([0.3, 2e-4, -0.2]), embedded(new)) is cls


@pytest.mark.parametrize(
    ("probability", "cls"),
    [
        (0.6, Class.EQUAL),
        (0.7, Class.TIE),
        (0.48, Class.TIE),
        (0.78, Class.TEXT),
        (0.4, Class.TEXT),
        (1e-9, Class.TEXT),
    ],
)
def test_the_probabilities_of_decisions_differ_by_nats(probability: float, cls: Class) -> None:
    def systemone(noul: float) -> Response:
        return answer({"answers": {"q": {"type": "noul", "noul": noul}, "r": {"score": 2 * noul, "type": "score"}}})

    def openai(noul: float) -> Response:
        return answer({"answers": [{"probabilities": [{"value": True, "probability": noul}], "confidence": noul}]})

    for decided in (systemone, openai):
        assert class_between(decided(0.6), decided(probability)) is cls


@pytest.mark.parametrize(
    ("chosen", "probabilities", "cls"),
    [
        (0, [0.52, 0.48], Class.EQUAL),
        (1, [0.48, 0.52], Class.TIE),
        (1, [0.45, 0.55], Class.TIE),
        (1, [0.5, 0.5], Class.TIE),  # of equally likely options, another one
        (1, [0.3, 0.7], Class.TEXT),
        (1, [0.52, 0.48], Class.TEXT),  # not the most likely option
    ],
)
def test_a_choice_is_as_different_as_its_probabilities(chosen: int, probabilities: list[float], cls: Class) -> None:
    def systemone(chosen: int, probabilities: list[float]) -> Response:
        names = ["yes. maybe", "no"]
        decision = {"choice": names[chosen], "probabilities": dict(zip(names, probabilities, strict=True))}
        return answer({"answers": {"q": {"type": "choice", **decision}, "r": {"type": "noul", "noul": 0.5}}})

    def openai(chosen: int, probabilities: list[float]) -> Response:
        names: list[str | bool] = ["true", True]
        rows = [{"value": name, "probability": p} for name, p in zip(names, probabilities, strict=True)]
        decision = {"type": "choice", "choice": names[chosen], "probabilities": rows}
        return answer({"answers": [{"type": "predicate", "probability": 0.5}, decision]})

    for decided in (systemone, openai):
        assert class_between(decided(0, [0.52, 0.48]), decided(chosen, probabilities)) is cls
        assert class_between(decided(chosen, probabilities), decided(0, [0.52, 0.48])) is cls


@pytest.mark.parametrize(
    ("old", "new", "cls"),
    [
        ({"score": 2, "confidence": 1}, {"score": 1.98, "confidence": 0.97}, Class.TIE),  # as JavaScript writes 2.0
        ({"score": 2.0858}, {"score": 2.08579}, Class.TIE),
        ({"score": 2}, {"score": 1}, Class.TEXT),
        (
            {"confidence": 0.2, "probabilities": {"a": 0.6}},
            {"confidence": 0.52, "probabilities": {"a": 0.76}},
            Class.TIE,
        ),
        ({"probabilities": {"a": 0.00004}}, {"probabilities": {"a": 0.0}}, Class.TIE),  # rounded to four places
        ({"probabilities": {"a": 0.0004}}, {"probabilities": {"a": 0.0}}, Class.TEXT),
        ({"argmax_is_label": True, "label_mass": 0.3}, {"argmax_is_label": False, "label_mass": 0.29}, Class.TIE),
        ({"argmax_is_label": True, "label_mass": 0.3}, {"argmax_is_label": False, "label_mass": 0.1}, Class.TEXT),
        ({"argmax_is_label": True}, {"argmax_is_label": "yes"}, Class.SHAPE),
        ({"choice": "a", "probabilities": 7}, {"choice": "b", "probabilities": 7}, Class.TEXT),
    ],
)
def test_what_is_computed_from_the_probabilities_of_a_decision(old: Any, new: Any, cls: Class) -> None:
    for wrap in (lambda value: {"answers": {"q": value}}, lambda value: {"answers": [value]}):
        assert class_between(answer(wrap(old)), answer(wrap(new))) is cls


@pytest.mark.parametrize(("before", "cls"), [(-0.1, Class.TIE), (-0.12, Class.TIE), (-0.9, Class.TEXT)])
def test_a_near_tie_after_other_probabilities_is_none(before: float, cls: Class) -> None:
    """By chance two models may be as sure of different tokens, but not of all tokens before."""

    def said(first: float, text: str, logprob: float) -> Response:
        tokens = [{"text": "a", "log_prob": first}, {"text": text, "log_prob": logprob}]
        return answer({"generated_text": f"a{text}", "details": {"tokens": tokens}})

    assert class_between(said(-0.1, "b", -0.7), said(before, "c", -0.75)) is cls


def test_tokens_are_read_in_each_api() -> None:
    native = {"token": {"id": 1, "text": "a", "log_prob": -0.5}, "top_tokens": [{"text": "b", "logprob": -1.0}]}
    details = {"details": {"tokens": [{"id": 1, "text": "a", "logprob": -0.5}], "top_tokens": [[]]}}
    chat = {"choices": [{"index": 0, "logprobs": {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": []}]}}]}
    tops: list[Any] = [{"a": -0.5, "b": -1.0}]
    texts = {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": tops}}]}
    for document in (native, details, chat, texts):
        (tokens,) = tokens_by_choice([document]).values()
        assert [(token.text, token.logprob) for token in tokens] == [("a", -0.5)], document
    assert tokens_by_choice([texts])[0][0].alternatives == {"a": -0.5, "b": -1.0}


def test_a_stream_that_is_cut_otherwise_says_the_same() -> None:
    pieces = [[{"choices": [{"index": 0, "delta": {"content": text}}]} for text in cut] for cut in ("abc", ("ab", "c"))]
    old, new = (answer(*documents) for documents in pieces)
    assert [(one.cls, one.kind) for one in findings(old, new, GREEDY, Seen())] == [(Class.FRAMING, "documents")]


def test_answers_of_several_choices_may_come_in_any_order() -> None:
    events = [{"choices": [{"index": index, "text": text}]} for index, text in ((0, "a"), (1, "b"), (0, "c"), (1, "d"))]
    assert values_by_path(scalars_by_path(events, by_index=True), len(events))["$.choices[0].text"] == ["ac"]
    other = [events[1], events[0], events[3], events[2]]
    assert class_between(answer(*events), answer(*other)) is Class.EQUAL


@pytest.mark.parametrize(
    ("old", "new", "cls"),
    [
        ({"embedding": [0.1234, 0.5]}, {"embedding": [0.1235, 0.5]}, Class.TIE),
        ({"embedding": [0.1234, 0.5]}, {"embedding": [0.2, 0.5]}, Class.TEXT),
        ({"embedding": [0.1234, 0.5]}, {"embedding": [0.1234]}, Class.TEXT),
        ({"count": 1000}, {"count": 1001}, Class.TEXT),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, Class.EQUAL),
        ({"arguments": '{"a": 1}'}, {"arguments": '{"a":1}'}, Class.EQUAL),
        ({"arguments": '{"a": 1}'}, {"arguments": '{"a": 2}'}, Class.TEXT),
        ({"content": None}, {"content": "a"}, Class.SHAPE),
        (
            [{"bytes": None}, {"bytes": [1]}],
            [{"bytes": [1]}, {"bytes": [1]}],
            Class.TEXT,
        ),  # always what it was at times
        ([{"bytes": [1]}, {"bytes": [1]}], [{"bytes": None}, {"bytes": [1]}], Class.SHAPE),
    ],
)
def test_values(old: Any, new: Any, cls: Class) -> None:
    assert class_between(answer(old), answer(new)) is cls


def test_sampled_answers_may_differ_in_what_they_need() -> None:
    """A field that the old side has at times need not be in each answer of the new one; a new field is one."""
    seen = Seen()
    call: dict[str, Any] = {"message": {"content": None, "calls": []}}
    text: dict[str, Any] = {"message": {"content": "a"}}
    assert findings(answer(call), answer({**text, "more": 1}), SAMPLED, seen)
    assert not findings(answer(text), answer(call), SAMPLED, seen)
    assert not findings(answer(call), answer(text), SAMPLED, seen)
    assert findings(answer(text), answer({**text, "more": 1}), SAMPLED, seen)


@pytest.mark.parametrize("comment", [":\n\n", ": still there 1\n\n"])
def test_signs_of_life_in_an_event_stream_are_no_difference(comment: str) -> None:
    events = [f'data: {{"text": "{text}"}}\n\n' for text in "abc"]
    old = Response(200, "text/event-stream", "".join(events).encode())
    for at in range(4):
        new = old._replace(body="".join([*events[:at], comment, *events[at:]]).encode())
        assert findings(old, new, GREEDY, Seen()) == []
        assert findings(new, old, GREEDY, Seen()) == []


def chunks(*texts: str, tokens: int) -> Response:
    """A streamed chat."""
    events = [{"choices": [{"index": 0, "delta": {"content": text}}], "usage": None} for text in texts]
    return answer(*events, {"choices": [], "usage": {"completion_tokens": tokens}})


@pytest.mark.parametrize(
    ("old", "new", "differ"),
    [
        (chunks(*"abcdefg", tokens=8), chunks("hi", "jk", "lm", "no", tokens=9), True),
        (chunks("hi", "jk", "lm", "no", tokens=8), chunks(*"abcdefg", tokens=8), True),
        (chunks(*"abcdefg", tokens=8), chunks(*"hijklmno", tokens=9), False),
        (chunks(*"abcdefg", tokens=8), chunks(*"hijkl", tokens=8), False),  # a few tokens have no text
        (chunks(*"abcdefg", tokens=8), chunks("😀", "😀", tokens=9), False),  # a character of four tokens
        (chunks(*"ab", tokens=3), chunks("cd", tokens=3), False),
        (chunks(*"abcdefg", tokens=8), chunks("a", tokens=0), False),  # nobody knows how many tokens
    ],
)
def test_a_sampled_stream_has_an_event_for_each_token(old: Response, new: Response, differ: bool) -> None:
    found = [one.name for one in findings(old, new, SAMPLED, Seen()) if one.cls is Class.FRAMING]
    assert found == ["events"] * differ


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("at", range(5))
def test_pings_of_an_event_stream_are_no_difference(at: int, greedy: bool) -> None:
    """Anthropic's streams may contain any number of pings, also before the first and after the last event."""
    events: list[Any] = [
        {"type": "message_start", "message": {"id": "m"}},
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": {"text": "a b"}},
        {"type": "message_stop"},
    ]

    def stream(*parts: Any) -> Response:
        text = "".join(f"event: {part['type']}\ndata: {json.dumps(part)}\n\n" for part in parts)
        return Response(200, "text/event-stream", text.encode())

    plain, pinged = stream(*events), stream(*events[:at], *[{"type": "ping"}] * 2, *events[at:])
    for old, new in ((plain, pinged), (pinged, plain)):
        seen = Seen()
        assert findings(plain, plain, Traits(greedy, True), seen) == []
        assert findings(old, new, Traits(greedy, True), seen) == []
    assert findings(plain, stream(*events[:2], events[3]), Traits(True, True), Seen()) != []


def test_what_may_be_several_things_is_learnt_from_many_answers() -> None:
    seen = Seen()
    several: list[dict[str, Any]] = [{"bytes": None}, {"bytes": [1]}, {"bytes": {"a": 1}}]
    for one in (*several, several[0]):
        findings(answer(one, end=" "), answer(one), SAMPLED, seen)
    assert [len(findings(answer(several[0], end="\n"), answer(one), SAMPLED, seen)) for one in several] == [1, 1, 1]
    assert [one.change for one in findings(answer(several[0]), answer({"bytes": "a"}), SAMPLED, seen)] == [
        "null|list|object -> string"
    ]


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "pattern": "(x+)+y"}}}


@pytest.mark.parametrize(("text", "cls"), [('{"a": 7}', Class.EQUAL), ('{"b": 1}', Class.TEXT), ("{", Class.TEXT)])
def test_the_schema_that_was_asked_for(text: str, cls: Class) -> None:
    body = {"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    wanted = traits(Request("1", "/v1/chat/completions", {}, json.dumps(body).encode()))
    assert not wanted.greedy
    assert class_between(answer({"content": '{"a": 1}'}), answer({"content": text}), wanted) is cls


@pytest.mark.parametrize(
    ("path", "body", "greedy"),
    [
        ("/invocations", {"inputs": "a"}, True),
        ("/invocations", {"inputs": "a", "parameters": {"do_sample": True}}, False),
        ("/invocations", {"inputs": "a", "parameters": {"temperature": 0.7}}, False),
        ("/invocations", {"inputs": "a", "parameters": {"temperature": 0.7, "do_sample": False}}, True),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/chat/completions", {"messages": [], "temperature": 0}, True),
        ("/v1/chat/completions", {"messages": [], "temperature": 1, "top_k": 1}, True),
        ("/v1/responses", {"input": "a"}, False),
        ("/v1/embeddings", {"input": "a"}, True),
        ("/generate", {"inputs": "a", "parameters": {"top_p": 0.5}}, False),
    ],
)
def test_which_requests_are_greedy(path: str, body: Any, greedy: bool) -> None:
    request = Request("1", path, {}, json.dumps(body).encode())
    assert traits(request).greedy is greedy
    assert traits(request, greedy=True).greedy


def test_what_no_server_can_be_asked_about() -> None:
    """Of a shadow variant's answers, an id that changes from one request to the next says nothing; other values do."""
    request = Request("1", "/invocations", {}, b"{}")
    noise = Noise(NEAR)

    def found(old: Any, new: Any) -> set[str]:
        pair = answer(old), answer(new)
        return {one.name for one in asyncio.run(noise.real(request, GREEDY, *pair, None, pair[0]))}

    assert found({"id": 1, "model": "a"}, {"id": 2, "model": "a"}) == set()  # not known yet
    assert found({"id": 3, "model": "a"}, {"id": 4, "model": "b"}) == {"value $.model"}
    assert found({"id": 3, "model": "a"}, {"id": 4, "model": "a"}) == {"value $.id"}  # an id that does not change
    assert found({"id": 5, "usage": {"n": 1}}, {"id": 6, "usage": {"n": 2}}) == {"usage $.usage.n"}


def test_a_side_that_differs_from_itself_shows_no_difference() -> None:
    request = Request("1", "/invocations", {}, b"{}")
    texts = iter("abcdefgh")

    async def again(_: Request) -> Response:
        return answer({"generated_text": next(texts)})

    old, new = answer({"generated_text": "x"}), answer({"generated_text": "y"})
    (one,) = asyncio.run(Noise(NEAR).real(request, GREEDY, old, new, again, old))
    assert (one.cls, one.kind) == (Class.TIE, "unsteady text")


@pytest.mark.parametrize("body", [b"[" * 5000 + b"]" * 5000, b'{"a":' * 500 + b"1" + b"}" * 500, b"\xff{", b"{", b""])
def test_bodies_that_are_no_json_are_texts(body: bytes) -> None:
    with pytest.raises(NotJson):
        read_documents(body)
    assert class_between(Response(200, "", body), answer({})) is Class.SHAPE
    assert class_between(Response(200, "", body), Response(200, "", body + b".")) is Class.TEXT


def test_an_example_hides_a_content_type_that_is_none() -> None:
    old, new = answer({"a": 1}, content_type="<script>secret"), answer({"a": 2})
    example = Example(Request("1", "/invocations", {}, b"{}"), old, new, [])
    assert "secret" not in json.dumps(describe(example, Class.TEXT, show=False))
    assert "secret" in json.dumps(describe(example, Class.TEXT, show=True))


def test_keep_alives_of_a_long_stream_are_read_in_linear_time() -> None:
    """Copied line by line, they would take hours."""
    body = b'{"a": 1}\n' + b": \n\n" * 1_500_000 + b'{"a": 2}'
    found = read_documents(body)
    assert (found.values, [len(one) for one in found.glue]) == ([{"a": 1}, {"a": 2}], [0, 6_000_001, 0])


def test_an_example_has_nothing_that_a_terminal_obeys() -> None:
    request = Request("\x1b[2J", "/invocations", {}, b"{}")
    old, new = answer({"text": "\ud800\x1b[2J"}), Response(200, "", b"\x1b[2J\n")
    example = Example(request, old, new, findings(old, new, GREEDY, Seen()))
    for show in (False, True):
        shown = json.dumps(describe(example, Class.SHAPE, show), ensure_ascii=False)
        assert "\x1b" not in shown
        assert shown.encode()


def test_percentiles_of_times() -> None:
    times = Histogram()
    for number in range(1, 1001):
        times.add(number / 1000)
    assert times.percentile(50) == pytest.approx(0.5, rel=0.02)
    assert times.percentile(99) == pytest.approx(0.99, rel=0.02)
    assert len(times) == 1000


def test_all_wait_for_a_time_of_whole_seconds() -> None:
    """Requests in flight at the turn of a second all meet it before anybody has learnt it."""
    request = Request("1", "/invocations", {}, b"{}")
    noise = Noise(NEAR, later=0.05)
    old, new = answer({"created": 101, "n": 1}), answer({"created": 100, "n": 1})

    async def one() -> list[Any]:
        seconds = iter((101, 102))

        async def again(_: Request) -> Response:
            await asyncio.sleep(0)
            return answer({"created": next(seconds), "n": 1})

        return await noise.real(request, GREEDY, old, new, again, old)

    async def all_at_once() -> list[list[Any]]:
        return await asyncio.gather(*(one() for _ in range(16)))

    assert asyncio.run(all_at_once()) == [[]] * 16
