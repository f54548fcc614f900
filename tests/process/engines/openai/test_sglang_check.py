"""The check of schemas and grammars in front of SGLang: when there is one, and what it gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.openai.engine import checks_structured_output, structured_output_check
from handler.engines.openai.sglang import check
from handler.engines.structured_output import xgrammar
from tests.doubles.sglang_server import listening
from tests.one_test import in_one_test

NOBODY = "http://127.0.0.1:9/v1"
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'
TEXTS = {
    "json_schema": ('{"type": "string"}', ("JSON", '{"type": "string"}')),
    "json_object": ("", ("JSON", '{"type": "object"}')),
    "regex": ("a+", ("REGEX", "a+")),
    "choice": ('["a.b"]', ("REGEX", r"a\.b")),
    "grammar": ('root ::= "c"', ("EBNF", 'root ::= "c"')),
    "structural_tag": (TAG, ("STRUCTURAL_TAG", TAG)),
}


def config(*urls: str, model: Path | None = None) -> EngineConfig:
    return EngineConfig(Config(engine_options={"base_url": urls, "base_url_kind": "sglang"}), model=model)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: object())


@in_one_test(("backend", "checks"), [("xgrammar", True), ("llguidance", False), ("outlines", False), ("none", False)])
def test_only_the_servers_that_use_xgrammar_need_it(installed: None, backend: str, checks: bool) -> None:
    with listening(backend=backend) as server, listening(backend="none", version="0.5.2") as other:
        assert checks_structured_output(config(server.url)) is checks
        assert checks_structured_output(config(server.url, other.url)) is checks


def test_a_server_that_is_not_running_yet_may_use_it(installed: None) -> None:
    with listening(backend="none") as server:
        assert checks_structured_output(config(NOBODY, server.url))


def test_without_the_package_there_is_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with listening() as server:
        assert not checks_structured_output(config(server.url))
        assert server.num_asked == 0


@in_one_test(("kind", "text", "expected"), [(kind, *case) for kind, case in TEXTS.items()])
def test_the_check_gets_what_the_server_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, text: str, expected: tuple[str, str]
) -> None:
    made: list[tuple[Path, bool]] = []
    tried: list[tuple[str, str]] = []

    def make(model: Path, *, trust_remote_code: bool) -> Any:
        made.append((model, trust_remote_code))
        return lambda *text: tried.append(text)

    monkeypatch.setattr(check, "XgrammarCheck", make)
    monkeypatch.setattr(xgrammar, "version", lambda name: "0.2.7")
    found = structured_output_check(config(NOBODY, model=tmp_path))
    found(StructuredOutput(kind, text))
    assert made == [(tmp_path, False)]
    assert tried == [expected]


@pytest.fixture
def old_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.24, which SGLang 0.5.2 needs: it has no Grammar.from_lark, and structural tags of another form."""
    monkeypatch.setitem(sys.modules, "xgrammar", SimpleNamespace(Grammar=SimpleNamespace()))
    monkeypatch.setattr(xgrammar, "version", lambda name: "0.1.24")


def test_a_grammar_is_never_larks(old_xgrammar: None) -> None:
    """SGLang gives each one to xgrammar as EBNF; the check then says what xgrammar says."""
    assert xgrammar.ebnf("EBNF", 'start: "a"') == 'start: "a"'
    assert xgrammar.has_client_rules("EBNF", "")


def test_structural_tags_need_a_newer_xgrammar(old_xgrammar: None) -> None:
    with pytest.raises(ValueError, match=r"xgrammar 0\.1\.24 does not support structural tags"):
        xgrammar.ebnf("STRUCTURAL_TAG", TAG)


NESTED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
PART = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": NESTED}, "end": "</a>"}


@in_one_test(("kind", "value"), [
    ("json_schema", NESTED), ("structural_tag", {"type": "structural_tag", "format": PART}),
])  # fmt: skip
def test_a_keyword_that_xgrammar_ignores_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, value: Any
) -> None:
    monkeypatch.setattr(check, "XgrammarCheck", lambda model, trust_remote_code: lambda *text: None)
    monkeypatch.setattr(xgrammar, "version", lambda name: "0.2.1")
    found = structured_output_check(config(NOBODY, model=tmp_path))
    with pytest.raises(ValueError, match=r"xgrammar does not enforce the schema's .*uniqueItems"):
        found(StructuredOutput(kind, json.dumps(value)))
