"""A server's records: of its requests, and histograms of them."""

from __future__ import annotations

import errno
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from handler.config.config import Config
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.serving import request_log
from handler.serving.metrics.families import Histogram
from handler.serving.request_log import Capture, Captured, CapturedResponse, RequestLog, configured_log
from proof.replay.exchange import Recorded, Request
from proof.replay.sources import open_requests
from tests.limits import undocumented
from tests.servers import wait_for
from tests.stepped import Bench, ask, benches, item

__all__ = ["benches"]
# -- request log -------------------------------------------------------------------------------------------------------
# `option.capture_requests`: its files are bounded, its thread never holds anybody up, and no key is written.


BIG = 1 << 30


def captured(number: int = 0, size: int = 10, **more: Any) -> Captured:
    answer = CapturedResponse(200, "application/json", [b'{"a": ', b"1}"])
    made = Captured(f"r{number}", 12.5, "/invocations", {"content-type": "application/json"}, b"x" * size, answer)
    return made._replace(**more)


def read(directory: Path) -> list[Request]:
    found = list(open_requests(str(directory)))
    assert [one for one in found if not isinstance(one, Request)] == []
    return [one for one in found if isinstance(one, Request)]


def make(directory: Path, file_bytes: int = BIG, total_bytes: int = 9 * BIG, percent: float = 100) -> RequestLog:
    config = Config(capture_percent=percent, capture_file_mb=file_bytes, capture_total_mb=total_bytes)
    with mock.patch.object(request_log, "MIB", 1):
        return RequestLog(directory, config)


def test_what_is_written_is_read_without_keys(tmp_path: Path) -> None:
    headers = {
        "authorization": "Bearer sk-secret",
        "x-api-key": "secret",
        "cookie": "secret",
        "x-of-somebodys-own": "secret",
        "content-type": "application/json",
        "x-amzn-sagemaker-session-id": "secret",
    }
    answer = CapturedResponse(200, "text/event-stream", [b"data: \xe2\x98", b"\x83\n\n"])
    log = make(tmp_path)
    log.put(captured(0, headers=headers, path="/v1/completions?api_key=secret&adapter=a", body="☃".encode()))
    log.put(captured(1, body=b"\xff\x00", answer=answer))
    log.put(captured(2, answer=None))
    log.close()
    assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    first, second, third = read(tmp_path)
    assert first == Request(
        "r0", "/v1/completions?adapter=a", {"content-type": "application/json"},
        "☃".encode(), "POST", 12.5, Recorded(200, "application/json", b'{"a": 1}'),
    )  # fmt: skip
    assert second.body == b"\xff\x00"
    assert second.response == Recorded(200, "text/event-stream", "data: ☃\n\n".encode())
    assert third.response is None
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_the_oldest_files_go_and_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(b"x" * 50_000)
    (tmp_path / "requests-20200101T000000Z-1-000001.jsonl").write_bytes(b"x" * 15_000)  # of an earlier run
    log = make(tmp_path, file_bytes=5_000, total_bytes=20_000)
    for number in range(100):
        log.put(captured(number, 900))
    log.close()
    (tmp_path / "mine.jsonl").unlink()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(sizes) <= 5_000
    assert 10_000 < sum(sizes) <= 20_000
    assert [request.id for request in read(tmp_path)] == [f"r{n}" for n in range(100 - len(read(tmp_path)), 100)]
    assert (log.num_written, log.num_dropped) == (100, 0)


def test_servers_sharing_a_directory_keep_its_limit_and_open_files(tmp_path: Path) -> None:
    idle, busy, late = logs = [make(tmp_path, file_bytes=5_000, total_bytes=20_000) for _ in range(3)]

    def write(log: RequestLog, name: str, count: int) -> None:
        due = log.num_written + count
        for number in range(count):
            log.put(captured(id=f"{name}{number}", size=900))
        wait_for(lambda: log.num_written == due, 20, "it is not written")

    for name, log in zip(("idle", "busy", "late"), logs, strict=True):
        write(log, name, 1)
    write(busy, "more", 60)
    for name, log in (("idle", idle), ("late", late)):
        write(log, f"{name} again", 2)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert {"idle0", "late0", "idle again1", "late again1", "more59"} <= {request.id for request in read(tmp_path)}
    for path in tmp_path.iterdir():
        path.unlink()
    write(idle, "after", 1)
    assert [request.id for request in read(tmp_path)] == ["after0"]
    for log in logs:
        log.close()


def test_what_is_larger_than_a_file_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = make(tmp_path, file_bytes=5_000)
    for size in (10, 6_000, 10):
        log.put(captured(size, size, id=str(size)))
    log.close()
    log.close()
    assert (log.num_written, log.num_dropped) == (2, 1)
    assert caplog.text.count("requests captured: 2 written, 1 dropped") == 1


def test_a_slow_disk_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, write = threading.Event(), os.write

    def slow(descriptor: int, data: bytes) -> int:
        goes_on.wait(60)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 100_000)
    log = make(tmp_path)
    for number in range(100):
        log.put(captured(number, 10_000))
    assert log.num_dropped > 80
    goes_on.set()
    log.close()
    assert log.num_written + log.num_dropped == 100
    assert len(read(tmp_path)) == log.num_written
    assert caplog.text.count("requests were not captured, 1 so far: the disk is too slow") == 1


def test_the_bytes_of_a_response_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 10_000)
    log = make(tmp_path)
    for number in range(1, 9):
        request = log.capture(str(number), "/invocations")
        assert request is not None
        request.start(b"{}")
        request.add(b"x" * 3_000)
        request.end({}, (200, "application/json"))
        wait_for(lambda count=number: log.num_written + log.num_dropped == count, 20, "it is not written")
    log.close()
    assert (log.num_written, log.num_dropped) == (8, 0)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.write, iter(range(1000))

    def full(descriptor: int, data: bytes) -> int:
        number = next(calls)
        if number in (2, 4):  # half of the second and the third line
            return write(descriptor, data[: len(data) // 2])
        if number in (3, 5):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    log = make(tmp_path)
    for number in range(5):
        log.put(captured(number))
    log.close()
    assert (log.num_written, log.num_dropped) == (3, 2)
    assert [request.id for request in read(tmp_path)] == ["r0", "r1", "r4"]


def test_a_share_is_chosen(tmp_path: Path) -> None:
    logs = [make(tmp_path, percent=percent) for percent in (0, 20, 100)]
    chosen = [sum(log.capture("r", "/invocations") is not None for _ in range(2_000)) for log in logs]
    for log in logs:
        log.close()
    assert (chosen[0], chosen[2]) == (0, 2_000)
    assert 280 < chosen[1] < 520


def test_it_is_off_by_default_and_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    def configured(*options: str) -> RequestLog | None:
        overrides = ["option.llm_engine=echo", *(f"option.{one}" for one in options)]
        return configured_log(read_config(overrides=overrides, environ={}).checked())

    assert configured() is None
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"capture_requests=.*file: requests cannot be captured in this directory"):
        configured(f"capture_requests={tmp_path / 'file'}")
    new = tmp_path / "directories" / "new"
    with pytest.raises(ConfigError, match=r"capture_total_mb=9: must be at least option.capture_file_mb=10"):
        configured(f"capture_requests={new}", "capture_total_mb=9", "capture_file_mb=10")
    assert not new.parent.exists()
    for _ in range(2):  # the second time it is there
        log = configured(f"capture_requests={new}")
        assert log is not None
        log.close()
        assert new.stat().st_mode & 0o777 == 0o700


def test_requests_of_djl_serving_are_captured(tmp_path: Path) -> None:
    """Its steps take the bytes by a way of their own."""
    log = make(tmp_path)
    bench = Bench(request_log=log)
    bodies = bench.finish(bench.step(ask("a b", 3, stream=True), ask("c d e", 2), {"nope": 1}))
    bench.model.close()
    requests = sorted(read(tmp_path), key=lambda request: request.body)
    assert [request.body for request in requests] == sorted(
        item(body).body for body in (ask("a b", 3, stream=True), ask("c d e", 2), {"nope": 1})
    )
    answers = [request.response for request in requests]
    assert {answer.body for answer in answers if answer} == set(bodies)
    assert {request.path for request in requests} == {"/invocations"}
    assert sorted(answer.status for answer in answers if answer) == [200, 200, 424]


# -- our histogram is rendered as prometheus_client's own --------------------------------------------------------------


BOUNDS = (0.00015, 0.005, 0.5, 1, 60, 2560.0)


def test_it_is_rendered_as_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1700000000.5)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = {"model_name": 'a "b"\n', "engine": "0"}
    mine = Histogram("vllm:time", "Times", BOUNDS, ours, labels)
    its = prometheus_client.Histogram("vllm:time", "Times", [*labels], buckets=BOUNDS, registry=theirs)
    rng = random.Random(0)
    for value in (0.0, *BOUNDS, *(rng.expovariate(1) for _ in range(200)), 1e9):
        mine.observe(value)
        its.labels(*labels.values()).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_without_labels_and_values() -> None:
    registry = CollectorRegistry()
    Histogram("times", "Times", (1.0,), registry)
    text = generate_latest(registry).decode()
    assert 'times_bucket{le="+Inf"} 0.0\ntimes_count 0.0\ntimes_sum 0.0\n' in text


def test_a_value_counts_several_times() -> None:
    registry = CollectorRegistry()
    Histogram("times", "Times", (1.0, 2.0), registry).observe(1.5, 3)
    assert registry.get_sample_value("times_bucket", {"le": "1.0"}) == 0
    assert registry.get_sample_value("times_bucket", {"le": "2.0"}) == 3
    assert registry.get_sample_value("times_sum") == 4.5


# -- one captured request ------------------------------------------------------------------------------------------


class Written(RequestLog):
    """A log whose captures take so many bytes at most; nothing is written to a disk."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, Config(capture_percent=100, capture_file_mb=1, capture_total_mb=1))
        self.ended: list[tuple[Captured, int]] = []

    def put(self, request: Captured, taken: int = 0) -> None:
        self.ended.append((request, taken))


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    log = Written(tmp_path)
    yield log
    log.close()


def begin(log: RequestLog, body: bytes | None = b"{}") -> Capture:
    capture = log.capture("one", "/invocations?a=b")
    assert capture is not None
    if body is not None:
        capture.start(body)
    return capture


def test_a_capture_has_the_request_and_each_piece_of_its_response(written: Written) -> None:
    before = time.time()
    capture = begin(written)
    for piece in (b"a", b"", b"bc"):
        capture.add(piece)
    capture.end({"accept": "*/*"}, (200, "text/plain"))
    capture.end({}, None)
    ((request, taken),) = written.ended
    assert request.id == f"one@{request.at:.6f}"
    assert before <= request.at <= time.time()
    assert request[2:] == (
        "/invocations?a=b",
        {"accept": "*/*"},
        b"{}",
        CapturedResponse(200, "text/plain", [b"a", b"bc"]),
    )
    assert (taken, request.size) == (3, 2 + 3 + 1024)
    begin(written).end({}, None)
    assert (written.ended[1][0].answer, written.ended[1][0].size) == (None, 2 + 1024)


def test_what_was_never_received_is_not_captured(written: Written) -> None:
    capture = begin(written, None)
    capture.add(b"a")
    capture.end({}, (200, "text/plain"))
    assert written.ended == []
    assert written.take(1 << 26), "nothing is held"


def test_a_refusal_takes_the_place_of_the_pieces(written: Written) -> None:
    capture = begin(written)
    capture.add(b"abc")
    capture.replace(b"no")
    capture.end({}, (424, "application/json"))
    assert written.ended[0][0].answer == CapturedResponse(424, "application/json", [b"no"])


def test_a_response_that_finds_no_room_is_not_captured(
    written: Written, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 10)
    capture = begin(written)
    capture.add(b"x" * 10)
    assert not written.take(1)
    capture.add(b"y")
    capture.add(b"z")
    capture.end({}, (200, "text/plain"))
    assert (written.ended, written.num_dropped) == ([], 1)
    assert caplog.messages == ["requests were not captured, 1 so far: the responses in progress need too much memory"]
    assert written.take(10), "its bytes are given back"
    assert not written.take(1)
    written.close()
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 1000)
    assert not written.take(1), "nothing is taken after the end"


def test_dropped_requests_are_told_once_a_minute(
    written: Written, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for seconds in (0.0, 59.9, 0.1, 0.0):
        now += seconds
        written.drop("slow")
    assert caplog.messages == [f"requests were not captured, {count} so far: slow" for count in (1, 3)]


def test_a_bug_costs_one_captured_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = request_log._line

    def fail(request: Captured) -> bytes:
        return line(request) if request.id != "bad" else 1 / 0  # type: ignore[return-value]

    monkeypatch.setattr(request_log, "_line", fail)
    log = make(tmp_path)
    for id in ("a", "bad", "b"):
        log.put(captured(id=id))
    wait_for(lambda: log.take(request_log.MAX_WAITING_BYTES), 20, "not all memory is given back")
    log.close()
    assert [request.id for request in read(tmp_path)] == ["a", "b"]
    assert (log.num_written, log.num_dropped) == (2, 1)
    assert "a bug in the server: a request could not be captured" in caplog.messages
    assert "requests were not captured, 1 so far: a bug in the server" in caplog.messages


def line_size(directory: Path) -> int:
    """Return the number of bytes that a captured request takes in a file."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as other:
        log = make(Path(other))
        log.put(captured())
        log.close()
        (file,) = Path(other).iterdir()
        return file.stat().st_size


def test_a_line_fits_a_file_of_its_size(tmp_path: Path) -> None:
    size = line_size(tmp_path)
    for file_bytes, fits in ((size, True), (size - 1, False), (2 * size, True), (3 * size - 1, True)):
        directory = tmp_path / str(file_bytes)
        directory.mkdir()
        log = make(directory, file_bytes=file_bytes)
        for _ in range(4):
            log.put(captured())
        log.close()
        assert log.num_written == 4 * fits
        per_file = file_bytes // size
        assert len(list(directory.iterdir())) == (4 // per_file if fits else 0)


def test_files_are_named_so_that_they_sort_and_only_their_user_reads_them(tmp_path: Path) -> None:
    size = line_size(tmp_path)
    log = make(tmp_path, file_bytes=size)
    for number in range(3):
        log.put(captured(number))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name.split("-")[-2:] for file in files] == [[str(os.getpid()), f"{n:06}.jsonl"] for n in (1, 2, 3)]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 3
    assert [one.id for one in read(tmp_path)] == ["r0", "r1", "r2"]


def test_a_file_that_was_deleted_is_begun_anew(tmp_path: Path) -> None:
    log = make(tmp_path)
    for number in range(2):
        log.put(captured(number))
        wait_for(lambda count=number: log.num_written == count + 1, 20, "it is not written")
        (file,) = tmp_path.iterdir()
        file.unlink()
    log.put(captured(2))
    log.close()
    assert [one.id for one in read(tmp_path)] == ["r2"]


def test_a_body_that_is_no_text_is_base64(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.put(captured(body=b"\xff\x00", answer=CapturedResponse(200, "a/b", [b"\xc3", b"\xa9"])))
    log.put(captured(answer=None))
    log.close()
    ((first, second),) = (map(json.loads, file.read_text().splitlines()) for file in tmp_path.iterdir())
    assert (first["body_base64"], "body" in first) == ("/wA=", False)
    assert first["answer"] == {"status": 200, "content_type": "a/b", "body": "é"}
    assert (first["at"], "answer" in second) == (12.5, False)


def test_the_memory_of_captured_requests_is_documented() -> None:
    size = f"{request_log.MAX_WAITING_BYTES / (1 << 20):g} MiB"
    assert not undocumented("replay.md", f"{size} are waiting to be written", f"towards these {size}")


def test_what_is_no_file_in_the_directory_stops_no_captures(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "requests-20200101T000000Z-1-000001.jsonl")
    (tmp_path / "requests-20200101T000000Z-1-000002.jsonl").mkdir()
    (tmp_path / "requests-20200101T000000Z-1-000003.jsonl").symlink_to(tmp_path / "nowhere")
    log = make(tmp_path, file_bytes=BIG, total_bytes=BIG)
    log.put(captured(1))
    wait_for(lambda: log.num_written + log.num_dropped == 1, 10, "it waits for the FIFO")
    log.close()
    assert (log.num_written, log.num_dropped) == (1, 0)
    assert len([*tmp_path.iterdir()]) == 4
