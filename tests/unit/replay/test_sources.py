"""Requests of batch files, HAR, lines and SageMaker's data capture, sound and damaged."""

from __future__ import annotations

import base64
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler.core.errors import ConfigError
from handler.core.secrets import path_without_credentials
from proof.replay.exchange import Recorded, Request, Unreadable
from proof.replay.sources import files, har, open_requests
from proof.replay.sources.files import Malformed, members, without_credentials
from proof.tensors import HEADER
from tests.unit.replay.captured import asked, line, part, write

# -- sources -----------------------------------------------------------------------------------------------------------
# Requests of batch files, HAR and lines; files that are of no kind, compressed, damaged, or of a strange shape.


JSON = {"content-type": "application/json"}


def found(path: Path) -> tuple[list[Request], list[Unreadable]]:
    items = list(open_requests(str(path)))
    return [one for one in items if isinstance(one, Request)], [one for one in items if isinstance(one, Unreadable)]


# -- lines ---------------------------------------------------------------------------------------------------------


def test_lines_of_requests(tmp_path: Path) -> None:
    lines = [
        '{"path": "/v1/completions", "body": {"prompt":"a",  "temperature": 1.0, "n": 1e0}}',
        '{"id": "b", "path": "/invocations?key=abc&x=1", "headers": {"Accept": "a/b", "Authorization": "Bearer k"}, '
        '"body": "text", "at": 12.5, "answer": {"status": 200, "content_type": "t/p", "body_base64": "/w=="}}',
        '{"path": "/v1/models", "method": "get"}',
    ]
    requests, unreadable = found(write(tmp_path / "r.jsonl", lines))
    assert not unreadable
    assert requests == [
        Request("r.jsonl:1", "/v1/completions", JSON, b'{"prompt":"a",  "temperature": 1.0, "n": 1e0}'),
        Request("b", "/invocations?x=1", {"accept": "a/b"}, b"text", "POST", 12.5, Recorded(200, "t/p", b"\xff")),
        Request("r.jsonl:3", "/v1/models", JSON, b"", "GET"),
    ]


def test_a_call_over_grpc_is_sent_by_http(tmp_path: Path) -> None:
    """Its recorded messages are no answer over HTTP."""
    service = "/inference.GRPCInferenceService"
    answer = '"answer": {"status": 200, "content_type": "application/grpc+proto", "body_base64": "AA=="}'
    lines = [
        f'{{"path": "{service}/ModelInfer/m/versions/1", "headers": {{"{HEADER}": "9"}}, {answer}}}',
        f'{{"path": "{service}/ModelStreamInfer/m", {answer}}}',
    ]
    requests, unreadable = found(write(tmp_path / "r.jsonl", lines))
    assert not unreadable
    assert [(request.path, request.response) for request in requests] == [
        ("/v2/models/m/versions/1/infer", None),
        ("/v2/models/m/infer", None),
    ]
    assert requests[0].headers == {HEADER: "9"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"path": "invocations"}', "path: must be a string that begins with /"),
        ('{"path": "/", "bdy": 1}', "'bdy' is unknown"),
        ('{"path": "/", "body": 1, "body_base64": ""}', "only one of them"),
        ('{"path": "/", "body_base64": "*"}', "body_base64: is not base64"),
        ('{"path": "/", "body": "\\ud800"}', "body: has a lone surrogate"),
        ('{"path": "/", "method": "TRACE"}', "method: must be one of POST, GET"),
        ('{"path": "/", "headers": {"a": 1}}', "headers: must be an object of strings"),
        ('{"path": "/", "at": "noon"}', "at: must be a number of seconds"),
        ('{"path": "/", "answer": 1}', "answer: must be an object"),
        ('{"path": "/", "answer": {"status": true}}', "answer.status: must be"),
        ('{"path": "/", "answer": {"body_base64": 1}}', "answer.body_base64: is not a string"),
        ('{"path": "/", "id": 1}', "id: must be a string"),
        ('{"path": "/", "id": "ok"}', "an earlier request with this id"),
        ('{"path": "/", "id": "\\ud800"}', "the id has a lone surrogate"),
    ],
)
def test_a_bad_line_names_its_field(tmp_path: Path, line: str, reason: str) -> None:
    requests, [told] = found(write(tmp_path / "r.jsonl", ['{"path": "/", "id": "ok"}', line, '{"path": "/last"}']))
    assert [request.path for request in requests] == ["/", "/last"]
    assert reason in told.reason


BODY = {"inputs": "\u00e4 b", "parameters": {"max_new_tokens": 2}}


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(BODY) + "\n" + json.dumps(BODY, ensure_ascii=False) + "\n",
        json.dumps([BODY, BODY], indent=2),
        json.dumps({"body": BODY}) + "\n" + json.dumps({"path": "/invocations", "body": BODY}),
    ],
)
def test_bodies_alone_are_requests_to_invocations(tmp_path: Path, content: str) -> None:
    (tmp_path / "bodies.json").write_text(content)
    requests, unreadable = found(tmp_path / "bodies.json")
    assert not unreadable
    assert [json.loads(one.body) for one in requests] == [BODY, BODY]
    assert {(one.path, one.headers["content-type"]) for one in requests} == {("/invocations", "application/json")}
    assert len({one.id for one in requests}) == 2


def test_a_body_in_a_file_of_its_own_is_sent_unchanged(tmp_path: Path) -> None:
    text = json.dumps({"id": "42", "text_input": "a", "temperature": 1.0}, indent=1)
    (tmp_path / "body.json").write_text(text)
    [request], unreadable = found(tmp_path / "body.json")
    assert (request.body.decode(), unreadable) == (text, [])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"inptus": "a", "parameters": {}}\n', r"r.jsonl:1: its names are inptus, parameters"),
        ('\n{"inptus": }\n', r"r.jsonl:2: it is not JSON: Expecting value: line 1 column 12"),
        ('[{"inputs": "a"}, {"x": 1}]', r"r.jsonl:1: it is not a JSON object"),
    ],
)
def test_a_file_of_no_kind_names_its_first_line(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "r.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=told):
        open_requests(str(tmp_path / "r.jsonl"))


# -- OpenAI's batches ----------------------------------------------------------------------------------------------


def batch_line(id: str, **more: Any) -> str:
    line = {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "n": 1}}
    return json.dumps({**line, **more})


def test_a_batch_with_its_answers_beside_it(tmp_path: Path) -> None:
    file = write(tmp_path / "job.jsonl", [batch_line("a"), batch_line("b"), batch_line("c")])
    ok = '{"id": "x", "custom_id": "a", "response": {"status_code": 200, "body": {"x":1.0}}, "error": null}'
    bad = '{"custom_id": "b", "response": {"status_code": 400, "body": {"error": 1}}, "error": null}'
    write(tmp_path / "job_output.jsonl", [ok, ok])
    write(tmp_path / "job_error.jsonl", [bad, '{"custom_id": "c", "response": null, "error": {"code": "expired"}}'])
    for path in (file, tmp_path):
        requests, [told] = found(path)
        assert [(one.id, one.path, one.body) for one in requests] == [
            (id, "/v1/chat/completions", b'{"model": "m", "n": 1}') for id in "abc"
        ]
        assert [one.response for one in requests] == [
            Recorded(200, "application/json", b'{"x":1.0}'),
            Recorded(400, "application/json", b'{"error": 1}'),
            None,
        ]
        assert "an earlier response for custom_id 'a'" in told.reason


def test_bad_lines_of_a_batch(tmp_path: Path) -> None:
    lines = [
        batch_line("a"),
        batch_line("a"),
        batch_line(""),
        batch_line("b", method="GET"),
        batch_line("b", url="v1"),
        batch_line("b", body="text"),
    ]
    requests, unreadable = found(write(tmp_path / "job.jsonl", lines))
    assert [one.id for one in requests] == ["a"]
    reasons = ("an earlier request", "custom_id: must", "method: must be POST", "url: must be a path", "body: must be")
    assert [reason for one, reason in zip(unreadable, reasons, strict=True) if reason not in one.reason] == []


def test_answers_alone_are_no_batch(tmp_path: Path) -> None:
    file = write(tmp_path / "job_output.jsonl", ['{"custom_id": "a", "response": {"status_code": 200, "body": {}}}'])
    with pytest.raises(ConfigError, match="name the file with its requests"):
        open_requests(str(file))


# -- HAR -----------------------------------------------------------------------------------------------------------


def entry(**more: Any) -> dict[str, Any]:
    request = {
        "method": "POST",
        "url": "https://example.com/v1/chat/completions?api_key=abc&x=1",
        "headers": [
            {"name": ":authority", "value": "example.com"},
            {"name": "Authorization", "value": "Bearer sk-1"},
            {"name": "Cookie", "value": "a=b"},
            {"name": "X-Goog-Api-Key", "value": "abc"},
            {"name": "Content-Type", "value": "application/json"},
            {"name": "X-Tenant", "value": "t"},
        ],
        "postData": {"mimeType": "application/json", "text": '{"a": "é\\n"}'},
    }
    content = {"size": 2, "mimeType": "application/json; charset=utf-8", "text": "{}"}
    made = {
        "startedDateTime": "2026-11-24T10:00:00.5Z",
        "request": request,
        "response": {"status": 200, "content": content},
    }
    return {**made, **more}


def har_of(*entries: Any) -> dict[str, Any]:
    return {"log": {"version": "1.2", "pages": [{"entries": [1]}], "entries": list(entries), "comment": '"entries":['}}


def test_a_har_without_the_credentials(tmp_path: Path) -> None:
    file = tmp_path / "a.har"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(har_of(entry()), indent=2).encode())
    [request], _ = found(file)
    assert request == Request(
        "a.har: entry 1", "/v1/chat/completions?x=1", {**JSON, "x-tenant": "t"}, '{"a": "é\\n"}'.encode(), "POST",
        1795514400.5, Recorded(200, "application/json; charset=utf-8", b"{}"),
    )  # fmt: skip


def test_bodies_in_base64_and_bodies_that_were_not_saved(tmp_path: Path) -> None:
    encoded = {"text": base64.b64encode(b"\x00\xff").decode(), "encoding": "base64", "mimeType": "a/b"}
    stream = {"status": 200, "content": {"size": 99, "mimeType": "text/event-stream"}}
    request = {**entry()["request"], "headers": [], "postData": encoded}
    page = {**entry()["request"], "method": "GET", "postData": None}
    entries = [
        entry(request=request, response={"status": 200, "content": encoded}),
        entry(response=stream),
        entry(request=page),
        entry(request={**request, "postData": {"mimeType": "multipart/form-data", "params": []}}),
        entry(request={**request, "url": "blob:x"}),
        7,
    ]
    (tmp_path / "a.har").write_text(json.dumps(har_of(*entries)))
    requests, unreadable = found(tmp_path / "a.har")
    assert [(one.body, one.headers["content-type"]) for one in requests[:1]] == [(b"\x00\xff", "a/b")]
    assert [one.response for one in requests] == [Recorded(200, "a/b", b"\x00\xff"), None]
    assert [one.reason for one in unreadable] == [
        "request.postData: has no text; the program that saved the file omits the bodies of forms",
        "request.url: must have the scheme http or https, not 'blob'",
        "1 entries without a body are skipped (GET 1)",
    ]


def test_a_har_has_the_content_type_of_the_header(tmp_path: Path) -> None:
    """Chromium's `mimeType` has no parameters."""
    one = entry()
    one["response"]["content"]["mimeType"] = "application/json"
    headers = [[{"name": "Content-Type", "value": "application/json; charset=utf-8"}], [], None, 5]
    entries = [{**one, "response": {**one["response"], "headers": value}} for value in headers]
    (tmp_path / "a.har").write_text(json.dumps(har_of(*entries)))
    requests, _ = found(tmp_path / "a.har")
    types = [one.response.content_type for one in requests if one.response]
    assert types == ["application/json; charset=utf-8", *["application/json"] * 3]


def test_a_har_that_was_cut_off_has_its_first_entries(tmp_path: Path) -> None:
    text = json.dumps(har_of(entry(), entry()))
    (tmp_path / "a.har").write_text(text[: text.rindex("postData")])
    requests, [told] = found(tmp_path / "a.har")
    assert len(requests) == 1
    assert told == Unreadable("a.har: entry 2", "the file is cut off")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.text(max_size=9), _VALUES, max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.lists(_OBJECTS, max_size=3), _VALUES, st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_entries_are_found_wherever_the_pieces_are_cut(
    entries: list[dict[str, Any]], other: Any, ascii: bool, cuts: list[int]
) -> None:
    text = json.dumps({"log": {"x": other, "entries": entries, "y": other}}, ensure_ascii=ascii)
    data = text.encode("utf-8", "replace")
    scanner = har.EntryScanner("f")
    got = []
    at = number = 0
    while at < len(data):
        size = cuts[number % len(cuts)]
        got += list(scanner.feed(data[at : at + size]))
        at, number = at + size, number + 1
    got += list(scanner.end())
    expected = json.loads(data)["log"]["entries"]
    assert [json.loads(one.text) for one in got if not isinstance(one, Unreadable)] == expected
    assert len(got) == len(expected)


@settings(max_examples=100, deadline=None)
@given(_OBJECTS, st.sampled_from([None, 2]))
def test_members_have_their_values_and_their_text(value: dict[str, Any], indent: int | None) -> None:
    got = members(json.dumps(value, indent=indent))
    assert {name: member.value for name, member in got.items()} == value
    assert {name: json.loads(member.text) for name, member in got.items()} == value


@settings(max_examples=100, deadline=None)
@given(_OBJECTS, st.integers(0))
def test_what_is_cut_is_no_object(value: dict[str, Any], at: int) -> None:
    text = json.dumps(value)
    with pytest.raises(Malformed):
        members(text[: at % len(text)])


# -- files ---------------------------------------------------------------------------------------------------------


def test_compressed_files_are_read_and_damaged_ones_end_there(tmp_path: Path) -> None:
    data = gzip.compress("".join(f'{{"path": "/{n}", "body": "{n * 7919}"}}\n' for n in range(5_000)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(data[: len(data) // 2])
    (tmp_path / "c.jsonl.gz").write_bytes(data[:-9] + b"123456789")
    (tmp_path / "d.jsonl").write_text('{"path": "/last"}')
    requests, unreadable = found(tmp_path)
    assert requests[-1].path == "/last"
    assert 5_000 < len(requests) <= 15_001
    assert [one.location.partition(":")[0] for one in unreadable] == ["b.jsonl.gz", "c.jsonl.gz"]
    assert {one.reason for one in unreadable} == {
        "the rest of the file cannot be read: its compressed data is damaged or cut off"
    }


def test_a_line_that_is_too_long_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 1000)
    lines = ['{"path": "/a"}', json.dumps({"path": "/b", "body": "x" * 3_000_000}), '{"path": "/c"}']
    requests, [told] = found(write(tmp_path / "r.jsonl", lines))
    assert [one.path for one in requests] == ["/a", "/c"]
    assert told == Unreadable("r.jsonl:2", "the line is longer than 1000 bytes")


@pytest.mark.parametrize(
    ("content", "name"), [(b"", "a.jsonl"), (b"\x89PNG\x0d\x0a", "a.bin"), (b"{}\n[]\n1\n", "b.json"), (b"{", "c.har")]
)
def test_a_file_of_no_kind_says_what_kinds_there_are(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"of an unknown kind.*; known kinds:\nSageMaker's data capture"):
        open_requests(str(tmp_path / name))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no files to read"):
        open_requests(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no such file or directory"):
        open_requests(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="write it as s3://BUCKET/PREFIX/"):
        open_requests("s3://")


def test_a_damaged_first_line_hides_no_kind(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [asked("x")[:50], asked("good")])
    requests, [told] = found(file)
    assert [one.id for one in requests] == ["good"]
    assert told.location == "a.jsonl:1"


def test_a_file_that_goes_while_it_is_read_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ['{"path": "/"}'])
    write(tmp_path / "b.jsonl", ['{"path": "/"}'])
    requests = open_requests(str(tmp_path))
    (tmp_path / "b.jsonl").unlink()
    assert [type(one) for one in requests] == [Request, Unreadable]


@pytest.mark.parametrize(
    "name",
    ["Authorization", "x-api-key", "api-key", "Cookie", "X-Auth-Token", "x-amz-security-token", "jwt",
     "ocp-apim-subscription-key", "proxy-authorization", "X-Amz-Signature", "x-functions-key", "X-Secret",
     "X-Amzn-SageMaker-Session-Id"],
)  # fmt: skip
def test_credentials_are_not_read(name: str) -> None:
    assert without_credentials([(name, "v"), ("X-Amzn-SageMaker-Target-Variant", "s")]) == {
        "x-amzn-sagemaker-target-variant": "s"
    }
    assert path_without_credentials(f"/p?{name}=v&adapter=a") == "/p?adapter=a"
    assert path_without_credentials(f"/p?{name}=v") == "/p"
    assert path_without_credentials("/p?a=%20b") == "/p?a=%20b"


# -- SageMaker's data capture: its encodings, its directories, a shadow variant's answers to the same events -----------


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
        assert request.response is None


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
    assert all(request.response and request.response.body == b"ours " + request.id[1:].encode() for request in requests)
    assert all(request.body == b'{"n": %s}' % request.id[1:].encode() for request in requests)
    assert [request.id for request in requests] == [f"e{n}" for n in range(6)]


def test_the_variant_with_smaller_files_is_the_shadow_without_a_name(tmp_path: Path) -> None:
    write(tmp_path / "llm/b/2026/11/24/10/a.jsonl", [asked(f"e{n}", answer=b"serving") for n in range(9)])
    write(tmp_path / "llm/a/2026/11/24/10/a.jsonl", [asked("e7", answer=b"candidate")])
    [joined] = [request for request in found(tmp_path)[0] if request.other]
    assert joined.response is not None
    assert joined.other is not None
    assert (joined.id, joined.response.body, joined.other.body) == ("e7", b"serving", b"candidate")


def test_a_capture_names_the_variants_of_its_responses(tmp_path: Path) -> None:
    write(tmp_path / "llm/AllTraffic/2026/11/24/10/a.jsonl", [asked("e1")])
    assert open_requests(str(tmp_path)).by == ("variant AllTraffic", "")
    write(tmp_path / "llm/Shadow/2026/11/24/10/a.jsonl", [asked("e1")])
    assert open_requests(str(tmp_path)).by == ("variant AllTraffic", "variant Shadow")
    assert open_requests(str(write(tmp_path / "r.jsonl", ['{"path": "/"}']))).by == ("", "")


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
    '{"captureData": {}}': "must contain endpointInput or endpointOutput",
    '{"captureData": {"endpointInput": []}}': "endpointInput: must be an object",
    line("x", part(b"{}", "INPUT") | {"encoding": "GZIP"}): "endpointInput.encoding: must be one of JSON, CSV, BASE64",
    line("x", part(b"{}", "INPUT") | {"encoding": "BASE64"}): "endpointInput.data: is not base64",
    line("x", part(b"{}", "INPUT"), {"encoding": "JSON"}): "endpointOutput.data: is not a string",
    line("x", part(b"{}", "INPUT")).replace('"x"', "7"): "eventMetadata.eventId: must be a string",
    line("x", part(b"{}", "INPUT")).replace('"{}"', r'"\ud800"'): "has a lone surrogate",
    '{"captureData": ' + "[" * 100_000: "it is nested too deeply",
    asked("good"): "an earlier line for the event good is used instead",
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
    assert [one.location for one in unreadable] == [f"{HOUR}/a.jsonl:{number}" for number, _ in told]
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
