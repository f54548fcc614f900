"""Anthropic's message batches: requests cut out of a body that arrives in any pieces, and the counts of a batch."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import InvalidPayload, TooLarge
from handler.protocols.anthropic.batches import MessageResults, RequestSplitter, message_batch
from handler.protocols.openai.batches import (
    CANCELLED,
    EXPIRED,
    Line,
    LineError,
    NewBatch,
    is_unsent,
    new_batch,
    not_answered,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text('"\\{}[]:,a\u00e9')
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\{}[]a', max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text('"\\{}[]a', max_size=3), JSON, max_size=3)


def split(body: bytes, cuts: list[int], limit: int = 1 << 20, max_requests: int = 100) -> tuple[list[bytes], Any]:
    splitter = RequestSplitter(limit, max_requests)
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    requests = [request for start, end in itertools.pairwise(places) for request in splitter.feed(body[start:end])]
    return requests, splitter.end()


@given(st.lists(OBJECTS, min_size=1, max_size=4), st.lists(st.integers(0, 1 << 16), max_size=8), st.booleans())
def test_requests_are_cut_out_of_any_pieces(requests: list[Any], cuts: list[int], ascii: bool) -> None:
    body = json.dumps({"before": '"}]{[', "requests": requests, "after": 1}, ensure_ascii=ascii).encode()
    parts, rest = split(body, cuts)
    assert [json.loads(part) for part in parts] == requests
    assert rest == {"before": '"}]{[', "after": 1}


def test_a_request_may_be_cut_at_any_place() -> None:
    """Between a backslash and the character that it escapes too."""
    request = {'"}': ["\\", '\\"}]{[', {"\\\\": '"'}]}
    body = json.dumps({"requests": [request, request]}).encode()
    for cut in range(len(body)):
        assert [json.loads(part) for part in split(body, [cut])[0]] == [request, request]


@given(
    st.binary(max_size=40) | st.text('{}[]"\\,:a0', max_size=40).map(str.encode),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_any_body_is_split_or_refused(body: bytes, cuts: list[int]) -> None:
    """Each cut-out is part of the body, so a body that is not JSON loses nothing but its requests."""
    try:
        parts, _ = split(body, cuts)
    except InvalidPayload:
        return
    value = json.loads(body)
    assert len(parts) == len(value["requests"])


def test_a_request_may_be_as_long_as_the_limit_and_not_longer() -> None:
    body = b'{"requests":[{"a":"%b"}]}' % (b"x" * 100)
    assert len(split(body, [], limit=108)[0]) == 1
    for cuts in ([], [*range(1, len(body), 7)]):
        with pytest.raises(TooLarge, match=r"requests\[0\]: has more than 107 bytes"):
            split(body, cuts, limit=107)


def test_what_surrounds_the_requests_is_bounded() -> None:
    splitter = RequestSplitter(1 << 20, 10)
    for _ in range(32):
        list(splitter.feed(b" " * (1 << 15)))
    with pytest.raises(InvalidPayload, match="apart from its requests"):
        list(splitter.feed(b" " * (1 << 15)))
    assert splitter.size <= (1 << 20) + (1 << 15)


def test_only_requests_that_were_not_sent_count_as_unsent() -> None:
    marker = '"response":null,"error":{"code":"batch_expired"'
    for error, expected in ((EXPIRED, True), (CANCELLED, True), (LineError("line_too_large", marker), False)):
        assert is_unsent(not_answered("msgbatch_0", Line(1, marker), error)) is expected


@pytest.mark.parametrize(
    ("status", "num_unsent", "counts"),
    [
        ("in_progress", 0, {"processing": 9}),
        ("completed", 0, {"succeeded": 4, "errored": 3}),
        ("cancelled", 2, {"succeeded": 4, "errored": 1, "canceled": 4}),
        ("expired", 2, {"succeeded": 4, "errored": 1, "expired": 4}),
        ("failed", 0, {"succeeded": 4, "errored": 5}),
    ],
)
def test_the_counts_always_sum_to_the_number_of_requests(status: str, num_unsent: int, counts: dict[str, int]) -> None:
    total = sum(counts.values())
    batch: Any = new_batch("msgbatch_0", NewBatch("f", "/v1/messages", "24h", 1, 1, None, (), total), 0)
    batch |= {"status": status, f"{status}_at": 5, "request_counts": {"total": total, "completed": 4, "failed": 3}}
    shown = message_batch(batch, num_unsent)
    assert {name: count for name, count in shown["request_counts"].items() if count} == counts
    assert shown["ended_at"] == (None if status == "in_progress" else "1970-01-01T00:00:05Z")


def test_results_of_a_batch_that_failed_or_was_not_begun() -> None:
    def file(*lines: Any) -> io.BytesIO:
        return io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    body = {"status_code": 500, "body": "broken"}
    outputs = [file(), file({"id": "batch_req_0_2", "custom_id": "b", "response": body, "error": None})]
    found = [
        json.loads(line) for line in MessageResults("failed", outputs, file({"custom_id": "a"}, {"custom_id": "b"}))
    ]
    broken, missing = found
    assert (broken["custom_id"], broken["result"]["error"]["error"]["message"]) == ("b", "broken")
    assert (missing["custom_id"], missing["result"]["error"]["error"]["type"]) == ("a", "api_error")
    for status, kind in (("cancelled", "canceled"), ("expired", "expired")):
        [line] = MessageResults(status, [], file({"custom_id": "a"}))
        assert json.loads(line) == {"custom_id": "a", "result": {"type": kind}}
