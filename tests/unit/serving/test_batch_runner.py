"""The runner of batches: how a batch ends, what is tried again, and which batches run here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import (
    GenerationFailed,
    InvalidPayload,
    Overloaded,
    ServingError,
    TooLarge,
    Unavailable,
)
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.batches import LIFETIME, Line, NewBatch, NewFile
from handler.serving.batches import runner
from handler.serving.batches.runner import BatchInput, BatchOutput, BatchRunner, Held
from handler.serving.batches.store import BatchStore, OpenBatch, output_ids
from tests.limits import WORDS, undocumented
from tests.stepped import Clock

CHAT = "/v1/chat/completions"
GOOD = HttpResponse(200, "application/json", b'{"ok": 1}')
BAD = HttpResponse(400, "application/json", b'{"error": 1}')


def line(id: Any, **body: Any) -> bytes:
    return json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": {"user": id, **body}}).encode()


Answer = tuple[HttpResponse, Sequence[str], ServingError | None]


ENDED = ("completed", "failed", "cancelled", "expired")


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that other threads bring about."""
    never = asyncio.get_running_loop().create_future()
    while not condition():
        await asyncio.wait([never], timeout=0.01)


async def forever(name: str) -> None:
    await asyncio.Event().wait()


class LineTask:
    """The task of one line: its response is the next one that the test has for the line's `user`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.parsed = None
        self.finished = True
        self.ignored: Sequence[str] = ()
        self.error: ServingError | None = None
        self._response = GOOD

    async def parse(self, body: bytes) -> None:
        name = json.loads(body)["user"]
        self._run.asked.append(name)
        if self._run.before is not None:
            await self._run.before(name)
        answers = self._run.answers.get(name, [])
        if answers:
            self._response, self.ignored, self.error = answers.pop(0)

    def run(self) -> None: ...

    def begin(self, work: None) -> None: ...

    def take_whole(self) -> HttpResponse:
        return self._response


class Run:
    """A store with batches, and a runner whose lines are answered as the test says, by their `custom_id`."""

    def __init__(self, directory: Path, *, max_batch_lines: int = 2, **limits: Any) -> None:
        self.config = Config(**{"requests_total_bytes": 1 << 20, **limits})
        self.clock = Clock(1000.0)
        self.store = BatchStore(directory, self.config, self.clock)
        self.availability = SimpleNamespace(draining=False, opened=asyncio.get_running_loop().create_future())
        routes = SimpleNamespace(dialects={CHAT: None}, dialect=lambda endpoint: None)
        model: Any = SimpleNamespace(
            config=self.config,
            open=self._open,
            max_batch_lines=max_batch_lines,
            availability=self.availability,
            admission=SimpleNamespace(routes=routes),
            preprocessor=SimpleNamespace(large_bodies=SimpleNamespace(submit=self._decode_large, decode=json.loads)),
        )
        self.runner = BatchRunner(model, self.store)
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[str] = []
        self.before: Callable[[str], Awaitable[object]] | None = None
        self.decoded: list[int] = []
        self.refusals = 0
        self.waits: list[float] = []

    @contextlib.contextmanager
    def _open(self, headers: Any, dialect: Any, **options: Any) -> Iterator[LineTask]:
        yield LineTask(self)

    def _decode_large(self, size: int, decode: Callable[[], Any]) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("busy")
        self.decoded.append(size)
        value = {"custom_id": "large", "method": "POST", "url": CHAT, "body": {"user": "large"}}
        return SimpleNamespace(result=lambda: (value, 7))

    def create(self, *lines: bytes, owner: str = "ann", endpoint: str = CHAT, text: bytes | None = None) -> str:
        id = self.store.reserve(owner, 1000)
        self.store.path(id).write_bytes(b"\n".join(lines) if text is None else text)
        self.store.keep(id, NewFile("a", LIFETIME, ()))
        return self.store.create(owner, NewBatch(id, endpoint, "24h", 86400, 3600, None, ()))["id"]

    def open(self, id: str) -> OpenBatch:
        return next(one for one in self.store.open_batches(99) if one.batch["id"] == id)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the open batches of the store until the block ends."""
        if not self.availability.opened.done():
            self.availability.opened.set_result(None)
        task = asyncio.ensure_future(self.runner.run())
        try:
            yield task
        finally:
            drained, self.availability.draining = self.availability.draining, True  # a stop drains before it cancels
            task.cancel()
            await asyncio.wait([task])
            self.availability.draining = drained
            assert self.runner.locked == {}, "no batch is left running"

    async def attend(self, id: str) -> Any:
        """Run the open batches until this one has ended."""
        async with self.running():
            await until(lambda: self.batch(id)["status"] in ENDED)
        return self.batch(id)

    def output(self, id: str) -> BatchOutput:
        return BatchOutput(*(self.store.path(file) for file in output_ids(id)))

    def is_free(self, id: str) -> bool:
        """Tell whether no server has locked the output files of a batch."""
        try:
            self.output(id).close()
        except BlockingIOError:
            return False
        return True

    def searches(self) -> list[int]:
        """Record from now on how many batches each search for open batches asks for."""
        limits = list[int]()
        search = self.store.open_batches

        def recorded(limit: int) -> list[OpenBatch]:
            limits.append(limit)
            return search(limit)

        self.store.open_batches = recorded  # type: ignore[assignment, method-assign]
        return limits

    async def search_again(self, searches: list[int]) -> None:
        """Wait until the runner has searched twice more: the batches of the first search have then been started."""
        target = len(searches) + 2

        def searched() -> bool:
            self.store.created.set()
            return len(searches) >= target

        await until(searched)

    def batch(self, id: str, owner: str = "ann") -> Any:
        return self.store.batch(owner, id)

    def files(self, id: str) -> list[list[Any]]:
        """The lines of the output and of the errors, each as its custom_id and its status or code."""
        found = []
        for file in output_ids(id):
            path = self.store.path(file)
            values = map(json.loads, path.read_text().splitlines() if path.exists() else [])
            found.append([
                (one["custom_id"], one["response"]["status_code"] if one["response"] else one["error"]["code"])
                for one in values
            ])  # fmt: skip
        return found


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run an asynchronous story with a `Run`; nobody sleeps."""

    sleep = asyncio.sleep

    async def no_time(seconds: float, *given: Any) -> None:
        waits.append(seconds)
        await sleep(0)

    waits: list[float] = []

    def tell(told: Callable[[Run], Awaitable[None]], **limits: Any) -> None:
        async def main() -> None:
            made = Run(tmp_path, **limits)
            made.waits = waits
            try:
                await told(made)
            finally:
                made.store.close()

        asyncio.run(main())

    monkeypatch.setattr(asyncio, "sleep", no_time)
    return tell


# -- one batch ---------------------------------------------------------------------------------------------------


def test_each_line_is_answered_in_one_of_two_files(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"), b"", line("b"), b"{", line(""), line("c"))
        run.answers["b"] = [(BAD, ("x",), InvalidPayload("no"))]
        batch = await run.attend(id)
        good, bad = run.files(id)
        assert sorted(good) == [("a", 200), ("c", 200)]
        assert sorted(bad, key=str) == [
            ("b", 400), (None, "invalid_json_line"), (None, "missing_required_parameter"),
        ]  # fmt: skip
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 5, "completed": 2, "failed": 3})
        assert (batch["in_progress_at"], batch["finalizing_at"], batch["completed_at"]) == (1000, 1000, 1000)
        assert run.store.open_batches(9) == []

    story(told)


def test_the_end_of_a_batch_starts_the_next(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        first, second = (run.create(line(name)) for name in "ab")
        statuses: list[str] = []
        wake = run.store.created.set

        def woken() -> None:
            statuses.append(run.batch(first)["status"])
            wake()

        run.store.created.set = woken  # type: ignore[method-assign]
        await run.attend(second)
        assert statuses[0] == "completed"
        assert run.asked == ["a", "b"]

    story(told, max_batch_lines=1)


def test_what_the_engine_fails_is_tried_three_times(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("fails"), line("heals"), line("own fault"))
        failure = (HttpResponse(424, "application/json", b"{}"), (), GenerationFailed("it died"))
        run.answers["fails"] = [failure] * 9
        run.answers["heals"] = [failure, failure]
        run.answers["own fault"] = [(BAD, (), InvalidPayload("no"))]
        await run.attend(id)
        assert [run.asked.count(name) for name in ("fails", "heals", "own fault")] == [3, 3, 1]
        assert sorted(run.files(id)[1]) == [("fails", 424), ("own fault", 400)]
        assert sorted(run.waits) == [0.5, 0.5, 1.0, 1.0]

    story(told)


def test_a_line_waits_while_the_engine_is_unavailable(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"))
        busy = (HttpResponse(503, "application/json", b"{}"), (), Overloaded("full"))
        run.answers["a"] = [busy] * 7
        await run.attend(id)
        assert run.files(id) == [[("a", 200)], []]
        assert run.waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]

    story(told)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (b"\n", ["empty_file"]),
        (line("a") + b"\n" + line("a"), ["duplicate_custom_id"]),
        (line("a").replace(b"/v1/chat", b"/v1/other"), ["url_mismatch"]),
        (b"\n".join(line(str(number)) for number in range(4)), ["too_many_tasks"]),
        (b"\n".join([line("a").replace(b"/v1/chat", b"/v1/other"), line("a"), line("b"), line("c")]),
         ["url_mismatch", "duplicate_custom_id", "too_many_tasks"]),
    ],
)  # fmt: skip
def test_a_file_that_is_none_fails_the_batch_unread(text: bytes, codes: list[str], story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        batch = await run.attend(run.create(text=text))
        assert (batch["status"], run.asked) == ("failed", [])
        assert [error["code"] for error in batch["errors"]["data"]] == codes

    story(told, batches_max_lines=3)


def test_a_batch_lists_a_hundred_errors_at_most(tmp_path: Path) -> None:
    wrong = [line(str(number)).replace(b"/v1/chat", b"/v1/other") for number in range(150)]
    (tmp_path / "input").write_bytes(b"\n".join(wrong))
    total, errors = BatchInput(tmp_path / "input", CHAT, Config(), json.loads).check()
    assert (len(errors), total) == (100, 100)
    (tmp_path / "input").write_bytes(b"\n".join([line("a")] * 100))
    total, errors = BatchInput(tmp_path / "input", CHAT, Config(), json.loads).check()
    assert (total, [error["line"] for error in errors]) == (100, [*range(2, 101)])


def test_a_line_of_a_mib_is_decoded_apart_and_waits_for_room(
    story: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    async def told(run: Run) -> None:
        large = line("x", text="a" * (1 << 20))
        run.refusals = 1
        id = run.create(large, large[: (1 << 20) - 1])
        await run.attend(id)
        assert set(run.decoded) == {len(large) + 1}
        assert (run.files(id)[0], slept) == ([("large", 200)], [runner.LOOK_SECONDS])
        assert run.files(id)[1] == [(None, "invalid_json_line")]

    story(told)


def test_a_line_that_contains_too_much_has_an_error_of_its_own(tmp_path: Path) -> None:
    def refuse(text: bytes) -> Any:
        raise TooLarge("the body contains more than 5 numbers")

    (tmp_path / "input").write_bytes(line("x", text="a" * (1 << 20)) + b"\n" + line("b"))
    first, second = BatchInput(tmp_path / "input", CHAT, Config(), refuse)
    assert (first.error and first.error[:2], second.custom_id) == (
        ("line_too_large", "the body contains more than 5 numbers"),
        "b",
    )


def test_a_batch_of_another_model_fails(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        batch = await run.attend(run.create(line("a"), endpoint="/v1/embeddings"))
        assert batch["status"] == "failed"
        assert batch["errors"]["data"] == [
            {"code": "invalid_endpoint", "message": "'endpoint' /v1/embeddings is not served", "param": "endpoint",
             "line": None},
        ]  # fmt: skip

    story(told)


def test_a_batch_that_is_cancelled_keeps_what_it_has(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(*(line(name) for name in "abcd"))

        async def cancel(name: str) -> None:
            await asyncio.to_thread(run.store.cancel, "ann", id)
            if name != "a":
                await asyncio.Event().wait()

        run.before = cancel
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "LOOK_SECONDS", 0.0)
            patch.setattr(run.runner, "share", lambda owner: 1)
            batch = await run.attend(id)
        assert (batch["status"], batch["request_counts"]["total"]) == ("cancelled", 4)
        good, rest = run.files(id)
        assert [name for name, _ in good] == ["a"]
        assert rest == [(name, "batch_cancelled") for name in "bcd"]

    story(told)


def test_a_batch_cancelled_before_its_start_has_no_lines(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"))
        run.store.cancel("ann", id)
        batch = await run.attend(id)
        assert (batch["status"], run.asked, run.files(id)) == ("cancelled", [], [[], []])

    story(told)


def test_what_is_left_at_the_end_of_the_window_is_expired(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"), line("b"))
        one = run.open(id)
        run.clock.now = one.batch["expires_at"] - 1
        run.clock.now += 1
        batch = await run.attend(id)
        assert (batch["status"], run.asked) == ("expired", [])
        assert run.files(id) == [[], [("a", "batch_expired"), ("b", "batch_expired")]]
        assert batch["expired_at"] == int(run.clock.now)

    story(told)


@pytest.mark.parametrize("status", ["completed", "cancelled", "expired"])
def test_a_batch_whose_lines_are_all_written_ends_as_it_would_have(status: str, story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"))
        counts = {"total": 1, "completed": 0, "failed": 0}
        change: dict[str, Any] = {"status": "in_progress", "in_progress_at": 1000, "request_counts": counts}
        if status == "expired":
            change["expired_at"] = 1000
        run.store.advance(id, (0, 0), change)
        if status == "cancelled":
            run.store.cancel("ann", id)
        output = run.output(id)
        output.write(1, b'{"id":"batch_req_x_1","custom_id":"a","response":{"status_code":200}}\n', failed=False)
        output.close()
        batch = await run.attend(id)
        assert (batch["status"], run.asked, run.files(id)) == (status, [], [[("a", 200)], []])

    story(told)


def test_a_server_that_stops_leaves_the_batch_to_the_next(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"), line("b"))

        async def drain(name: str) -> None:
            run.availability.draining = True

        run.before = drain
        async with run.running():
            await until(lambda: run.asked and not run.runner.locked)
        assert run.batch(id)["status"] == "in_progress"
        assert not run.store.created.is_set(), "no other batch is started"
        run.availability.draining, run.before = False, None
        assert (await run.attend(id))["status"] == "completed"
        assert sorted(run.files(id)[0]) == [("a", 200), ("b", 200)]

    story(told)


def test_a_batch_that_another_server_has_ended_is_left_alone(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"))
        stale = [run.open(id)]
        run.store.end(id, "failed")
        for file in output_ids(id):
            run.store.path(file).touch()
        searches: list[int] = []

        def search(limit: int) -> list[OpenBatch]:
            searches.append(limit)
            return stale if len(searches) == 1 else []

        run.store.open_batches = search  # type: ignore[assignment, method-assign]
        async with run.running():
            await until(lambda: len(searches) > 1)
        assert (run.batch(id)["status"], run.asked, run.files(id)) == ("failed", [], [[], []])

    story(told)


def test_a_batch_that_another_server_ends_meanwhile_is_left_alone(
    story: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.0)

    async def told(run: Run) -> None:
        id = run.create(line("a"))

        async def end(name: str) -> None:
            await asyncio.to_thread(run.store.end, id, "cancelled")
            await forever(name)

        run.before = end
        async with run.running():
            await until(lambda: run.asked and not run.runner.locked)
        assert (run.batch(id)["status"], run.batch(id)["errors"]) == ("cancelled", None)
        assert run.files(id) == [[], []]

    story(told)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(28, "No space left on device"), "storage_error", "No space left on device"),
        (OSError(), "storage_error", "the disk has failed"),
        (TooLarge("the files of this API key have too many bytes"), "storage_error", "the files of this API key have"),
        (ValueError("x"), "internal_error", "The batch failed because of a bug in the server; see its log."),
    ],
)
def test_a_batch_that_cannot_go_on_says_why(
    error: Exception, code: str, words: str, story: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"))

        async def fail(name: str) -> None:
            raise error

        run.before = fail
        batch = await run.attend(id)
        (found,) = batch["errors"]["data"]
        assert (batch["status"], found["code"]) == ("failed", code)
        assert found["message"].startswith(words)
        assert f"batch {id}" in caplog.messages[-1]

    story(told)


def test_a_store_that_fails_is_tried_again_later(story: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"))

        def fail(*given: Any) -> Any:
            raise OSError("broken")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.store, "advance", fail)
            async with run.running():
                await until(lambda: caplog.messages and not run.runner.locked)
        assert run.batch(id)["status"] == "validating"
        assert caplog.messages == ["the files and batches cannot be read or written: broken"]
        assert (await run.attend(id))["status"] == "completed"
        with pytest.raises(Unavailable, match=r"^the files and batches cannot be read or written$"):
            await run.store.call(fail)

    story(told)


def test_a_batch_that_runs_elsewhere_is_not_touched(
    story: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    passed = [0.0]
    monotonic = time.monotonic

    def open_output(answers: Path, errors: Path) -> BatchOutput:
        opened.append(answers)
        return BatchOutput(answers, errors)

    monkeypatch.setattr(runner, "BatchOutput", open_output)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])

    async def told(run: Run) -> None:
        id = run.create(line("a"))
        searches = run.searches()
        elsewhere = run.output(id)
        async with run.running():
            await until(lambda: len(searches) == 2)
            elsewhere.close()
            await run.search_again(searches)
            assert searches == [2 + 16, *[2 + 1 + 16] * (len(searches) - 1)], "it does not take a batch's place"
            assert (len(opened), run.batch(id)["status"], run.asked) == (1, "validating", [])
            passed[0] = 11.0  # until all are looked at again
            await until(lambda: run.batch(id)["status"] == "completed")
        assert run.asked == ["a"]

    story(told)


# -- which batches run here --------------------------------------------------------------------------------------


def test_as_many_batches_run_as_lines_and_old_ones_of_others(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        own = [run.create(line(name)) for name in ("first", "second", "third")]
        others = [run.create(line(owner), owner=owner) for owner in ("bob", "cid")]
        batches = [run.open(id) for id in (*own, *others)]
        searches: list[int] = []

        def search(limit: int) -> list[OpenBatch]:
            searches.append(limit)
            return batches

        run.store.open_batches = search  # type: ignore[assignment, method-assign]
        run.before = forever
        async with run.running():
            await until(lambda: len(run.asked) == 2)
            run.clock.now += 20
            await run.search_again(searches)
            assert {*run.runner.locked} == {*own[:2]}, "nobody has waited long"
            run.clock.now += 1
            await run.search_again(searches)
            await until(lambda: len(run.asked) == 4)
            assert {*run.runner.locked} == {*own[:2], *others}
        assert sorted(run.asked) == ["bob", "cid", "first", "second"]

    story(told)


def test_a_batch_that_is_too_much_stops_another_that_is_not_wanted(
    story: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.0)

    async def told(run: Run) -> None:
        ann, bob, cid = (run.open(run.create(line(owner), owner=owner)) for owner in ("ann", "bob", "cid"))
        batches = [ann, bob]
        run.store.open_batches = lambda limit: batches  # type: ignore[assignment, method-assign]
        run.before = forever
        async with run.running():
            await until(lambda: len(run.asked) == 2)
            batches[1] = cid
            run.store.created.set()
            await until(lambda: "cid" in run.asked)
            assert {*run.runner.locked} == {ann.batch["id"], cid.batch["id"]}
        assert run.batch(bob.batch["id"], "bob")["status"] == "in_progress", "for a later start"

    story(told)


def test_a_batch_that_is_too_much_when_it_opens_stops_itself(
    story: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = threading.Event()
    waiting: list[Path] = []

    def open_output(answers: Path, errors: Path) -> BatchOutput:
        if not waiting:
            waiting.append(answers)
            may_open.wait()
        return BatchOutput(answers, errors)

    monkeypatch.setattr(runner, "BatchOutput", open_output)

    async def told(run: Run) -> None:
        late, *two = (run.open(run.create(line(owner), owner=owner)) for owner in ("ann", "bob", "cid"))
        batches = [late]
        run.store.open_batches = lambda limit: batches  # type: ignore[assignment, method-assign]
        run.before = forever
        async with run.running():
            await until(lambda: waiting)
            batches[:] = two
            run.store.created.set()
            await until(lambda: len(run.asked) == 2)
            may_open.set()
            await until(lambda: run.batch(late.batch["id"])["status"] == "in_progress")
            await until(lambda: "ann" in run.asked or run.is_free(late.batch["id"]))
            assert {*run.runner.locked} == {opened.batch["id"] for opened in two}
        assert sorted(run.asked) == ["bob", "cid"]

    story(told)


@pytest.mark.parametrize(
    ("most", "locked", "share"),
    [
        (8, [], 8), (8, ["ann"], 8), (8, ["ann", "bob"], 8), (8, ["bob"], 8), (8, ["ann", "ann"], 4),
        (8, ["ann", "ann", "bob", "cid"], 2), (8, ["bob", "cid"], 5), (2, ["a", "b", "c", "d", "ann"], 1),
    ],
)  # fmt: skip
def test_owners_share_the_lines_in_memory(most: int, locked: list[str], share: int, story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        run.runner.locked = {str(number): owner for number, owner in enumerate(locked)}
        assert run.runner.share("ann") == share

    story(told, max_batch_lines=most)


def test_the_runner_begins_when_the_model_is_open_and_ends_when_it_drains(story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        id = run.create(line("a"))
        task = asyncio.ensure_future(run.runner.run())
        await asyncio.sleep(0)
        assert run.asked == []
        run.availability.opened.set_result(None)
        while run.batch(id)["status"] != "completed":
            await asyncio.wait([task], timeout=0.01)
        assert not task.done()
        run.availability.draining = True
        run.store.created.set()
        await task

    story(told)


@pytest.mark.parametrize("iterations", range(6))
def test_a_runner_that_is_cancelled_while_a_batch_is_created_ends(iterations: int, story: Callable[..., None]) -> None:
    async def told(run: Run) -> None:
        waiting, wait = asyncio.Event(), run.store.created.wait

        def waits() -> Awaitable[bool]:
            waiting.set()
            return wait()

        run.availability.opened.set_result(None)
        run.store.created.wait = waits  # type: ignore[assignment, method-assign]
        task = asyncio.ensure_future(run.runner.run())
        await waiting.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        run.store.created.set()
        for _ in range(iterations):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()

    story(told)


def test_a_runner_outlives_what_fails_to_begin(story: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def told(run: Run) -> None:
        run.availability.opened.set_result(None)
        calls = 0

        def open_batches(most: int) -> Any:
            nonlocal calls
            calls += 1
            run.store.created.set()
            assert most == 2 + 16
            if calls == 1:
                raise ValueError("x")
            if calls == 2:
                raise OSError("broken")
            run.availability.draining = True
            return []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.store, "open_batches", open_batches)
            await run.runner.run()
        assert calls == 3
        assert caplog.messages == [
            "a bug in the server: open batches could not be started",
            "the files and batches cannot be read or written: broken",
        ]

    story(told)


def test_lines_in_memory_are_counted_until_they_are_answered() -> None:
    async def reads() -> None:
        held = Held(10)
        with held.line(Line(1, "a", b"x" * 9)):
            assert await held.read(lambda: None) is None, "one more fits"
            with held.line(Line(2, "b", b"y")):
                reading = asyncio.ensure_future(held.read(lambda: Line(3, "c")))
                await asyncio.wait([reading], timeout=0.02)
                assert not reading.done()
            assert (await reading) == Line(3, "c")
        with held.line(Line(4, "d", b"x" * 9)):
            assert await asyncio.wait_for(held.read(lambda: None), 60) is None, "nothing else is counted any more"

    asyncio.run(reads())


def test_the_tries_and_errors_of_a_batch_are_documented() -> None:
    assert not undocumented(
        "wire/batches.md",
        f"`errors` lists up to {runner.MAX_ERRORS} lines",
        f"If the engine fails {WORDS[runner.TRIES]} times on a line",
    )
