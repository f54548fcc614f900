"""Requests of batch files, HAR and lines; files that are of no kind, compressed, damaged, or of a strange shape."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler.core.errors import ConfigError
from handler.core.secrets import path_without_credentials, without_credentials
from proof.replay.exchange import Recorded, Request, Unreadable
from proof.replay.sources import files, har, open_requests
from proof.replay.sources.files import Malformed, members
from tests.unit.replay.sources.captured import asked, write

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


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"path": "invocations"}', "path: must be a string that begins with /"),
        ('{"path": "/", "bdy": 1}', "'bdy' is unknown"),
        ('{"path": "/", "body": 1, "body_base64": ""}', "only one of them"),
        ('{"path": "/", "body_base64": "*"}', "body_base64: is not base64"),
        ('{"path": "/", "body": "\\ud800"}', "body: has half of a surrogate pair"),
        ('{"path": "/", "method": "TRACE"}', "method: must be one of POST, GET"),
        ('{"path": "/", "headers": {"a": 1}}', "headers: must be an object of strings"),
        ('{"path": "/", "at": "noon"}', "at: must be a number of seconds"),
        ('{"path": "/", "answer": 1}', "answer: must be an object"),
        ('{"path": "/", "answer": {"status": true}}', "answer.status: must be"),
        ('{"path": "/", "answer": {"body_base64": 1}}', "answer.body_base64: is not a string"),
        ('{"path": "/", "id": 1}', "id: must be a string"),
        ('{"path": "/", "id": "ok"}', "an earlier request has this id"),
        ('{"path": "/", "id": "\\ud800"}', "the id has half of a surrogate pair"),
    ],
)
def test_a_bad_line_names_its_field(tmp_path: Path, line: str, reason: str) -> None:
    requests, [told] = found(write(tmp_path / "r.jsonl", ['{"path": "/", "id": "ok"}', line, '{"path": "/last"}']))
    assert [request.path for request in requests] == ["/", "/last"]
    assert reason in told.reason


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
        assert [one.answer for one in requests] == [
            Recorded(200, "application/json", b'{"x":1.0}'),
            Recorded(400, "application/json", b'{"error": 1}'),
            None,
        ]
        assert "custom_id 'a' has an earlier answer" in told.reason


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
    with pytest.raises(ConfigError, match="name the file of its requests"):
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
    assert [one.answer for one in requests] == [Recorded(200, "a/b", b"\x00\xff"), None]
    assert [one.reason for one in unreadable] == [
        "request.postData: has no text: what saved it keeps no bodies of forms",
        "request.url: has the scheme 'blob', not http or https",
        "1 entries without a body are left out (GET 1)",
    ]


def test_a_har_has_the_content_type_of_the_header(tmp_path: Path) -> None:
    """Chromium's `mimeType` has no parameters."""
    one = entry()
    one["response"]["content"]["mimeType"] = "application/json"
    headers = [[{"name": "Content-Type", "value": "application/json; charset=utf-8"}], [], None, 5]
    entries = [{**one, "response": {**one["response"], "headers": value}} for value in headers]
    (tmp_path / "a.har").write_text(json.dumps(har_of(*entries)))
    requests, _ = found(tmp_path / "a.har")
    types = [one.answer.content_type for one in requests if one.answer]
    assert types == ["application/json; charset=utf-8", *["application/json"] * 3]


def test_a_har_that_was_cut_off_has_its_first_entries(tmp_path: Path) -> None:
    text = json.dumps(har_of(entry(), entry()))
    (tmp_path / "a.har").write_text(text[: text.rindex("postData")])
    requests, [told] = found(tmp_path / "a.har")
    assert len(requests) == 1
    assert told == Unreadable("a.har: entry 2", "the file ends early: it was cut off")


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
    scanner = har._Scanner("f")
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
    assert [one.place.partition(":")[0] for one in unreadable] == ["b.jsonl.gz", "c.jsonl.gz"]
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
    with pytest.raises(ConfigError, match=r"of no known kind.*; known are:\nSageMaker's data capture"):
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
    assert told.place == "a.jsonl:1"


def test_a_file_that_goes_while_it_is_read_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ['{"path": "/"}'])
    write(tmp_path / "b.jsonl", ['{"path": "/"}'])
    requests = open_requests(str(tmp_path))
    (tmp_path / "b.jsonl").unlink()
    assert [type(one) for one in requests] == [Request, Unreadable]


@pytest.mark.parametrize(
    "name",
    ["Authorization", "x-api-key", "api-key", "Cookie", "X-Auth-Token", "x-amz-security-token", "jwt",
     "ocp-apim-subscription-key", "proxy-authorization", "X-Amz-Signature", "x-functions-key", "X-Secret"],
)  # fmt: skip
def test_credentials_are_not_read(name: str) -> None:
    assert without_credentials([(name, "v"), ("X-Amzn-SageMaker-Session-Id", "s")]) == {
        "x-amzn-sagemaker-session-id": "s"
    }
    assert path_without_credentials(f"/p?{name}=v&adapter=a") == "/p?adapter=a"
    assert path_without_credentials(f"/p?{name}=v") == "/p"
    assert path_without_credentials("/p?a=%20b") == "/p?a=%20b"
