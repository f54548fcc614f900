"""Every field of the requests of anthropic, Anthropic's own client, and what becomes of it here.

The client's types are read from its package. Each field is put into a valid body, with each of its forms, and the
result is compared with `anthropic_fields.json`. `pytest -n 0 tests/clients/test_anthropic_fields.py --update-golden`
writes that file anew; read what it wrote.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.core.errors import ServingError
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Request
from tests.clients import toolchains
from tests.unit.protocols.answers import CAPABLE, DIALECTS, VOCABULARY, answer, saying

pytestmark = pytest.mark.clients

GOLDEN = Path(__file__).with_name("anthropic_fields.json")
TYPES = Path(__file__).with_name("scripts") / "anthropic_types.py"

SEEING = replace(
    CAPABLE,
    no_media={"image": ""},
    chat_template="{{ tools }} <tool_call> {{ tool_calls }} <think></think> {{ reasoning_content }} "
    "{{ enable_thinking }} {{ reasoning_effort }}",
    vocabulary=Vocabulary([b"<", b"a"]),
)
_CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
RESPONSE = saying(f"<think>Hm.</think>Yes.{_CALLED}{_CALLED}")

USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": ""}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 °C"}
CALLING = {"role": "assistant", "content": [THINKING, CALL]}
BEFORE = [USER, CALLING, {"role": "user", "content": [RESULT]}, CALLING]
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
BASE = {"model": "", "max_tokens": 16, "messages": [USER], "tools": [WEATHER], "temperature": 0}

VALUES: dict[str, Any] = {
    "model": "", "max_tokens": 3, "budget_tokens": 1024, "tool_use_id": "toolu_1", "id": "toolu_2",
    "tool_name": "weather", "input_schema": {"type": "object"}, "schema": {"type": "object"}, "total": 30_000,
    "remaining": 20_000, "url": "https://127.0.0.1/a.png", "value": 2, "previous_message_id": "msg_1",
    "input": {"city": "Rome"},
}  # fmt: skip
"""The values of fields that must fit others or the server. All other fields have that of their type."""
NAMES = {"tool_choice": "weather", "tool[tool_reference]": "weather"}
"""The values of fields `name` of these parents."""
PLAIN: dict[str, Any] = {"str": "b", "int": 1, "bool": True, "object": {"b": 1}, "NoneType": None}
_DEFAULT = "the default, or the same as without the field"
SILENT = {
    r"\[NoneType\]$": "null means that the field is absent",
    r"cache_control": "hints for Anthropic's cache: here, every prefix may be cached",
    r"\.type$": "the only type of the object",
    r"\.media_type=": "an image's own bytes name its format",
    r"^model": "the empty name means the model that is served",
    r"=(never|standard|direct|downsize|summarized|updates|False)$": _DEFAULT,
    r"(transformations|output_config|context_management)\[object\]$": _DEFAULT,
    r"^(thinking\[adaptive\]|tool_choice\[auto\])$": _DEFAULT,
    r"thinking\[\w+\]\.display=omitted$": "a count has no thinking blocks",
    r"block_binding": "signatures are not checked, so no block mismatches",
    r"signature": "signatures are not checked, except those of summaries",
    r"\[compaction\]": "a block without a summary has no effect, and a summary is plain text",
    r"^compaction": "a count is that of the conversation",
    r"clear_tool_uses": "the messages have no result of a tool (tests/unit/protocols/test_anthropic_edits.py)",
    r"compact_20260112": "the prompt is short (tests/app/dialects/test_anthropic_compaction.py)",
    r"\.caller\[": "no chat template shows who called a tool",
    r"disable_parallel_tool_use\[bool\]$": "a named tool is called once anyway, and a count has no calls",
}
"""Patterns of the paths of fields without an effect, and the reasons."""


class Outcome(NamedTuple):
    """What the server ignores, gives to the engine, and responds."""

    ignored: list[str]
    requests: list[Request]
    response: str


class Catalogue(NamedTuple):
    """The client's request types.

    Attributes:
        calls: maps the calls to their types' names.
        types: maps names to `fields` and `required`.
    """

    calls: dict[str, str]
    types: dict[str, Any]

    def forms(self, form: Any) -> Iterator[Any]:
        """The forms of a field that are sent as JSON, without unions."""
        if "any" in form:
            for part in form["any"]:
                yield from self.forms(part)
        elif form.get("plain", "str") in PLAIN:
            yield form

    def tag(self, name: str) -> str:
        """What tells a type from others in a union: its `type`, its `role`, or nothing."""
        for field in ("type", "role"):
            values = self.types[name]["fields"].get(field, {}).get("values")
            if values is not None:
                return f"[{values[0]}]"
        return ""

    def label(self, form: Any) -> str:
        """The name of a form: of a type by its tag."""
        if "type" in form:
            return self.tag(form["type"]) or "[object]"
        if "list" in form:
            return "[]"
        return f"[{form['plain']}]"

    def minimal(self, name: str, path: str) -> dict[str, Any]:
        """A value of a type with its required fields alone."""
        declared = self.types[name]
        return {
            field: self.value(next(self.forms(declared["fields"][field])), field, path)
            for field in declared["required"]
        }

    def value(self, form: Any, field: str, path: str) -> Any:
        """A value of a form."""
        if "type" in form:
            return self.minimal(form["type"], f"{path}.{field}{self.tag(form['type'])}")
        if "list" in form:
            return [self.value(next(self.forms(form["list"])), field, path)]
        if "values" in form:
            return VALUES["model"] if field == "model" else form["values"][0]
        if field == "name":
            return next((name for parent, name in NAMES.items() if parent in path), "b")
        if field == "data":
            return "eA=="
        return VALUES[field] if field in VALUES and form["plain"] != "NoneType" else PLAIN[form["plain"]]


class Sweep:
    """Puts the fields of one call into bodies, and judges each.

    Attributes:
        fates: maps the paths of fields, with their forms, to what becomes of them.
    """

    def __init__(self, catalogue: Catalogue, dialect: str) -> None:
        self._catalogue, self._dialect = catalogue, dialect
        self._outcomes: dict[str, Outcome | str] = {}
        self.fates: dict[str, str] = {}

    def visit(self, name: str, path: str, body_with: Callable[[Any], Any]) -> None:
        """Judge the fields of a type.

        Args:
            body_with: makes a body of a value of the type.
        """
        minimal = self._catalogue.minimal(name, path)
        for field, form in self._catalogue.types[name]["fields"].items():
            at = f"{path}.{field}".lstrip(".")
            for each in self._catalogue.forms(form):
                self._field(field, each, at, minimal, body_with)

    def _field(self, field: str, form: Any, at: str, minimal: Any, body_with: Callable[[Any], Any]) -> None:
        without = body_with({name: value for name, value in minimal.items() if name != field})
        if "list" in form:
            parts = [*self._catalogue.forms(form["list"])]
            for part in parts:
                self._form(field, part, at, without, lambda value: body_with({**minimal, field: [value]}))
            return
        self._form(field, form, at, without, lambda value: body_with({**minimal, field: value}))

    def _form(self, field: str, form: Any, at: str, without: Any, body_with: Callable[[Any], Any]) -> None:
        if "values" in form and field not in ("model", "type", "role", "betas"):
            for value in form["values"]:
                self.fates[f"{at}={value}"] = self._fate(without, body_with(value), (field, str(value)))
            return
        value = self._catalogue.value(form, field, at.rpartition(".")[0])
        label = "" if "values" in form else self._catalogue.label(form)
        tags = [at.rpartition("[")[2].strip("]"), label.strip("[]"), field, *_names(at)]
        fate = self.fates[f"{at}{label}"] = self._fate(without, body_with(value), tags)
        if "type" in form and fate in ("obeyed", "required", "no effect"):
            self.visit(form["type"], f"{at}{label}", body_with)

    def _fate(self, without: Any, body: Any, names: Collection[str]) -> str:
        found, plain = self._outcome(body), self._outcome(without)
        if isinstance(found, str):
            assert any(name in found for name in names), (found, names, body)
            return "refused"
        if isinstance(plain, str):
            return "required"
        ignored = [name for name in found.ignored if name not in plain.ignored]
        if ignored:
            return f"reported as {', '.join(ignored)}"
        return "no effect" if found == plain else "obeyed"

    def _outcome(self, body: Any) -> Outcome | str:
        """What becomes of a body, or the message of its refusal."""
        key = json.dumps(body)
        if key not in self._outcomes:
            self._outcomes[key] = _outcome(self._dialect, body)
        return self._outcomes[key]


def _outcome(dialect: str, body: Any) -> Outcome | str:
    try:
        parsed = DIALECTS[dialect].parse(copy.deepcopy(body), SEEING)
    except ServingError as error:
        return error.message
    requests = [_edited(request)._replace(read_prompt=None) for request in parsed.requests]
    response = answer(dialect, body, RESPONSE, SEEING).body.decode()
    return Outcome(list(parsed.ignored), requests, re.sub(r"(msg|toolu)_\w+", "", response))


def _edited(request: Request) -> Request:
    """The request that the engine gets, whose tokens are characters."""
    if request.edit is None:
        return request
    rendered: list[Request] = []

    def render(shorter: Request) -> Prompt:
        rendered.append(shorter)
        return Prompt("", [*range(len(str(shorter.messages)))], VOCABULARY)

    edited, prompt = request.edit(request, render)
    [kept] = [each for each in rendered if len(str(each.messages)) == len(prompt.ids)][-1:]
    return edited._replace(messages=kept.messages, edit=None)


def _names(path: str) -> list[str]:
    """The names in a path, without those that every body has."""
    return [name for name in re.split(r"[.\[\]]+", path) if name and name not in ("messages", "content", "user")]


def _body(fields: Any) -> Any:
    """A valid body with the fields of a call. Its messages and tools surround those of the call."""
    body = {**BASE, **fields}
    if isinstance(fields.get("messages"), list):
        (message,) = fields["messages"]
        role = message.get("role", "") if isinstance(message, dict) else ""
        before = BEFORE if role == "user" else [USER]
        after = {"assistant": [USER], "system": [REPLY, USER]}
        body["messages"] = [*before, message, *after.get(role, [])]
    if isinstance(fields.get("tools"), list):
        body["tools"] = [WEATHER, *fields["tools"]]
    if "output_config" in fields:  # with tools, a format needs a rule for the calls
        del body["tools"]
    return body


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    """The types in the client's package, which is not installed here."""
    command = [str(toolchains.python("openai")), str(TYPES)]
    return Catalogue(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


@pytest.fixture(scope="module")
def fates(catalogue: Catalogue) -> dict[str, str]:
    """What becomes of each field, which is the same in all calls that have it, except for a few."""
    merged: dict[str, dict[str, str]] = {}
    for call in ("messages", "beta messages", "count", "beta count"):
        sweep = Sweep(catalogue, "anthropic_count" if "count" in call else "anthropic_messages")
        sweep.visit(catalogue.calls[call], "", _body)
        for path, fate in sweep.fates.items():
            merged.setdefault(path, {})[call] = fate
    return {path: _merged(by_call) for path, by_call in sorted(merged.items())}


def _merged(by_call: dict[str, str]) -> str:
    """The fate in all calls, or each call's."""
    if len({*by_call.values()}) == 1:
        return next(iter(by_call.values()))
    return "; ".join(f"{call}: {fate}" for call, fate in by_call.items())


def test_every_field_has_the_fate_of_the_list(fates: dict[str, str], request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(json.dumps(fates, indent=0, ensure_ascii=False) + "\n")
    listed = json.loads(GOLDEN.read_text())
    new = fates.keys() - listed.keys()
    assert not new, f"fields that no list has: {sorted(new)}"
    assert fates == listed


def test_every_field_without_effect_has_a_reason(fates: dict[str, str]) -> None:
    silent = {path for path, fate in fates.items() if "no effect" in fate}
    reasons = {pattern: {path for path in silent if re.search(pattern, path)} for pattern in SILENT}
    assert silent - set().union(*reasons.values()) == set()
    assert [pattern for pattern, paths in reasons.items() if not paths] == []


def test_the_list_of_models_has_no_other_fields(catalogue: Catalogue) -> None:
    fields = {name for call in ("models", "beta models") for name in catalogue.types[catalogue.calls[call]]["fields"]}
    assert fields == {"after_id", "before_id", "limit", "lifecycle", "betas", "workspace_id"}
