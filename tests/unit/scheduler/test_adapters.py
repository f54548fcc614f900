"""Adapters: their registry, their directories, and their loads and drops beside requests."""

from __future__ import annotations

import json
import logging
import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import (
    AdapterFailed,
    BadRequest,
    ConfigError,
    Conflict,
    GenerationFailed,
    InvalidPayload,
    NoRoom,
    NotFound,
    ServingError,
    Unavailable,
)
from handler.core.text import Prompt
from handler.core.values import Adapter, Finish, Request, Sampling
from handler.engines.base import EngineRequest, Output, Step
from handler.scheduler import lora
from handler.scheduler.batcher import Batcher
from handler.scheduler.lora import (
    AdapterCall,
    AdapterRegistry,
    Outcome,
    Registered,
    adapter_path,
    adapters_in,
    adapters_of,
    check_name,
    files_by_name,
    named_adapters,
    read_adapter_call,
    required,
)
from tests.doubles.scripted_engine import Scripted, prompt, run, submit, text
from tests.limits import MIB, undocumented
from tests.one_test import in_one_test
from tests.user_files import write_adapter

# -- the registry of adapters: names, numbers, changes; and the checks of an adapter's directory -----------------------


class Engine:
    """Loads an adapter, or refuses it, when the test says so."""

    ready = True

    def __init__(self) -> None:
        self.answers: list[Output] = []
        self.keys: dict[int, int] = {}  # by the adapter's id

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return True

    def continues(self, key: int) -> bool:
        return True

    def add(self, request: EngineRequest) -> None: ...
    def cancel(self, key: int) -> None: ...
    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self.keys[adapter.id] = key

    def step(self, timeout: float = 0.0) -> list[Step]:
        answers, self.answers = self.answers, []
        return [Step([], [], [], answers)]


class Registry(AdapterRegistry):
    """With an engine that answers on demand."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self.engine = Engine()
        self.batcher = Batcher(self.engine, self)
        self.outcomes: list[Outcome] = []

    def begin(self, name: str, path: str = "/a", *, update: bool = False) -> int:
        """Start a change; returns the engine's key of the load."""
        (self.update if update else self.register)(name, then=self.outcomes.append, path=Path(path))
        return max(self.engine.keys.values())

    def end(self, key: int, *, error: str | None = None) -> None:
        self.engine.answers.append(Output(key, (), (), Finish.ERROR if error else Finish.STOP, error=error))
        self.batcher.step()

    def add(self, name: str, path: str = "/a", *, update: bool = False) -> Adapter:
        self.end(self.begin(name, path, update=update))
        return self.get(name).adapter


def test_a_registered_adapter_is_found_by_name_and_number_in_order() -> None:
    adapters = Registry()
    first, second = adapters.add("b"), adapters.add("a", "/other")
    assert adapters.find("b") == adapters.by_number(1) == Adapter("b", first.id, "/a")
    assert adapters.by_number(2) == second
    assert [entry.number for entry in adapters] == [1, 2]
    assert [entry.adapter.name for entry in adapters] == ["b", "a"]
    assert adapters.outcomes == list(adapters)
    assert adapters.find("c") is None
    assert adapters.by_number(99) is None


def test_a_loading_adapter_is_not_found_and_keeps_others_from_the_name() -> None:
    adapters = Registry()
    load = adapters.begin("a")
    assert adapters.find("a") is None
    assert adapters.by_number(1) is None
    for change in (lambda: adapters.begin("a", "/b"), lambda: adapters.unregister("a")):
        with pytest.raises(Conflict, match="being changed"):
            change()
    adapters.end(load, error="no")
    assert adapters.find("a") is None
    adapters.add("a")


def test_an_update_leaves_the_earlier_one_until_it_is_loaded() -> None:
    adapters = Registry()
    earlier, other = adapters.add("a"), adapters.add("z")
    load = adapters.begin("a", "/new", update=True)
    assert adapters.find("a") == earlier
    with pytest.raises(Conflict):
        adapters.begin("a", "/newer", update=True)
    with pytest.raises(Conflict):
        adapters.unregister("a")
    adapters.end(load)
    later = adapters.get("a").adapter
    assert (later.path, later.id > other.id) == ("/new", True)
    assert adapters.by_number(1) == later
    assert list(adapters) == [Registered(later, 1, preload=True), Registered(other, 2, preload=True)]


def test_an_update_keeps_path_and_preload_where_it_names_none() -> None:
    adapters = Registry()
    adapters.register("lazy", Path("/there"), adapters.outcomes.append, preload=False)
    adapters.update("lazy", adapters.outcomes.append)
    assert adapters.engine.keys.keys() == {1}  # the drop of the earlier one: nothing was loaded
    first, second = adapters.outcomes
    assert isinstance(first, Registered)
    assert second == Registered(Adapter("lazy", first.adapter.id + 1, "/there"), 1, preload=False)
    adapters.add("eager", "/there")
    adapters.update("eager", adapters.outcomes.append)
    adapters.end(max(adapters.engine.keys.values()))
    assert adapters.get("eager")[1:] == (2, True)


def test_numbers_are_of_success_alone_and_are_not_used_again() -> None:
    adapters = Registry()
    load = adapters.begin("a")
    adapters.end(adapters.begin("b"), error="no")
    adapters.add("c")
    adapters.end(load)
    assert {entry.adapter.name: entry.number for entry in adapters} == {"c": 1, "a": 2}
    adapters.end(adapters.begin("a", "/b", update=True), error="no")
    adapters.unregister("a")
    assert adapters.by_number(2) is None
    adapters.add("a")
    assert adapters.get("a").number == 3


def test_an_update_that_fails_changes_nothing() -> None:
    adapters = Registry()
    earlier = adapters.add("a")
    adapters.end(adapters.begin("a", "/new", update=True), error="no")
    assert adapters.find("a") == earlier
    adapters.unregister("a")


def test_names_that_are_taken_or_not_there() -> None:
    adapters = Registry()
    adapters.add("a")
    with pytest.raises(Conflict, match="The adapter a already exists"):
        adapters.begin("a")
    for call in (adapters.get, adapters.unregister, lambda name: adapters.begin(name, update=True)):
        with pytest.raises(NotFound, match="The adapter b was not found"):
            call("b")


def test_room_counts_those_that_are_loading() -> None:
    adapters = Registry(limit=2)
    adapters.add("a")
    load = adapters.begin("b")
    with pytest.raises(NoRoom, match="the limit of 2 adapters is reached"):
        adapters.begin("c")
    adapters.add("a", "/new", update=True)  # takes no room
    adapters.end(load, error="no")
    adapters.add("c")
    adapters.unregister("a")
    adapters.add("d")
    assert len(adapters) == 2


def test_room_counts_those_that_requests_still_use() -> None:
    adapters = Registry(limit=1)
    adapter = adapters.add("a")
    id = adapters.batcher.submit(Request("xyz", adapter=adapter), prompt("xyz"))
    adapters.unregister("a")
    with pytest.raises(NoRoom, match="the limit of 1 adapters is reached"):
        adapters.begin("b")
    adapters.batcher.cancel(id)
    adapters.batcher.step()
    adapters.add("b")


def test_an_update_under_way_takes_no_room() -> None:
    adapters = Registry(limit=2)
    adapters.add("a")
    adapters.begin("a", "/new", update=True)
    adapters.add("b")
    assert len(adapters) == 2


def test_without_lora_every_change_is_refused_with_the_reason() -> None:
    adapters = AdapterRegistry(unavailable="echo: it was started without option.enable_lora=true")
    changes: list[Callable[[], object]] = [
        lambda: adapters.register("a", Path("/a"), print),
        lambda: adapters.update("a", print),
        lambda: adapters.unregister("a"),
        adapters.check,
    ]
    for change in changes:
        with pytest.raises(BadRequest, match="LoRA is not enabled: echo: it was started without"):
            change()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "update", "fail", "remove"])), max_size=40))
def test_ids_are_never_used_again_and_both_ways_agree(changes: list[tuple[str, str]]) -> None:
    adapters, seen, numbers = Registry(), set(), 0
    for name, what in changes:
        try:
            if what == "remove":
                adapters.unregister(name)
                continue
            load = adapters.begin(name, update=what == "update")
        except ServingError:
            continue
        adapters.end(load, error="no" if what == "fail" else None)
        outcome = adapters.outcomes[-1]
        assert isinstance(outcome, Registered) is (what != "fail")
        if isinstance(outcome, Registered):
            assert outcome.adapter.id not in seen
            assert outcome.adapter.id >= 1
            seen.add(outcome.adapter.id)
            numbers += what == "add"
        for entry in adapters:
            assert adapters.by_number(entry.number) == adapters.find(entry.adapter.name) == entry.adapter
        assert sum(adapters.by_number(number) is not None for number in range(numbers + 2)) == len(adapters)


@in_one_test("name", ["a", "A1", "sql-v1.2", "eu:north_1", "a@b+c=d~e", "..a", "x" * 256])
def test_names_that_are_allowed(name: str) -> None:
    check_name(name)


@in_one_test(
    "name",
    ["", ".", "..", "a/b", "../a", "a b", "a\n", "\n", "a\r\nSet-Cookie: b", "a\0", "é", "a%2fb", "a?b", '"', "a\\b",
     "x" * 257],
)  # fmt: skip
def test_names_that_are_not(name: str) -> None:
    with pytest.raises(BadRequest, match="name=") as caught:
        AdapterRegistry().register(name, Path("/a"), print)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_path_may_be_written_in_several_ways(tmp_path: Path, weights: str) -> None:
    path = write_adapter(tmp_path / "adapters" / "a b", weights=weights)
    base = tmp_path / "adapters"
    url = str(path).replace(" ", "%20")
    for src in (str(path), "a b", "./a b", f"file://{url}", f"file://localhost{url}", f"FILE:{url}"):
        assert adapter_path(src, base) == path


@in_one_test(
    "src",
    [
        "s3://bucket/a",
        "https://host/a.tar.gz",
        "hf:org/name",
        "file://host/a",
        "file:a",
        "file:///a?b",
        "file://[a",
        "a\nb",
        "a\0b",
    ],
)
def test_what_is_no_directory_of_this_machine_is_refused_by_name(src: str) -> None:
    with pytest.raises(BadRequest, match="src=") as caught:
        adapter_path(src, Path("/base"))
    assert caught.value.status == 400
    assert caught.value.message.isprintable()


def test_a_relative_path_needs_a_model_directory() -> None:
    with pytest.raises(BadRequest, match="must be an absolute path"):
        adapter_path("a", None)


def _without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _with(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_without("adapter_config.json"), "contains no adapter_config.json"),
        (_without("adapter_model.safetensors"), "contains neither adapter_model.safetensors nor adapter_model.bin"),
        (_with("adapter_config.json", "{"), "adapter_config.json is not JSON"),
        (_with("adapter_config.json", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")), "is not JSON"),
        (_with("adapter_config.json", "[]"), "does not describe a LoRA adapter"),
        (_with("adapter_config.json", '{"peft_type": "IA3"}'), "peft_type: 'IA3'"),
    ],
)
def test_what_is_no_adapter_is_refused_saying_why(tmp_path: Path, spoil: Callable[[Path], object], told: str) -> None:
    path = write_adapter(tmp_path / "a")
    spoil(path)
    with pytest.raises(AdapterFailed, match=told):
        adapter_path(str(path), None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 500_000, "is nested too deeply"),
        ('{"r": ' * 150_000, "is nested too deeply"),
        ('{"a": NaN}', "NaN is not a valid JSON number"),
        ('{"a": [-Infinity]}', "-Infinity is not a valid JSON number"),
        ('{"a": 1e999}', "1e999 is not a valid JSON number"),
        ('{"peft_type": ' + "[" * 500 + "]" * 500 + "}", "peft_type: not a string"),
        ('{"r": 8}' + " " * (1 << 20), "has more than 1048576 bytes"),
    ],
)
def test_a_config_that_would_harm_its_reader_is_refused_also_at_the_start(tmp_path: Path, text: str, told: str) -> None:
    path = write_adapter(tmp_path / "a")
    (path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterFailed, match=told) as caught:
        adapter_path(str(path), None)
    assert len(caught.value.message) < 400 + len(str(path))
    with pytest.raises(ConfigError, match=f"the adapter a cannot be used: .*{told}"):
        adapters_of(tmp_path)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, name: str, kind: str, link: bool) -> None:
    other = "adapter_model.safetensors" if name == "adapter_model.bin" else "adapter_model.bin"
    path = write_adapter(tmp_path / "a", weights=other)
    place = path / name
    place.unlink(missing_ok=True)
    odd = tmp_path / "odd" if link else place
    if kind == "device":  # only root makes one: a link to one that is there
        place.symlink_to("/dev/zero")
    else:
        os.mkfifo(odd) if kind == "fifo" else odd.mkdir()
        if link:
            place.symlink_to(odd)
    with pytest.raises(AdapterFailed, match=f"{name} is not a regular file"):
        adapter_path(str(path), None)


def test_files_may_be_links(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    for file in list(path.iterdir()):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert adapter_path(str(path), None) == path


@pytest.mark.parametrize("name", ["nothing", "x" * 300, "file.txt"])
def test_a_path_that_leads_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").touch()
    with pytest.raises(AdapterFailed, match=r"no such directory|cannot be read"):
        adapter_path(name, tmp_path)


def test_each_directory_is_an_adapter(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_adapter(tmp_path / name)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "readme.txt").touch()
    assert adapters_of(tmp_path) == {"a": tmp_path / "a", "b": tmp_path / "b"}


@pytest.mark.parametrize("name", ["broken", "not a name"])
def test_one_that_is_broken_is_named(tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path / "a")
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"the adapter {name} cannot be used"):
        adapters_of(tmp_path)


def test_one_of_an_option_is_named_with_it(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    assert named_adapters({"x": "a"}, tmp_path) == {"x": tmp_path / "a"}
    words = "option.lora_modules: the adapter x cannot be used: src=b: there is no such directory"
    with pytest.raises(ConfigError, match=rf"^{re.escape(words)}$"):
        named_adapters({"x": "b"}, tmp_path, "option.lora_modules")
    with pytest.raises(ConfigError, match=r"^the adapter not a name cannot be used: name='not a name': must be 1 to"):
        named_adapters({"not a name": "a"}, tmp_path)


def test_files_that_only_the_engine_can_check_have_names_that_are_allowed() -> None:
    assert files_by_name({"x": "/no/such.gguf"}, "option.lora_modules") == {"x": Path("/no/such.gguf")}
    with pytest.raises(ConfigError, match=r"^option\.lora_modules: name='not a name': must be 1 to"):
        files_by_name({"x": "/a.gguf", "not a name": "/b.gguf"}, "option.lora_modules")


def test_one_name_in_two_directories_is_refused_unless_they_are_one(tmp_path: Path) -> None:
    for home in ("one", "two"):
        write_adapter(tmp_path / home / "a")
    write_adapter(tmp_path / "one" / "z")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert list(adapters_in([tmp_path / "one", tmp_path / "link"])) == ["a", "z"]
    with pytest.raises(ConfigError, match=r"^the adapter a exists in two directories: .*/one/a and .*/two/a$"):
        adapters_in([tmp_path / "one", tmp_path / "two"])


def test_an_adapters_config_is_json_of_at_most_a_mib(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    text = file.read_text().rstrip("}\n ") + ', "scale": 1.5}'
    file.write_text(text.ljust(1 << 20))
    assert adapter_path("a", tmp_path) == tmp_path / "a"
    file.write_text(text.ljust((1 << 20) + 1))
    with pytest.raises(AdapterFailed, match=r"^src=a: adapter_config.json has more than 1048576 bytes$"):
        adapter_path("a", tmp_path)
    for bad in ("NaN", "1e999"):
        file.write_text(text.replace("1.5", bad))
        with pytest.raises(AdapterFailed, match=rf"^src=a: adapter_config.json is not JSON: {bad} is not a valid JSON"):
            adapter_path("a", tmp_path)
    file.write_text(json.dumps({"peft_type": "x" * 90}))
    with pytest.raises(AdapterFailed, match=rf"\(peft_type: '{'x' * 80}'\)$"):
        adapter_path("a", tmp_path)


# -- calls that change adapters ------------------------------------------------------------------------------------


def test_a_call_has_texts_and_flags_of_json_or_of_a_query() -> None:
    read = read_adapter_call({"name": "a", "src": "/a", "preload": "TRUE", "pin": "false"}, refuse_unknown=True)
    assert read == AdapterCall("a", "/a", True)
    assert read_adapter_call({"preload": False, "name": None}, refuse_unknown=True) == AdapterCall(preload=False)
    assert read_adapter_call({"preload": "False"}, refuse_unknown=True).preload is False
    assert read_adapter_call({"x": 1, "y": 2}, refuse_unknown=False).ignored == ("x", "y")
    assert required("a", "name") == "a"


@in_one_test(
    ("values", "words"),
    [
        ({"name": "a", "x": 1}, "unknown parameter 'x'; known: name, src, preload, pin"),
        ({"pin": True}, "pin=true is not supported: the engines cannot pin an adapter in memory"),
        ({"name": ""}, "name='': must be a non-empty string"),
        ({"src": 1}, "src=1: must be a non-empty string"),
        ({"preload": 1}, "preload=1: must be true or false"),
        ({"preload": "yes"}, "preload='yes': must be true or false"),
    ],
)
def test_a_call_that_is_wrong_is_refused_by_its_parameter(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read_adapter_call(values, refuse_unknown=True)
    assert raised.value.message == words


def test_what_a_call_must_have_is_named() -> None:
    with pytest.raises(BadRequest, match=r"^Parameter name is required\.$"):
        required(None, "name")


def test_changes_of_adapters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "handler.adapters")
    adapters = Registry()
    adapters.add("a", "/there")
    adapters.end(adapters.begin("b", "/broken"), error="no")
    adapters.unregister("a")
    assert caplog.messages == [
        "adapter a (number 1) registered from /there",
        "cannot load the adapter b from /broken: the engine could not load the adapter b: no",
        "adapter a unregistered",
    ]


def test_a_registry_without_an_engine_registers_what_is_not_loaded() -> None:
    adapters, outcomes = AdapterRegistry(), list[Outcome]()
    adapters.register("a", Path("/a"), outcomes.append, preload=False)
    adapters.unregister("a")
    assert (len(outcomes), len(adapters), adapters.names()) == (1, 0, [])
    with pytest.raises(Unavailable, match=r"^the engine is not ready: no adapter can be loaded$"):
        adapters.register("a", Path("/a"), outcomes.append)


# -- adapters beside requests on a scripted engine: loads, drops after the last request, lost engines ------------------


@dataclass
class Adapting(Scripted):
    """Answers changes of adapters in the next step; a `broken` name can be neither loaded nor dropped."""

    broken: set[str] = field(default_factory=set)
    changes: list[tuple[str, str]] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    used_ids: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    due: list[Output] = field(default_factory=list)

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        adapter = request.adapter
        self.used.append(adapter.name if adapter else "")
        self.used_ids.append(adapter.id if adapter else 0)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self.drops += [adapter.id] if drop else []
        self.changes.append(("drop" if drop else "load", adapter.name))
        error = "ValueError: rank 64 is too large" if adapter.name in self.broken else None
        self.due.append(Output(key, (), (), Finish.ERROR if error else Finish.STOP, error=error))

    def step(self, timeout: float = 0.0) -> list[Step]:
        due, self.due = self.due, []
        steps = super().step(timeout)
        steps[-1].others.extend(due)
        return steps


class Rig:
    """A batcher with adapters, on a scripted engine."""

    def __init__(self, *names: str, max_active: int = 32, **engine: Any) -> None:
        self.engine = Adapting(**engine)
        self.adapters = AdapterRegistry()
        self.batcher = Batcher(self.engine, self.adapters, max_active=max_active)
        self.outcomes: list[Outcome] = []
        for name in names:
            self.adapters.register(name, Path(f"/{name}"), self.outcomes.append, preload=False)

    def find(self, name: str) -> Adapter:
        return self.adapters.get(name).adapter

    def load(self, name: str) -> None:
        self.adapters.register(name, Path(f"/{name}"), self.outcomes.append)

    def update(self, name: str, path: str | None = None) -> Adapter:
        self.adapters.update(name, self.outcomes.append, Path(path or f"/{name}"), preload=False)
        return self.find(name)

    def submit(self, letters: str, adapter: Adapter | str, tokens: int = 4) -> int:
        adapter = self.find(adapter) if isinstance(adapter, str) else adapter
        request = Request(letters, Sampling(max_new_tokens=tokens), adapter=adapter)
        return self.batcher.submit(request, prompt(letters))


def test_a_load_disturbs_no_tokens_and_makes_the_adapter_known() -> None:
    rig = Rig()
    request = submit(rig.batcher, "abcdef", max_new_tokens=6)
    rig.load("a")
    assert rig.adapters.find("a") is None
    with pytest.raises(Conflict):
        rig.load("a")
    outputs = run(rig.batcher)
    assert rig.outcomes == [Registered(rig.find("a"), 1)]
    assert text(outputs[request]) == "abcdef"
    assert list(outputs) == [request]


def test_a_failed_load_has_the_engines_words_and_disturbs_no_tokens() -> None:
    rig = Rig(broken={"a"})
    request = submit(rig.batcher, "abcdef", max_new_tokens=6)
    rig.load("a")
    outputs = run(rig.batcher)
    (error,) = rig.outcomes
    assert isinstance(error, AdapterFailed)
    assert error.message == "the engine could not load the adapter a: ValueError: rank 64 is too large"
    assert text(outputs[request]) == "abcdef"
    assert rig.adapters.find("a") is None
    rig.load("a")  # the name is free again


def test_without_an_engine_nothing_can_be_loaded() -> None:
    rig = Rig(ready=False)
    for _ in range(2):  # the name stays free
        with pytest.raises(Unavailable, match="not ready"):
            rig.load("a")
    assert rig.engine.changes == []


def test_a_load_is_lost_with_its_engine() -> None:
    rig = Rig(fail=GenerationFailed("engine failure: it died"))
    rig.load("a")
    assert rig.batcher.step() == []
    assert [str(outcome) for outcome in rig.outcomes] == ["engine failure: it died"]
    assert rig.batcher.step() == []  # the next engine's answers have other keys
    assert len(rig.outcomes) == 1
    rig.load("a")  # the name is free again
    rig.engine.fail = GenerationFailed("engine failure: so did this one")
    assert rig.batcher.step() == []
    assert [str(outcome) for outcome in rig.outcomes[1:]] == ["engine failure: so did this one"], "each load ends once"


def test_an_adapter_is_dropped_when_the_last_request_for_it_has_ended() -> None:
    rig = Rig("a", "b", max_active=2)
    for adapter, tokens in (("a", 2), ("a", 5), ("a", 3), ("b", 20)):  # two in the engine, two queued
        rig.submit("xyz", adapter, tokens)
    rig.adapters.unregister("a")
    while rig.engine.used.count("a") < 3 or rig.batcher.num_active > 1:
        assert rig.engine.changes == []
        rig.batcher.step()
    rig.batcher.step()
    assert rig.engine.changes == [("drop", "a")]
    run(rig.batcher)
    assert rig.engine.changes == [("drop", "a")]


@pytest.mark.parametrize("how", ["cancelled", "cancelled in the queue", "none"])
def test_an_adapter_is_dropped_however_its_requests_end(how: str) -> None:
    rig = Rig("a", max_active=1)
    if how == "cancelled in the queue":
        submit(rig.batcher, "abc", max_new_tokens=50)
    id = 0 if how == "none" else rig.submit("xyz", "a", 50)
    rig.adapters.unregister("a")
    assert rig.engine.changes == ([("drop", "a")] if how == "none" else [])
    rig.batcher.cancel(id)
    rig.batcher.step()
    assert rig.engine.changes == [("drop", "a")]


def test_an_engine_that_died_has_nothing_to_drop() -> None:
    rig = Rig("a", "b", "c", max_active=2)
    for adapter in "abb":  # the last one waits, and the next engine gets it
        rig.submit("xyz", adapter, 5)
    for adapter in "ab":
        rig.adapters.unregister(adapter)
    rig.engine.fail, rig.engine.ready = GenerationFailed("engine failure: it died"), False
    rig.batcher.step()
    rig.adapters.unregister("c")
    rig.engine.ready = True
    run(rig.batcher)
    assert rig.engine.used == ["a", "b", "b"]
    assert rig.engine.changes == [("drop", "b")]


def test_an_engine_that_is_replaced_before_the_next_step_drops_nothing() -> None:
    rig = Rig("a")
    rig.submit("xyz", "a", 5)
    rig.batcher.step()
    rig.adapters.unregister("a")
    rig.engine.fail = GenerationFailed("engine failure: it died")
    rig.batcher.step()
    assert run(rig.batcher) == {}
    assert rig.engine.changes == []


def test_a_drop_that_fails_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # a server of this worker may have set INFO
    rig = Rig("a", broken={"a"})
    rig.adapters.unregister("a")
    assert run(rig.batcher) == {}
    assert caplog.messages == ["the engine could not drop the adapter a: ValueError: rank 64 is too large"]


def test_a_request_that_comes_after_the_drop_is_refused_by_name() -> None:
    rig = Rig("a", "b")
    early = rig.find("a")
    rig.adapters.unregister("a")
    with pytest.raises(InvalidPayload, match="the adapter a was unregistered"):
        rig.submit("xyz", early)
    assert rig.engine.used == []
    rig.submit("xyz", "b")
    assert rig.engine.used == ["b"]


def test_requests_after_an_update_get_the_new_adapter_and_earlier_keep_it() -> None:
    rig = Rig("a")
    first = rig.find("a")
    rig.submit("xyz", first)
    second = rig.update("a")
    rig.submit("xyz", first)
    third = rig.update("a")
    rig.submit("xyz", first)
    rig.submit("xyz", second)
    assert rig.engine.used_ids == [first.id, second.id, third.id, third.id]
    run(rig.batcher)
    assert sorted(rig.engine.drops) == [first.id, second.id]
    rig.adapters.unregister("a")
    for adapter in (first, second, third):
        with pytest.raises(InvalidPayload):
            rig.submit("xyz", adapter)


def test_an_earlier_adapter_is_dropped_with_its_last_request() -> None:
    rig = Rig("a")
    late = Request("xyz", Sampling(max_new_tokens=1), adapter=rig.find("a"))
    earlier: list[weakref.ref[Adapter]] = []
    for _ in range(1000):
        earlier.append(weakref.ref(rig.find("a")))
        rig.update("a")
        rig.outcomes.clear()
        rig.batcher.step()
        rig.batcher.step()  # which takes the engine's answer to the drop
    assert sum(adapter() is not None for adapter in earlier) == 1
    rig.batcher.submit(late, prompt("xyz"))
    assert rig.engine.used_ids == [rig.find("a").id]
    del late
    assert sum(adapter() is not None for adapter in earlier) == 0


def test_the_size_of_an_adapters_config_is_documented() -> None:
    assert not undocumented("adapters.md", f"at most {lora.MAX_CONFIG / MIB:g} MiB")
