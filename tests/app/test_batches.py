"""Files and batches over HTTP: OpenAI's loop, bad lines and calls, limits by key, cancel, expiry, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.config.config import Config
from handler.core.errors import Unavailable
from handler.http import batch_routes
from handler.http.batch_routes import BatchRoutes
from handler.protocols.openai import batches
from handler.protocols.openai.batches import NewFile
from handler.scheduler import batcher
from handler.serving.batches import runner
from handler.serving.batches.store import BatchStore
from handler.serving.large_bodies import LARGE
from handler.serving.quota import Count
from tests.app.server import BY_KEY, refused_start, serve
from tests.servers import LiveServer, options, wait_for

ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@contextlib.contextmanager
def batching(directory: Path, *arguments: str) -> Iterator[LiveServer]:
    with serve("--engine", "echo", *BY_KEY, "-o", f"option.batches_store={directory}", *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = ("batches_max_lines=8", "batches_max_file_bytes=100000", "batches_max_bytes=1048576")
    given = options(*(f"option.{limit}" for limit in limits))
    with mock.patch.object(runner, "LOOK_SECONDS", 0.05), batching(tmp_path_factory.mktemp("b"), *given) as server:
        yield server


def call(server: LiveServer, method: str, path: str, *, key: dict[str, str] = ANN, **more: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}/v1/{path}", headers=key, timeout=30, **more)


def line(id: Any, text: str = "one two", **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": body, **more}


def upload(server: LiveServer, lines: Sequence[Any], *, key: dict[str, str] = ANN, **form: Any) -> httpx.Response:
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    files = {"file": ("requests.jsonl", text.encode())}
    return call(server, "POST", "files", key=key, files=files, data={"purpose": "batch", **form})


def begin(server: LiveServer, lines: Sequence[Any], *, key: dict[str, str] = ANN, **more: Any) -> Any:
    input = upload(server, lines, key=key).json()["id"]
    asked = {"input_file_id": input, "endpoint": CHAT, "completion_window": "24h", **more}
    return call(server, "POST", "batches", key=key, json=asked).json()


def ended(server: LiveServer, id: str, *, key: dict[str, str] = ANN) -> Any:
    """The batch when it has ended."""

    def found() -> Any:
        return call(server, "GET", f"batches/{id}", key=key).json()

    wait_for(lambda: found()["status"] in ENDED, 30, "the batch did not end")
    return found()


def lines_of(server: LiveServer, id: str | None, *, key: dict[str, str] = ANN) -> dict[str | None, Any]:
    """The lines of a file, by custom_id."""
    found = [json.loads(one) for one in call(server, "GET", f"files/{id}/content", key=key).text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    found = response.json()["error"]
    return response.status_code, found["message"], found["param"]


def test_the_lines_of_a_batch_may_be_decisions(server: LiveServer) -> None:
    path, choice = "/v1/systemone", {"type": "choice", "instructions": "Which?", "criteria": {"x": None}}
    bodies = {"a": {"state": "s", "questions": {"q": choice}}, "b": {"state": "s", "questions": {"q": {}}}}
    lines = [{"custom_id": id, "method": "POST", "url": path, "body": body} for id, body in bodies.items()]
    batch = ended(server, begin(server, lines, endpoint=path)["id"])
    answered = lines_of(server, batch["output_file_id"])["a"]["response"]["body"]
    assert answered["answers"]["q"]["choice"] == "x"
    refused = lines_of(server, batch["error_file_id"])["b"]["response"]
    assert (refused["status_code"], refused["body"]["detail"][0]["loc"][1:]) == (422, ["questions", "q", "type"])


def test_a_batch_from_its_upload_to_its_answers(server: LiveServer) -> None:
    second = line("b", "two")
    second["body"]["nonsense"] = 1
    file = upload(server, [line("a", "one"), second]).json()
    assert (file["object"], file["purpose"], file["filename"]) == ("file", "batch", "requests.jsonl")
    assert file["expires_at"] - file["created_at"] == 30 * 86400
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", "metadata": {"of": "a test"}}
    begun = call(server, "POST", "batches", json=asked).json()
    assert (begun["object"], begun["status"], begun["metadata"]) == ("batch", "validating", {"of": "a test"})
    assert begun["expires_at"] - begun["created_at"] == 86400
    batch = ended(server, begun["id"])
    assert (batch["status"], batch["errors"], batch["error_file_id"]) == ("completed", None, None)
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    answers = lines_of(server, batch["output_file_id"])
    for id, word in (("a", "one"), ("b", "two")):
        found = answers[id]
        assert (found["error"], found["response"]["status_code"]) == (None, 200)
        assert found["id"] == found["response"]["request_id"]
        assert found["response"]["body"]["object"] == "chat.completion"
        assert word in found["response"]["body"]["choices"][0]["message"]["content"]
    assert "ignored_parameters" not in answers["a"]["response"]
    assert answers["b"]["response"]["ignored_parameters"] == ["nonsense"]
    output = call(server, "GET", f"files/{batch['output_file_id']}").json()
    text = call(server, "GET", f"files/{output['id']}/content")
    assert (output["purpose"], output["bytes"]) == ("batch_output", len(text.content))
    assert output["filename"] == f"{batch['id']}_output.jsonl"


def test_a_bad_line_is_that_line_s_error(server: LiveServer) -> None:
    bad = [
        "{",
        {"custom_id": 1},
        line("get", method="GET"),
        line("no body", body=None),
        line("stream", body={**line("")["body"], "stream": True}),
        line("wrong", body={"messages": [], "temperature": -1}),
    ]
    batch = ended(server, begin(server, [line("good"), *bad, "", " "])["id"])
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 7, "completed": 1, "failed": 6})
    assert [*lines_of(server, batch["output_file_id"])] == ["good"]
    text = call(server, "GET", f"files/{batch['error_file_id']}/content").text
    errors = [json.loads(one) for one in text.splitlines()]
    assert sorted(one["error"]["code"] for one in errors if one["custom_id"] is None) == [  # as the lines end
        "invalid_json_line",
        "missing_required_parameter",
    ]
    by_id = {one["custom_id"]: one for one in errors}
    assert by_id["get"]["error"] == {"code": "invalid_method", "message": "'method' must be POST", "param": "method"}
    assert by_id["no body"]["error"]["param"] == "body"
    for id in ("stream", "wrong"):
        assert by_id[id]["error"] is None
        assert by_id[id]["response"]["status_code"] == 400
        assert by_id[id]["response"]["body"]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("a"), line("b", url="/v1/embeddings")], "url_mismatch", 2),
        ([], "empty_file", None),
        ([line(str(number)) for number in range(9)], "too_many_tasks", None),
    ],
)
def test_a_file_that_is_no_batch_fails_before_its_first_line(
    server: LiveServer, lines: list[Any], code: str, number: int | None
) -> None:
    batch = ended(server, begin(server, lines)["id"])
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None)
    assert batch["failed_at"] is not None
    (found,) = batch["errors"]["data"]
    assert (found["code"], found["line"]) == (code, number)


def test_what_is_wrong_with_an_upload(server: LiveServer) -> None:
    assert error(upload(server, [], purpose="fine-tune"))[::2] == (400, "purpose")
    assert error(call(server, "POST", "files", files={"other": ("a", b"")}))[::2] == (400, "file")
    assert error(upload(server, [line("a", "long " * 30_000)]))[::2] == (413, None)
    soon: dict[str, Any] = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}
    assert error(upload(server, [], **soon))[::2] == (400, "expires_after.seconds")
    assert error(call(server, "POST", "files", json={}))[0] == 415
    two = [("file", ("a", b"1")), ("file", ("b", b"2"))]
    assert error(call(server, "POST", "files", files=two, data={"purpose": "batch"}))[0] == 400
    assert error(call(server, "POST", "files", files={"file": ("a", b"")}, data={"purpose": "x" * 70_000}))[0] == 400
    left = {path.name for path in _directory(server).iterdir() if path.name.startswith("file-")}
    listed = call(server, "GET", "files").json()["data"] + call(server, "GET", "files", key=BOB).json()["data"]
    assert left == {one["id"] for one in listed}, "nothing is left of what was refused"


def _directory(server: LiveServer) -> Path:
    (option,) = [word for word in server._arguments if "batches_store" in word]  # type: ignore[attr-defined]
    return Path(option.partition("batches_store=")[2])


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_what_is_wrong_with_a_batch(server: LiveServer, more: dict[str, Any], param: str) -> None:
    file = upload(server, [line("a")]).json()["id"]
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **more}
    assert error(call(server, "POST", "batches", json=asked))[::2] == (400, param)


def test_each_key_finds_its_own(server: LiveServer) -> None:
    batch = ended(server, begin(server, [line("a")])["id"])
    requests, output = batch["input_file_id"], batch["output_file_id"]
    for path in (f"batches/{batch['id']}", f"files/{output}", f"files/{requests}/content"):
        assert call(server, "GET", path).status_code == 200
        assert call(server, "GET", path, key=BOB).status_code == 404
    assert call(server, "POST", f"batches/{batch['id']}/cancel", key=BOB).status_code == 404
    assert call(server, "DELETE", f"files/{requests}", key=BOB).status_code == 404
    asked = {"input_file_id": requests, "endpoint": CHAT, "completion_window": "24h"}
    assert error(call(server, "POST", "batches", key=BOB, json=asked))[::2] == (400, "input_file_id")
    assert call(server, "GET", "batches", key=BOB).json()["data"] == []


def test_lists_have_pages(server: LiveServer) -> None:
    key = {"x-api-key": "pages"}
    ids = [upload(server, [line("a")], key=key).json()["id"] for _ in range(3)]
    first = call(server, "GET", "files?limit=2", key=key).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    second = call(server, "GET", f"files?limit=2&after={first['last_id']}", key=key).json()
    assert ([one["id"] for one in second["data"]], second["has_more"]) == (ids[:1], False)
    assert [one["id"] for one in call(server, "GET", "files?order=asc", key=key).json()["data"]] == ids
    assert call(server, "GET", "files?purpose=batch_output", key=key).json()["data"] == []
    assert error(call(server, "GET", "files?after=file-0", key=key))[0] == 404
    assert error(call(server, "GET", "batches?limit=101", key=key))[::2] == (400, "limit")
    deleted = call(server, "DELETE", f"files/{ids[0]}", key=key).json()
    assert deleted == {"id": ids[0], "object": "file", "deleted": True}
    assert call(server, "GET", f"files/{ids[0]}", key=key).status_code == 404
    assert not (_directory(server) / ids[0]).exists()


def test_a_key_has_so_many_bytes(server: LiveServer) -> None:
    key = {"x-api-key": "bytes"}
    big = [line(str(number), "long " * 4800) for number in range(4)]
    statuses = [upload(server, big, key=key).status_code for _ in range(11)]
    assert statuses == [200] * 10 + [413]
    assert upload(server, big, key=BOB).status_code == 200


def test_a_download_ends_when_its_client_has_gone(tmp_path: Path) -> None:
    store, sent, left = BatchStore(tmp_path, Config()), list[Any](), asyncio.Event()
    id = store.reserve("", 100)
    store.path(id).write_bytes(bytes(100))
    store.keep(id, NewFile("a", 3600, ()))
    adapters = SimpleNamespace(calls=Count())
    admission = SimpleNamespace(routes=SimpleNamespace(dialects=()))
    routes = BatchRoutes(SimpleNamespace(adapters=adapters, batches=store, admission=admission))  # type: ignore[arg-type]

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            left.set()
        await asyncio.sleep(0)

    scope = {"method": "GET", "path_params": {"file": id}, "headers_by_name": {}, "request_id": "a"}
    with mock.patch.object(batch_routes, "_PART", 1):
        asyncio.run(routes._content(scope, receive, send))
    assert 3 <= len(sent) < 10
    store.close()


def test_what_a_slow_client_still_reads_of_a_deleted_file_counts(tmp_path: Path) -> None:
    """A key's uploads, deletions and unread downloads do not take more of the disk than the key may have."""
    lines = [line("a", "long " * 200)] * 10_000  # 11 MB: more than a connection buffers
    room = options("option.batches_max_bytes=16000000")
    with mock.patch.object(runner, "_IDLE_SECONDS", 0.1), batching(tmp_path, *room) as server:
        id = upload(server, lines).json()["id"]
        with socket.create_connection(("127.0.0.1", server.port), 30) as slow:
            head = f"GET /v1/files/{id}/content HTTP/1.1", "host: 127.0.0.1", f"authorization: {ANN['authorization']}"
            slow.sendall("\r\n".join((*head, "", "")).encode())
            assert slow.recv(12) == b"HTTP/1.1 200"
            assert call(server, "DELETE", f"files/{id}").json()["deleted"]
            assert call(server, "GET", f"files/{id}").status_code == 404
            assert upload(server, lines).status_code == 413
        wait_for(lambda: upload(server, lines).status_code == 200, 30, "the file keeps its bytes")


def test_without_the_option_and_with_a_bucket() -> None:
    with serve("--engine", "echo", *BY_KEY) as server:
        assert error(call(server, "GET", "files"))[:2] == (
            404,
            "files and batches are not enabled on this server (option.batches_store)",
        )
    assert "must be off or a directory" in refused_start(
        "--engine", "echo", *BY_KEY, "-o", "option.batches_store=s3://a/b"
    )


# -- batches that take their time --------------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[LiveServer]:
    """One line at a time, a second each."""
    pace = ("-o", "option.echo_tokens_per_second=8", "-o", "option.batches_concurrency=1")
    soon = mock.patch.multiple(runner, LOOK_SECONDS=0.05, _IDLE_SECONDS=0.5)
    with soon, batching(tmp_path, *pace) as server:
        yield server


LONG = [line(str(number), "a b c d e f g h") for number in range(50)]


def in_progress(server: LiveServer, id: str) -> None:
    """Return when a line is answered."""

    def found() -> Any:
        return call(server, "GET", f"batches/{id}").json()["request_counts"]["completed"]

    wait_for(found, 30, "no line was answered")


@contextlib.contextmanager
def ends_at_the_second_try() -> Iterator[None]:
    """All lines of a batch are written, and nobody says so before another server looks."""
    end, tries = BatchStore.end, list[str]()

    def at_the_second_try(store: BatchStore, id: str, *arguments: Any) -> None:
        tries.append(id)
        if tries.count(id) == 1:
            raise Unavailable("the server is killed")
        end(store, id, *arguments)

    with mock.patch.object(BatchStore, "end", at_the_second_try):
        yield
    assert len(tries) == 2


def test_a_cancelled_batch_has_each_line_once(slow: LiveServer) -> None:
    begun = begin(slow, LONG)
    in_progress(slow, begun["id"])
    assert error(call(slow, "DELETE", f"files/{begun['input_file_id']}"))[0] == 409
    cancelled = call(slow, "POST", f"batches/{begun['id']}/cancel").json()
    assert cancelled["status"] == "cancelling"
    with ends_at_the_second_try():
        batch = ended(slow, begun["id"])
    assert (batch["status"], batch["cancelling_at"]) == ("cancelled", cancelled["cancelling_at"])
    answers, errors = lines_of(slow, batch["output_file_id"]), lines_of(slow, batch["error_file_id"])
    assert {*answers, *errors} == {one["custom_id"] for one in LONG}
    assert not {*answers} & {*errors}
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    assert batch["request_counts"] == {"total": 50, "completed": len(answers), "failed": len(errors)}
    assert error(call(slow, "POST", f"batches/{begun['id']}/cancel"))[0] == 409
    assert slow.metric("lmi_active_sequences") == 0


def test_a_batch_that_is_cancelled_before_its_file_was_read_has_no_lines(slow: LiveServer) -> None:
    first, second = begin(slow, LONG), begin(slow, LONG)
    call(slow, "POST", f"batches/{second['id']}/cancel")
    call(slow, "POST", f"batches/{first['id']}/cancel")
    batch = ended(slow, second["id"])
    assert (batch["status"], batch["in_progress_at"]) == ("cancelled", None)
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


def test_two_servers_answer_a_batch_each(slow: LiveServer) -> None:
    pace = ("-o", "option.echo_tokens_per_second=8", "-o", "option.batches_concurrency=1")
    with mock.patch.object(runner, "_IDLE_SECONDS", 0.1), batching(_directory(slow), *pace):
        first, second = begin(slow, LONG[:15]), begin(slow, LONG[:15])
        in_progress(slow, second["id"])
        assert call(slow, "GET", f"batches/{first['id']}").json()["status"] == "in_progress"


def test_what_is_left_at_the_window_s_end_expires(slow: LiveServer) -> None:
    with mock.patch.dict(batches.UNITS, {"m": 1}):
        begun = begin(slow, LONG, completion_window="3m")
    with ends_at_the_second_try():
        batch = ended(slow, begun["id"])
    assert (batch["status"], batch["cancelled_at"]) == ("expired", None)
    errors = lines_of(slow, batch["error_file_id"])
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    assert len(errors) + batch["request_counts"]["completed"] == 50


def test_a_batch_goes_on_after_a_stop(tmp_path: Path) -> None:
    pace = ("-o", "option.echo_tokens_per_second=20", "-o", "option.batches_concurrency=2")
    with mock.patch.object(runner, "LOOK_SECONDS", 0.05):
        with batching(tmp_path, *pace) as server:
            begun = begin(server, LONG)
            in_progress(server, begun["id"])
        with batching(tmp_path) as server:
            batch = ended(server, begun["id"])
            assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
            assert len(lines_of(server, batch["output_file_id"])) == 50
            assert batch["in_progress_at"] is not None


@pytest.mark.parametrize(
    "batching_options", [("option.max_rolling_batch_size=1",), ("option.rolling_batch=disable", "batch_size=1")]
)
def test_a_key_has_so_many_batches_and_others_go_first(tmp_path: Path, batching_options: Sequence[str]) -> None:
    """Of four lines that are sent at a time, three wait for the engine: the request goes before them."""
    pace = ("option.echo_tokens_per_second=12", "option.batches_max_open=1", *batching_options)
    with (
        mock.patch.object(runner, "LOOK_SECONDS", 0.05),
        batching(tmp_path, *options(*pace, "option.batches_concurrency=4")) as server,
    ):
        begun = begin(server, LONG)
        asked = {name: begun[name] for name in ("input_file_id", "endpoint", "completion_window")}
        in_progress(server, begun["id"])
        assert error(call(server, "POST", "batches", json=asked))[0] == 429
        answered = call(server, "GET", f"batches/{begun['id']}").json()["request_counts"]["completed"]
        assert server.post({"inputs": "a", "parameters": {"max_new_tokens": 1}}).status_code == 200
        after = call(server, "GET", f"batches/{begun['id']}").json()["request_counts"]["completed"]
        assert after - answered <= 2, "it waited for no more than the line that was under way"


@pytest.mark.parametrize("most", [1, 2])
def test_one_keys_batches_leave_room_in_the_engine_and_for_anothers(tmp_path: Path, most: int) -> None:
    """Ann's lines last for 25 s each, or for 2 s where one has the only place. Bob's is read and answered meanwhile."""
    pace = ("option.echo_tokens_per_second=2", "option.max_rolling_batch_size=8", f"option.batches_concurrency={most}")
    soon = mock.patch.multiple(runner, LOOK_SECONDS=0.05, _IDLE_SECONDS=0.2)

    def lasting(id: str, tokens: int) -> Any:
        return line(id, body={"messages": [{"role": "user", "content": "a"}], "max_tokens": tokens})

    with mock.patch.object(batcher, "PATIENCE", 0.5), soon, batching(tmp_path, *options(*pace)) as server:
        for _ in range(most + 1):
            begin(server, [lasting(str(number), 50 if most > 1 else 4) for number in range(50)])
        wait_for(lambda: server.metric("lmi_active_sequences") == most, 30, "no line began")
        assert server.post({"inputs": "a", "parameters": {"max_new_tokens": 1}}).status_code == 200
        batch = ended(server, begin(server, [lasting("b", 1)], key=BOB)["id"], key=BOB)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
        wait_for(lambda: server.metric("lmi_active_sequences") == most, 30, "Ann's lines go on")


def test_a_line_waits_for_room_and_is_tried_again(tmp_path: Path) -> None:
    """The queue has room for one of six lines, and the engine fails at one however often it is tried."""
    room = ("option.max_rolling_batch_size=1", "job_queue_size=1", "option.batches_concurrency=6")
    cues = ("option.echo_cues=true", "option.echo_tokens_per_second=100")
    lines = [line(str(number)) for number in range(5)] + [line("bad", "<raise>")]
    soon = mock.patch.multiple(runner, LOOK_SECONDS=0.05, _MOST_WAIT=0.1)
    with soon, batching(tmp_path, *options(*room, *cues)) as server:
        batch = ended(server, begin(server, lines)["id"])
        assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        assert len(lines_of(server, batch["output_file_id"])) == 5
        (failed,) = lines_of(server, batch["error_file_id"]).values()
        assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("bad", None, 500)
        assert server.metric('lmi_requests_total{outcome="failed"}') == 3
        assert server.metric('lmi_requests_total{outcome="overloaded"}') > 0


def test_a_repeated_key_has_its_last_value_in_a_line_of_any_length(tmp_path: Path) -> None:
    text = json.dumps(line("short")).replace('"max_tokens": 8', '"max_tokens": 1, "max_tokens": 2')
    long = text.replace("short", "long").ljust(LARGE)
    with batching(tmp_path) as server:
        batch = ended(server, begin(server, [text, long])["id"])
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 2, "completed": 2, "failed": 0})
        answers = lines_of(server, batch["output_file_id"])
        tokens = {id: found["response"]["body"]["usage"]["completion_tokens"] for id, found in answers.items()}
        assert tokens == {"short": 2, "long": 2}
