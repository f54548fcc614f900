"""The adapters that workers of one model share: what each knows, whoever was told, and whoever has died."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from handler.core.errors import ServingError
from handler.djl import modes, shared_adapters, startup, wire
from handler.djl.batches import Item
from handler.djl.modes import AdapterCalls
from handler.djl.shared_adapters import SharedAdapters
from handler.plugins.functions import AdapterFormatters
from handler.scheduler.lora import AdapterHome, AdapterRegistry, AdapterRoots
from handler.serving import sessions
from handler.serving.model import ServedAdapters
from tests.doubles.djl_python import Input
from tests.stepped import Bench, benches
from tests.user_files import write_adapter

__all__ = ["benches"]


class Worker:
    """A worker whose engine loads adapters when they are needed, in a directory that all workers share."""

    def __init__(self, home: Path, *, patience: float = 60, is_notified: bool = False) -> None:
        at_start = {path.name: path for path in sorted((home / "model" / "adapters").glob("*"))}
        self.registry = AdapterRegistry()
        roots = AdapterRoots([home])
        adapters = ServedAdapters(AdapterHome(self.registry, at_start, roots), lambda: None, AdapterFormatters())
        for name, path in at_start.items():
            self.registry.register(name, path, lambda outcome: None, preload=False)
        self.adapters = adapters
        self.shared = SharedAdapters(home / "shared", home / "model", adapters, patience, is_notified=is_notified)

    async def started(self) -> Worker:
        await self.shared.begin()
        return self

    async def register(self, name: str, path: Path) -> None:
        async with self.shared.change(name):
            await self.adapters.register(name, str(path), preload=False)

    async def update(self, name: str, path: Path) -> None:
        async with self.shared.change(name):
            await self.adapters.update(name, str(path), preload=False)

    async def unregister(self, name: str) -> None:
        async with self.shared.change(name):
            self.adapters.unregister(name)

    def known(self) -> dict[str, tuple[int, str]]:
        return {entry.adapter.name: (entry.number, entry.adapter.path) for entry in self.registry}

    def ids(self) -> dict[str, int]:
        return {entry.adapter.name: entry.adapter.id for entry in self.registry}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("model/adapters/first", "model/adapters/second", "other", "other2"):
        write_adapter(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("seed", range(8))
def test_every_worker_knows_what_was_registered_last(home: Path, seed: int) -> None:
    """Whoever is told of a change, and whoever has been replaced since."""
    draw = random.Random(seed)
    paths = [home / "other", home / "other2"]
    first, second = (home / "model" / "adapters" / name for name in ("first", "second"))
    expected = {"first": (1, str(first)), "second": (2, str(second))}
    number = 2

    async def run() -> None:
        nonlocal number
        workers = [await Worker(home).started() for _ in range(3)]
        for _ in range(40):
            place, path = draw.randrange(3), draw.choice(paths)
            worker, name = workers[place], draw.choice(["first", "second", "a", "b", "c"])
            others = [other for other in workers if other is not worker]
            before = {other: other.ids() for other in others}
            match draw.choice(["register", "update", "unregister", "replace"]):
                case "replace":
                    workers[place] = await Worker(home).started()
                    assert workers[place].known() == expected
                case "register" if name not in expected:
                    await worker.register(name, path)
                    number += 1
                    expected[name] = (number, str(path))
                case "update" if name in expected:
                    await worker.update(name, path)
                    expected[name] = (expected[name][0], str(path))
                    for other in others:
                        await other.shared.take_over()
                        assert other.ids()[name] != before[other].get(name), "it would answer with the old weights"
                case "unregister" if name in expected:
                    await worker.unregister(name)
                    del expected[name]
            for each in draw.sample(workers, 2):
                await each.shared.take_over()
                assert each.known() == expected
                assert not each.shared.is_behind
        for each in workers:
            await each.shared.take_over()
            assert each.known() == expected

    asyncio.run(run())


def test_a_call_that_fails_changes_nothing_for_anyone(home: Path) -> None:
    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        before = one.known()
        with pytest.raises(ServingError):
            await one.register("bad", home / "absent")
        assert not other.shared.is_behind
        assert one.known() == before

    asyncio.run(run())


def test_a_change_that_cannot_be_written_is_refused_and_forgotten(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        before = one.known()
        with monkeypatch.context() as patch:
            patch.setattr(SharedAdapters, "_write", raising(OSError(28, "No space left on device")))
            with pytest.raises(ServingError, match="adapter a: No space left on device"):
                await one.register("a", home / "other")
        await one.shared.take_over()
        assert one.known() == other.known() == before

    asyncio.run(run())


@pytest.mark.parametrize("name", ["a", "first"])
def test_a_change_that_is_given_up_after_it_was_made_is_forgotten(home: Path, name: str) -> None:
    """As when the time of a call ends while the engine loads the adapter."""

    async def give_up(one: Worker) -> None:
        async with one.shared.change(name):
            change = one.adapters.update if name in one.known() else one.adapters.register
            await change(name, str(home / "other"), preload=False)
            raise asyncio.CancelledError

    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        before = one.known()
        with pytest.raises(asyncio.CancelledError):
            await give_up(one)
        assert one.known() != before
        assert one.shared.is_behind
        assert not other.shared.is_behind
        await one.shared.take_over()
        assert one.known() == other.known() == before

    asyncio.run(run())


def test_a_worker_that_finds_fewer_adapters_beside_the_model_takes_over_all_numbers(home: Path) -> None:
    write_adapter(home / "model" / "adapters" / "between")

    async def run() -> None:
        one = await Worker(home).started()
        (home / "model" / "adapters" / "between").rename(home / "kept")
        await one.update("between", home / "kept")
        replacing = await Worker(home).started()
        assert replacing.known() == one.known()
        names = ("between", "first", "second")
        for number, name in enumerate(names, 1):
            adapter = replacing.registry.by_number(number)
            assert adapter is not None
            assert adapter.name == name
        for name in names:
            await replacing.unregister(name)
        assert replacing.known() == {}

    asyncio.run(run())


def raising(error: Exception) -> object:
    def fail(*arguments: object) -> None:
        raise error

    return fail


def test_an_adapter_whose_code_this_worker_cannot_load_is_unknown_to_it_alone(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        await one.register("a", home / "other")
        await one.register("b", home / "other2")
        (home / "other" / "model.py").write_text("import a_package_that_is_absent\n")
        await other.shared.take_over()
        assert sorted(other.known()) == ["b", "first", "second"]
        assert not other.shared.is_behind
        await other.register("c", home / "other2")  # a change of its own
        await one.shared.take_over()
        assert sorted(one.known()) == ["a", "b", "c", "first", "second"]
        with pytest.raises(ServingError):
            await other.unregister("b-absent")
        async with other.shared.change("a"):  # as DJL's call does, which ignores that it has no such adapter
            pass
        await one.shared.take_over()
        assert sorted(one.known()) == ["b", "c", "first", "second"]

    asyncio.run(run())
    assert "cannot take over a change of the adapter a: " in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"adapters": {"a": 1}}', '{"adapters": {"a": ["/x", 1]}}', '{"adapters": {}}',
     '{"adapters": [], "next": 1}', '{"adapters": {}, "next": "x"}', '{"adapters": {}, "next": null}'],
)  # fmt: skip
def test_a_damaged_document_changes_nothing(home: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        one = await Worker(home).started()
        (document,) = (home / "shared").glob("*.json")
        document.write_text(text)
        for _ in range(5):
            if one.shared.is_behind:  # as each request asks
                await one.shared.take_over()
        assert not one.shared.is_behind
        assert caplog.text.count("cannot read the adapters of the other workers") == 1
        assert sorted(one.known()) == ["first", "second"]
        await one.register("a", home / "other")  # which mends the document
        assert sorted((await Worker(home).started()).known()) == ["a", "first", "second"]

    asyncio.run(run())


def test_a_document_that_cannot_be_read_now_is_read_later(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        await one.register("a", home / "other")
        monkeypatch.setattr(shared_adapters, "RETRY", 0)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", raising(OSError(24, "Too many open files")))
            await other.shared.take_over()
        assert "a" not in other.known()
        assert other.shared.is_behind
        await other.shared.take_over()
        assert other.known() == one.known()
        assert not other.shared.is_behind

    asyncio.run(run())


@pytest.mark.parametrize("change", ["register", "update"])
def test_what_could_not_be_taken_over_is_tried_again(home: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        name = "first" if change == "update" else "a"
        await getattr(one, change)(name, home / "other")
        code = home / "other" / "model.py"
        code.write_text("import a_package_that_is_absent\n")
        before = other.known()
        monkeypatch.setattr(shared_adapters, "RETRY", 0)
        for _ in range(2):
            assert other.shared.is_behind
            await other.shared.take_over()
            assert other.known() == before
        code.unlink()
        await other.shared.take_over()
        assert other.known() == one.known()
        assert not other.shared.is_behind

    asyncio.run(run())


def test_a_deletion_that_cannot_be_written_is_undone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(SharedAdapters, "_write", raising(OSError(28, "No space left on device")))
            with pytest.raises(ServingError, match="adapter first: No space left on device"):
                await one.unregister("first")
        await one.shared.take_over()
        assert one.known() == other.known()
        assert "first" in one.known()

    asyncio.run(run())


def test_a_worker_that_was_stopped_in_its_change_does_not_stop_the_others(home: Path) -> None:
    async def run() -> None:
        one = await Worker(home, patience=0).started()
        before = one.known()
        with locked(home, "a"):
            with pytest.raises(ServingError, match="another worker's change has not ended"):
                await one.register("b", home / "other")
            with pytest.raises(OSError, match="another worker's change has not ended"):
                await Worker(home, patience=0).started()
        assert one.known() == before
        await one.register("b", home / "other")
        assert "b" in one.known()

    asyncio.run(run())


def test_models_do_not_share_and_others_cannot_read(home: Path) -> None:
    async def run() -> None:
        one = await Worker(home).started()
        await one.register("a", home / "other")
        another = SharedAdapters(home / "shared", home / "another", Worker(home).adapters, 60)
        await another.begin()
        assert not another.is_behind

    asyncio.run(run())
    assert (home / "shared").stat().st_mode & 0o777 == 0o700
    assert sorted("a" in json.loads(file.read_text())["adapters"] for file in (home / "shared").glob("*.json")) == [
        False,
        True,
    ]


def test_where_java_tells_every_worker_only_a_start_takes_over(home: Path) -> None:
    """Before 0.31, a worker may be told late what another has undone since."""

    async def run() -> None:
        one, other = [await Worker(home, is_notified=True).started() for _ in range(2)]
        await one.register("a", home / "other")
        assert not other.shared.is_behind
        assert "a" in (await Worker(home, is_notified=True).started()).known()

    asyncio.run(run())


@contextmanager
def locked(home: Path, name: str) -> Iterator[None]:
    """Another worker that is changing an adapter."""
    (file,) = (home / "shared").glob("*.lock")
    descriptor = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.pwrite(descriptor, name.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def test_a_worker_waits_for_the_change_of_another_and_not_for_its_ghost(home: Path) -> None:
    async def run() -> None:
        one = await Worker(home).started()
        assert one.shared.changing() is None
        with locked(home, "a"):
            assert one.shared.changing() == "a"
            change = asyncio.create_task(one.register("b", home / "other"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not change.done()
        assert one.shared.changing() is None, "a worker that has died holds no lock"
        await change
        assert one.shared.changing() is None

    asyncio.run(run())


def test_a_request_waits_for_another_workers_change_of_its_adapter(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In async mode, Java says 200 before any worker has read the call."""
    looks: list[str | None] = []

    async def run() -> None:
        one, other = [await Worker(home).started() for _ in range(2)]
        bench_calls = AdapterCalls(Bench.opened[0].model, other.shared)
        look = SharedAdapters.changing

        def looked(shared: SharedAdapters) -> str | None:
            looks.append(look(shared))
            return looks[-1]

        monkeypatch.setattr(SharedAdapters, "changing", looked)
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            async with one.shared.change("a"):
                begun.set()
                await go.wait()
                await one.adapters.register("a", str(home / "other"), preload=False)

        change = asyncio.create_task(slow())
        await begun.wait()
        await bench_calls.catch_up(Item(b'{"inputs": "x"}', {}))  # names no adapter
        assert "a" not in other.known()
        waiting = asyncio.create_task(bench_calls.catch_up(Item(b"{}", {"x-amzn-sagemaker-adapter-identifier": "a"})))
        while looks.count("a") < 4:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        go.set()
        await change
        await waiting
        assert "a" in other.known()

    Bench()
    asyncio.run(run())


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_calls_and_requests_of_a_stepped_worker_go_by_what_others_have_done(mode: str, home: Path) -> None:
    async def begun() -> Worker:
        return await Worker(home).started()

    bench = Bench(mode)
    one, other = bench.loop.run(begun()), bench.loop.run(begun())
    kind: modes.Rolling | modes.Dynamic = modes.Dynamic(bench.model, bench.loop, shared=other.shared)
    if mode == "auto":
        kind = modes.Rolling(bench.model, bench.loop, wire.installed_version(), shared=other.shared)
    bench.loop.run(one.register("a", home / "other"))
    assert "a" not in other.known()
    request = Input({"batch_size": "1"}, {"batch_000.data": b'{"inputs": "a"}'})
    kind.answer(request)
    assert "a" in other.known()


def test_workers_of_another_user_share_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "_MEMORY", home)
    (home / "sagemaker_sessions").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    bench = Bench()
    assert bench.loop.run(startup.shared_adapters(bench.model, home, is_notified=False)) is None
    assert "created by another user" in caplog.text
