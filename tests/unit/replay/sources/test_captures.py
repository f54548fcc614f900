"""SageMaker's data capture: its encodings, its directories, a shadow variant's answers to the same events."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from proof.replay.exchange import Recorded, Request, Unreadable
from proof.replay.sources import open_requests
from tests.unit.replay.sources.captured import asked, line, part, write


def found(path: Path) -> tuple[list[Request], list[Unreadable]]:
    items = list(open_requests(str(path)))
    return [one for one in items if isinstance(one, Request)], [one for one in items if isinstance(one, Unreadable)]


HOUR = "llm/AllTraffic/2026/11/24/10"


@pytest.mark.parametrize(
    ("body", "content_type", "encoding"),
    [
        ('{"inputs": "Grüße ☃ \u2028"}'.encode(), "application/json", "JSON"),
        (b"1,2\n3,4\n", "text/csv", "CSV"),
        (bytes(range(256)), "application/octet-stream", "BASE64"),
        (b'data: {"a": 1}\n\ndata: [DONE]\n\n', "text/event-stream", "BASE64"),
        (b'{"token": 1}\n{"token": 2}\n', "application/jsonlines", "BASE64"),
    ],
)
def test_bodies_come_back_as_they_were_sent(tmp_path: Path, body: bytes, content_type: str, encoding: str) -> None:
    both = part(body, "INPUT", content_type, encoding), part(body, "OUTPUT", content_type, encoding)
    write(tmp_path / HOUR / "a.jsonl", [line("e1", *both)])
    assert found(tmp_path)[0] == [
        Request("e1", "/invocations", {"content-type": content_type}, body, "POST", 1795514400.0,
                Recorded(0, content_type, body)),
    ]  # fmt: skip


def test_what_an_event_keeps_of_its_headers_is_sent_again(tmp_path: Path) -> None:
    for attributes in ("route=/v1/completions", ["route=/v1/completions"]):
        event = line("e1", part(b"{}", "INPUT"), inferenceId="mine", customAttributes=attributes)
        write(tmp_path / HOUR / "a.jsonl", [event])
        [request], _ = found(tmp_path)
        assert request.headers == {
            "content-type": "application/json",
            "x-amzn-sagemaker-custom-attributes": "route=/v1/completions",
            "x-amzn-sagemaker-inference-id": "mine",
        }
        assert request.answer is None


def test_any_part_of_the_directories_can_be_named(tmp_path: Path) -> None:
    write(tmp_path / HOUR / "a.jsonl", [asked("e1")])
    for folder in ("", "llm", "llm/AllTraffic", "llm/AllTraffic/2026", "llm/AllTraffic/2026/11/24", HOUR):
        assert [request.id for request in found(tmp_path / folder)[0]] == ["e1"]
    assert [request.id for request in found(tmp_path / HOUR / "a.jsonl")[0]] == ["e1"]


def test_requests_come_in_the_order_in_which_they_were_asked(tmp_path: Path) -> None:
    """Each instance writes files of its own."""
    write(tmp_path / HOUR / "a.jsonl", [asked(f"e{n}", time=f"2026-11-24T10:00:{n:02}Z") for n in (1, 3, 5)])
    write(tmp_path / HOUR / "b.jsonl", [asked(f"e{n}", time=f"2026-11-24T10:00:{n:02}Z") for n in (0, 2, 4)])
    assert [request.id for request in found(tmp_path)[0]] == [f"e{n}" for n in range(6)]


def test_a_shadows_answers_are_joined_also_across_an_hour(tmp_path: Path) -> None:
    first, second = "2026/11/24/10", "2026/11/24/11"
    times = [f"2026-11-24T10:59:{n:02}Z" for n in range(60)]
    ours = [asked(f"e{n}", b'{"n": %d}' % n, b"ours %d" % n, times[n]) for n in range(6)]
    theirs = [line(f"e{n}", None, part(b"theirs %d" % n, "OUTPUT"), times[n]) for n in range(6)]
    write(tmp_path / "llm/AllTraffic" / first / "a.jsonl", ours[:4])
    write(tmp_path / "llm/AllTraffic" / second / "a.jsonl", ours[4:])
    write(tmp_path / "llm/shadow" / first / "a.jsonl", [theirs[0], theirs[5]])
    write(tmp_path / "llm/shadow" / second / "a.jsonl", [theirs[1], theirs[4]])
    requests, unreadable = found(tmp_path)
    assert not unreadable
    assert {request.id: request.other and request.other.body for request in requests} == {
        "e0": b"theirs 0", "e1": b"theirs 1", "e2": None, "e3": None, "e4": b"theirs 4", "e5": b"theirs 5",
    }  # fmt: skip
    assert all(request.answer and request.answer.body == b"ours " + request.id[1:].encode() for request in requests)
    assert all(request.body == b'{"n": %s}' % request.id[1:].encode() for request in requests)
    assert [request.id for request in requests] == [f"e{n}" for n in range(6)]


def test_the_variant_with_the_smaller_files_is_the_shadow_where_no_name_says_so(tmp_path: Path) -> None:
    write(tmp_path / "llm/b/2026/11/24/10/a.jsonl", [asked(f"e{n}", answer=b"serving") for n in range(9)])
    write(tmp_path / "llm/a/2026/11/24/10/a.jsonl", [asked("e7", answer=b"candidate")])
    [joined] = [request for request in found(tmp_path)[0] if request.other]
    assert joined.answer is not None
    assert joined.other is not None
    assert (joined.id, joined.answer.body, joined.other.body) == ("e7", b"serving", b"candidate")


def test_two_answers_need_no_request_and_one_needs_it(tmp_path: Path) -> None:
    output = part(b"[]", "OUTPUT")
    write(tmp_path / "llm/AllTraffic/2026/11/24/10/a.jsonl", [line("e1", None, output), line("e2", None, output)])
    write(tmp_path / "llm/shadow/2026/11/24/10/a.jsonl", [line("e1", None, output)])
    requests, unreadable = found(tmp_path)
    assert [(request.id, request.body, bool(request.unsendable)) for request in requests] == [("e1", b"", True)]
    assert requests[0].other == Recorded(0, "application/json", b"[]")
    assert [one.reason for one in unreadable] == [
        "only the output was captured (no endpointInput), so there is nothing to send"
    ]


def test_events_of_three_variants_and_of_two_endpoints_are_all_requests(tmp_path: Path) -> None:
    for endpoint in ("one", "two"):
        for variant in ("a", "b", "c"):
            write(tmp_path / endpoint / variant / "2026/11/24/10/x.jsonl", [asked(f"{endpoint}-{variant}")])
    requests, unreadable = found(tmp_path)
    assert len(requests) == 6
    assert not unreadable


BAD = {
    "": None,
    '{"captureData": {"endpointInput": {"observedContentType": "application/json", "mode": "INPUT", "data": "{': (
        "it is not JSON: Unterminated string"
    ),
    "not json": "it is not a JSON object",
    '{"captureData": 1}': "captureData: must be an object",
    '{"captureData": {}}': "has neither endpointInput nor endpointOutput",
    '{"captureData": {"endpointInput": []}}': "endpointInput: must be an object",
    line("x", part(b"{}", "INPUT") | {"encoding": "GZIP"}): "endpointInput.encoding: must be one of JSON, CSV, BASE64",
    line("x", part(b"{}", "INPUT") | {"encoding": "BASE64"}): "endpointInput.data: is not base64",
    line("x", part(b"{}", "INPUT"), {"encoding": "JSON"}): "endpointOutput.data: is not a string",
    line("x", part(b"{}", "INPUT")).replace('"x"', "7"): "eventMetadata.eventId: must be a string",
    line("x", part(b"{}", "INPUT")).replace('"{}"', r'"\ud800"'): "has half of a surrogate pair",
    '{"captureData": ' + "[" * 100_000: "it nests too deeply",
    asked("good"): "the event good has an earlier line, which is used",
    asked("good") + " {}": "something follows the object",
    '{"captureData": {}, "x": ' + "9" * 5000 + "}": "",
}


def test_each_bad_line_is_told_and_its_neighbours_come(tmp_path: Path) -> None:
    file = write(tmp_path / HOUR / "a.jsonl", [asked("good"), *BAD])
    file.write_bytes(file.read_bytes() + b"\xff\xfe\n" + asked("also").encode())  # the last line has no end
    requests, unreadable = found(tmp_path)
    assert [request.id for request in requests] == ["good", "also"]
    told = [(number, reason) for number, reason in enumerate(BAD.values(), 2) if reason is not None]
    told.append((len(BAD) + 2, "it is not UTF-8"))
    assert [one.place for one in unreadable] == [f"{HOUR}/a.jsonl:{number}" for number, _ in told]
    for one, (_, reason) in zip(unreadable, told, strict=True):
        assert reason in one.reason
        assert len(one.reason) < 200


def test_a_capture_is_read_in_constant_memory(tmp_path: Path) -> None:
    body = b'{"inputs": "%s"}' % (b"x" * 10_000)
    for variant in ("AllTraffic", "shadow"):
        write(tmp_path / "llm" / variant / "2026/11/24/10/a.jsonl", (asked(f"e{n}", body, body) for n in range(600)))
    tracemalloc.start()
    try:
        count = sum(isinstance(one, Request) and one.other is not None for one in open_requests(str(tmp_path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 600
    assert peak < 6e6  # of 24 MB
