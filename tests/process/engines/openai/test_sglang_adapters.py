"""LoRA adapters of SGLang's servers: which server loads what, under which name, and what a request gets."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import Adapter, Finish, Sampling
from handler.engines.base import NO_LORA, EngineRequest
from handler.engines.openai.client import HttpModel
from handler.engines.openai.sglang.adapters import AllowedPaths, ServerAdapters, loaded_name
from handler.engines.openai.sglang.engine import SglangEngine
from handler.engines.remote import engine as remote_engine
from tests.doubles.sglang_server import SglangServer, listening
from tests.one_test import in_one_test
from tests.process.engines.openai import test_sglang
from tests.process.engines.openai.test_bad_servers import Result, run
from tests.process.engines.openai.test_sglang import PROMPT, SAMPLING, labels
from tests.servers import wait_for

SQL, POEM, NEW = "/adapters/sql", "/adapters/poem", "/adapters/new"
LENGTH = (Finish.LENGTH, "")


@contextlib.contextmanager
def engine(*servers: SglangServer, **options: Any) -> Iterator[SglangEngine]:
    with test_sglang.engine(*servers, enable_lora=True, adapters_root="/adapters", **options) as found:
        yield found


@contextlib.contextmanager
def loading(**settings: Any) -> Iterator[SglangServer]:
    """A server with two adapters on its disk, and one that it has loaded."""
    with listening(**{"files": {SQL: 10, POEM: 20}, **settings}) as server:
        yield server


def ask(found: SglangEngine, path: str, key: int = 1, **more: Any) -> Result:
    found.add(EngineRequest(key, PROMPT, SAMPLING._replace(max_new_tokens=2, **more), adapter(path)))
    return run(found, key)[key]


def adapter(path: str, id: int = 1) -> Adapter:
    return Adapter(Path(path).name, id, path)


def test_the_servers_adapters_are_known_by_their_names_and_paths() -> None:
    with loading(adapters={"german": 100, "/m/verse": 40}, roots={"/m/verse": "/m/verse"}) as server:
        with engine(server) as found:
            assert found.info.adapters == (("german", "/models/german"), ("verse", "/m/verse"))
            for path in ("german", "/models/german", "/models/german/"):
                found.load_adapter(adapter(path))
                assert ask(found, path) == ([105, 106], *LENGTH)
            assert ask(found, "/m/verse") == ([45, 46], *LENGTH)
            assert test_sglang.ask(found, SAMPLING._replace(max_new_tokens=2), key=2).ids == [5, 6]
        assert server.num_loads == 0


def test_an_adapter_is_loaded_once_used_and_unloaded() -> None:
    with loading() as server, engine(server) as found:
        found.load_adapter(adapter(SQL))
        found.load_adapter(adapter(SQL, 2))
        assert server.num_loads == 1
        assert ask(found, SQL) == ([15, 16], *LENGTH)
        assert server.received[-1].body["lora_path"] == loaded_name(SQL)
        found.drop_adapter(adapter(SQL))
        assert ask(found, SQL, key=2) == ([15, 16], *LENGTH), "its other name is still in use"
        found.drop_adapter(adapter(SQL))
        found.drop_adapter(adapter(SQL, 2))
        wait_for(lambda: [*server.adapters] == ["german"], 5, "it is not unloaded")


def test_an_adapter_of_the_operator_is_not_unloaded() -> None:
    with loading() as server, engine(server) as found:
        found.load_adapter(adapter("german"))
        found.drop_adapter(adapter("german"))
        assert ask(found, "german", key=2) == ([105, 106], *LENGTH)
        assert [*server.adapters] == ["german"]


def test_a_request_for_an_adapter_that_is_not_loaded_loads_it() -> None:
    with loading() as server, engine(server) as found:
        for key in (1, 2):
            found.add(EngineRequest(key, PROMPT, SAMPLING._replace(max_new_tokens=2), adapter(POEM)))
        assert [result.ids for result in run(found, 1, 2).values()] == [[25, 26]] * 2
        assert server.num_loads == 1


def test_one_of_two_adapters_is_enough_memory_for_both() -> None:
    """SGLang then lists only the one that was used last."""
    with loading(adapters={}, max_loaded=1) as server, engine(server) as found:
        for turn in range(3):
            assert ask(found, SQL, key=2 * turn) == ([15, 16], *LENGTH)
            assert ask(found, POEM, key=2 * turn + 1) == ([25, 26], *LENGTH)


@in_one_test("version", ["0.5.23", "0.5.6", "0.5.2"])
def test_a_server_that_was_restarted_loads_it_again(version: str) -> None:
    with loading(version=version) as server, engine(server) as found:
        found.load_adapter(adapter(SQL))
        server.adapters, server.roots = {}, {}
        assert ask(found, SQL) == ([15, 16], *LENGTH)
        assert server.num_loads == 2


def test_a_name_that_stands_for_another_adapter_after_a_restart_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.openai.sglang.engine.TRUST", 0.0)
    monkeypatch.setattr(remote_engine, "_ASK_AGAIN", 0.0)
    with loading() as server, engine(server) as found:
        assert ask(found, "/models/german") == ([105, 106], *LENGTH)
        server.roots = {"german": "/models/other"}
        result = ask(found, "/models/german", key=2)
        assert result.error == "the sglang server has not loaded the adapter german"
        assert "--lora-paths" in result.error.log


def test_an_adapter_that_is_used_elsewhere_does_not_hold_up_its_end() -> None:
    """SGLang unloads an adapter when nobody uses it any more; another client may for long."""
    with loading(context=8000, pace=0.05) as server, engine(server) as found, engine(server) as other:
        found.load_adapter(adapter(SQL))
        other.add(EngineRequest(1, PROMPT, Sampling(max_new_tokens=4000, logprobs=False), adapter(SQL)))
        while not other.step().keys:
            pass
        began = time.monotonic()
        found.drop_adapter(adapter(SQL))
        assert time.monotonic() - began < 3
        wait_for(lambda: loaded_name(SQL) not in server.adapters, 5, "it is not told")


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another directory": ({}, "/etc", "load it by --lora-paths, or set option.adapters_root"),
    "the directory itself": ({}, "/adapters", "option.adapters_root"),
    "around the directory": ({}, "/adapters/../etc", "option.adapters_root"),
    "a name on the hub": ({}, "someone/lora", "option.adapters_root"),
    "no such file": ({}, NEW, "Repo id must be in the form"),
    "no LoRA": ({"lora": False, "adapters": {}}, SQL, "start it with --enable-lora"),
    "schedulers": ({"dp_size": 2}, SQL, "with --dp-size above 1, it loads adapters only from its --lora-paths"),
    "tokenizers": ({"workers": 2}, SQL, "with --tokenizer-worker-num above 1, it loads adapters only from its"),
    "a key": ({"admin_key": "another"}, SQL, "with --admin-api-key, it loads adapters only with that key"),
}


@in_one_test(("settings", "path", "words"), REFUSALS.values(), ids=REFUSALS)
def test_an_adapter_that_cannot_be_loaded_is_refused_with_the_remedy(
    settings: dict[str, Any], path: str, words: str
) -> None:
    with loading(**settings) as server, engine(server) as found:
        with pytest.raises(ValueError, match=r"the server (has not loaded|cannot load) the adapter") as refused:
            found.load_adapter(adapter(path))
        assert words in str(refused.value)
        result = ask(found, path)
        assert result.error.startswith(("the sglang server has not loaded", "the sglang server cannot load"))
        assert words in result.error.log
        assert words not in result.error
        assert test_sglang.ask(found, SAMPLING._replace(max_new_tokens=1), key=2).ids == [5], "other requests go on"
        assert server.num_loads == 0


def test_adapters_of_the_operator_may_be_anywhere() -> None:
    with loading(files={"someone/lora": 30}) as server, engine(server, lora_modules={"lora": "someone/lora"}) as found:
        found.load_adapter(adapter("someone/lora"))
        assert ask(found, "someone/lora") == ([35, 36], *LENGTH)


def test_without_the_option_there_are_none() -> None:
    with loading() as server, test_sglang.engine(server) as found:
        assert found.info.adapters == ()
        with pytest.raises(ValueError, match=NO_LORA):
            found.load_adapter(adapter("german"))


def test_a_replica_without_the_adapter_is_left_out_for_its_requests_only() -> None:
    with loading(adapters={}, lora=False) as without, loading() as having, engine(without, having) as found:
        found.load_adapter(adapter(SQL))
        for key in range(1, 7):
            assert ask(found, SQL, key=key) == ([15, 16], *LENGTH)
        assert not without.received
        for key in range(7, 13):
            test_sglang.ask(found, SAMPLING, key=key)
        assert len(without.received) == 6 - (len(having.received) - 6)
        assert without.received


def test_an_adapter_beside_one_in_place_of_the_model() -> None:
    with loading() as server, engine(server, base_url_model="german") as found:
        assert test_sglang.ask(found, SAMPLING._replace(max_new_tokens=2), key=1).ids == [105, 106]
        assert ask(found, SQL, key=2) == ([15, 16], *LENGTH)


def test_labels_are_the_adapters() -> None:
    with loading() as server, engine(server) as found:
        labels(found, 11, adapter=adapter(SQL))
        assert server.received[-1].body["lora_path"] == loaded_name(SQL)


def test_adapters_of_crossed_requests_are_their_own() -> None:
    paths = [None, SQL, POEM, "german"]
    with loading(max_running=8, pace=0.001) as server, engine(server) as found:
        for key in range(64):
            path = paths[key % 4]
            used = None if path is None else adapter(path)
            found.add(EngineRequest(key, [5 + key], SAMPLING._replace(max_new_tokens=3), used))
        for key, result in run(found, *range(64)).items():
            shift = (0, 10, 20, 100)[key % 4]
            assert result == ([5 + key + shift] * 3, *LENGTH)


def test_names_depend_on_the_path_alone() -> None:
    assert loaded_name(SQL) == loaded_name(SQL)
    assert len({loaded_name(path) for path in (SQL, "/other/sql", POEM, "\ud800")}) == 4
    known = ServerAdapters()
    models = [("a", "/m/a"), (loaded_name(SQL), SQL), ("t", "__tensor__"), ("u", "__tensor__"), ("old", "")]
    known.add_listed(HttpModel(name, "sglang", None, True, path) for name, path in models)
    assert known.paths_by_name() == (("a", "/m/a"), ("t", "t"), ("u", "u"), ("old", "old"))
    assert [known.find(path) for path in (SQL, "t", "__tensor__", "", "/m/b")] == [
        loaded_name(SQL),
        "t",
        None,
        None,
        None,
    ]


def test_a_directory_allows_what_is_below_it() -> None:
    allowed = AllowedPaths(frozenset(), "/adapters/")
    assert [path for path in (SQL, "/adapters/a/b", "adapters/a", "/adaptersx/a") if path in allowed] == [
        SQL, "/adapters/a/b",
    ]  # fmt: skip
    assert SQL not in AllowedPaths(frozenset(), None)
    assert "/a" not in AllowedPaths(frozenset(), ".")


def test_a_servers_list_of_adapters_may_be_odd() -> None:
    with loading() as server, engine(server) as found:
        server.roots["german"] = json.loads("5")
        assert ask(found, "german") == ([105, 106], *LENGTH)
