"""LoRA adapters of llama-server: each response is the adapter's own, whatever the server remembers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.core.values import Adapter, Finish, Sampling
from handler.engines.base import EngineRequest
from handler.engines.remote import engine as remote_engine
from handler.engines.remote import servers
from tests.checkpoints import byte_gguf
from tests.checkpoints.lora_gguf import write_lora
from tests.doubles import llama_server, tiny
from tests.doubles.llama_server import LlamaServer
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL, ask, engine, own, pieces_of
from tests.process.engines.openai.test_bad_servers import run

SAMPLING = Sampling(max_new_tokens=12, logprobs=False, ignore_eos=True)
LONG, OTHER = [65 + place % 20 for place in range(40)], [97 + place % 20 for place in range(40)]
Served = LlamaServer | RealServer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_PAUSE", 0.01)
    monkeypatch.setattr(servers, "_PAUSE", 0.01)


class Lab(NamedTuple):
    """A server with two adapters and one slot, and the directory of its tokenizer."""

    server: Served
    model: Path
    adapters: Sequence[Adapter | None]

    def own(self, prompt: Sequence[int], adapter: Adapter | None, count: int = 12) -> list[int]:
        """The server's own response, for which it computes the whole prompt."""
        scales = [{"id": id, "scale": float(adapter is not None and adapter.id == id + 1)} for id in range(2)]
        more: dict[str, Any] = {"lora": scales, "cache_prompt": False, "ignore_eos": True, "n_predict": count}
        return list(own(self.server, prompt, **more)["tokens"])


@contextlib.contextmanager
def double(directory: Path, *names: str, num_slots: int = 1) -> Iterator[LlamaServer]:
    with llama_server.listening(pieces_of(directory), num_slots) as server:
        server.adapters = [(f"/models/{name}.gguf", 1.0) for name in names]
        yield server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=REAL)])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Lab]:
    if request.param == "double":
        with double(tokenizer, "sql", "poem") as server:
            yield Lab(server, tokenizer, adapters(server))
        return
    directory = byte_gguf.make(tmp_path_factory.mktemp("bytes"))
    files = [write_lora(directory / f"{name}.gguf", seed) for seed, name in enumerate(("sql", "poem"))]
    flags = ("--lora", ",".join(map(str, files)))
    with real.running(directory / "model.gguf", pieces_of(directory), 1, *flags) as found:
        paths = [Adapter(path.stem, id, str(path)) for id, path in enumerate(files, 1)]
        yield Lab(found, directory, (None, *paths))


def adapters(server: LlamaServer) -> Sequence[Adapter | None]:
    paths = [Path(path) for path, _ in server.adapters]
    return (None, *(Adapter(path.stem, id, str(path)) for id, path in enumerate(paths, 1)))


def test_each_response_is_that_of_its_adapter(lab: Lab) -> None:
    with engine(lab.model, lab.server, enable_lora=True) as found:
        assert [name for name, _ in found.info.adapters] == ["sql", "poem"]
        expected = [lab.own(LONG, adapter) for adapter in lab.adapters]
        assert len({*map(tuple, expected)}) == 3
        for key, adapter in enumerate(lab.adapters, 1):
            if adapter is not None:
                found.load_adapter(adapter)
            found.add(EngineRequest(key, LONG, SAMPLING, adapter))
        results = run(found, 1, 2, 3)
        assert [results[key].ids for key in (1, 2, 3)] == expected


def test_no_prompt_that_another_adapter_has_computed_is_used(lab: Lab) -> None:
    """llama-server itself answers wrongly here: it keeps earlier prompts without their adapters."""
    base, sql, poem = lab.adapters
    steps = [(LONG, sql), (OTHER, sql), (OTHER, poem), (LONG, poem), (OTHER, base), (LONG, base), (LONG, sql)]
    reused = [_own(lab, prompt, adapter) for prompt, adapter in steps]
    expected = [lab.own(prompt, adapter) for prompt, adapter in steps]
    assert reused != expected, "then this engine may let the server use its memory"
    with engine(lab.model, lab.server, enable_lora=True) as found:
        for key, (prompt, adapter) in enumerate(steps, 1):
            found.add(EngineRequest(key, prompt, SAMPLING, adapter))
            assert run(found, key)[key].ids == expected[key - 1]


def _own(lab: Lab, prompt: Sequence[int], adapter: Adapter | None) -> list[int]:
    """The server's own response, for which it may use what it remembers."""
    scales = [{"id": id, "scale": float(adapter is not None and adapter.id == id + 1)} for id in range(2)]
    return list(own(lab.server, prompt, lora=scales, ignore_eos=True, n_predict=12, cache_prompt=True)["tokens"])


def test_log_probabilities_are_the_adapters(lab: Lab) -> None:
    sampling = SAMPLING._replace(logprobs=True, top_logprobs=2, max_new_tokens=6)
    with engine(lab.model, lab.server, enable_lora=True) as found:
        for key, adapter in enumerate(lab.adapters, 1):
            found.add(EngineRequest(key, LONG, sampling, adapter))
        results = run(found, 1, 2, 3)
        for key, adapter in enumerate(lab.adapters, 1):
            assert results[key].ids == lab.own(LONG, adapter, 6)


def test_without_the_option_adapters_are_refused_and_the_server_is_as_it_was_started(tokenizer: Path) -> None:
    with double(tokenizer, "sql") as server, engine(tokenizer, server) as found:
        assert not found.info.adapters
        expected = own(server, LONG, ignore_eos=True, n_predict=12)["tokens"]
        assert ask(found, SAMPLING, LONG).ids == expected
        assert "lora" not in server.received[-1]
        assert not server.asked["/lora-adapters"]
        with pytest.raises(ValueError, match=r"without option\.enable_lora=true"):
            found.load_adapter(Adapter("sql", 1, "/models/sql.gguf"))


def test_an_older_server_that_does_not_list_its_adapters_has_none(tokenizer: Path) -> None:
    with double(tokenizer) as server:
        server.lacks = frozenset({"/lora-adapters"})
        with engine(tokenizer, server, enable_lora=True) as found:
            assert not found.info.adapters
            assert ask(found, SAMPLING, LONG).ids == own(server, LONG, ignore_eos=True, n_predict=12)["tokens"]


def test_a_server_without_adapters_reuses_prompts(tokenizer: Path) -> None:
    with double(tokenizer) as server, engine(tokenizer, server, enable_lora=True) as found:
        assert ask(found, SAMPLING, LONG).finish is not Finish.ERROR
        assert server.received[-1]["cache_prompt"]
        assert "lora" not in server.received[-1]
        with pytest.raises(ValueError, match="has not loaded this one: restart llama-server with --lora"):
            found.load_adapter(Adapter("sql", 1, "/models/sql.gguf"))


def test_a_restart_with_other_adapters_is_noticed(tokenizer: Path) -> None:
    with double(tokenizer, "sql", "poem") as server, engine(tokenizer, server, enable_lora=True) as found:
        _, sql, poem = adapters(server)
        expected = {}
        for key, adapter in enumerate((None, sql, poem), 1):
            found.add(EngineRequest(key, LONG, SAMPLING, adapter))
            expected[adapter] = run(found, key)[key].ids
        server.adapters.reverse()
        server.restart(server.name)
        for key, adapter in enumerate((poem, sql, None), 4):
            found.add(EngineRequest(key, LONG, SAMPLING, adapter))
            assert run(found, key)[key].ids == expected[adapter]
        server.adapters = [("/models/poem.gguf", 1.0)]
        server.restart(server.name)
        found.add(EngineRequest(7, LONG, SAMPLING, sql))
        assert run(found, 7)[7].error == "the llamacpp server has not loaded the adapter sql"
        for key, adapter in ((8, None), (9, poem)):
            found.add(EngineRequest(key, LONG, SAMPLING, adapter))
            assert run(found, key)[key].error == ""
        server.adapters = [("/models/new.gguf", 1.0)]
        server.restart(server.name)
        found.load_adapter(Adapter("new", 4, "new.gguf"))


def test_another_server_that_has_the_adapter_gets_the_request(tokenizer: Path) -> None:
    with (
        double(tokenizer) as first,
        double(tokenizer, "sql") as second,
        engine(tokenizer, first, second, enable_lora=True) as found,
    ):
        _, sql = adapters(second)
        for key in range(1, 9):
            found.add(EngineRequest(key, LONG, SAMPLING, sql))
        results = run(found, *range(1, 9))
        assert {results[key].error for key in results} == {""}
        assert not first.received
        assert len(second.received) >= 8
        found.add(EngineRequest(9, LONG, SAMPLING))
        assert run(found, 9)[9].error == ""


def test_no_request_waits_in_the_server_for_those_of_another_adapter(tokenizer: Path) -> None:
    with double(tokenizer, "sql", "poem", num_slots=4) as server:
        server.pace = 0.01
        with engine(tokenizer, server, timeout=1.0, enable_lora=True) as found:
            _, sql, poem = adapters(server)
            long = SAMPLING._replace(max_new_tokens=200)
            began, waits = time.monotonic(), list[bool]()
            watch = threading.Thread(target=_watch, args=(server, waits))
            watch.start()
            for key in range(1, 5):
                found.add(EngineRequest(key, LONG, long, sql))
            for key in range(5, 13):
                found.add(EngineRequest(key, OTHER, SAMPLING, (poem, sql, None)[key % 3]))
            results = run(found, *range(1, 13))
            server.name = ""
            watch.join()
            assert {result.error for result in results.values()} == {""}, "those that wait here are not silent"
            assert time.monotonic() - began > 2
            assert not any(waits)


def _watch(server: LlamaServer, waits: list[bool]) -> None:
    """Note whether any request waits in the server, until the server has no name."""
    while server.name:
        busy = [slot for slot in server.slots if slot.is_processing]
        waits.append(len({slot.lora for slot in busy}) > 1 and len({slot.number for slot in busy}) > 1)
        time.sleep(0.002)
