"""The installed xgrammar: its rules of a schema, an expression or a structural tag, and a trial of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from handler.core.values import StructuredOutput
from handler.engines.structured_output.ebnf import acyclic
from handler.engines.structured_output.expressions import Walker

_PLACE = re.compile(r"^(\[[\d:]+\] \S+: )?")
_FAILED = re.compile(r"Check failed: .*? is false: ?", re.DOTALL)


def ebnf(kind: str, text: str) -> str:
    """Write a text's rules in xgrammar's EBNF.

    Args:
        kind: JSON, JSON_OBJECT, REGEX, GRAMMAR or STRUCTURAL_TAG, as vLLM names them.

    Raises:
        ValueError: xgrammar cannot follow it.
    """
    from xgrammar import Grammar

    try:
        match kind:
            case "GRAMMAR":
                return text if "::=" in text else str(Grammar.from_lark(text))
            case "REGEX":
                return str(Grammar.from_regex(text))
            case "STRUCTURAL_TAG":
                tag = json.loads(text)
                return str(Grammar.from_structural_tag(tag))
        return str(Grammar.from_json_schema(text if kind == "JSON" else '{"type": "object"}'))
    except Exception as error:
        raise ValueError(said(error)) from None


def has_own_rules(kind: str, text: str) -> bool:
    """Return whether a client wrote rules, which may be costly: xgrammar's own rules of a schema are not."""
    return kind in ("REGEX", "GRAMMAR") or any(name in text for name in ('"pattern', '"grammar"', '"regex"'))


def said(error: Exception) -> str:
    """Say what xgrammar found, without the place in its source; a failed check of its own has no words for a client."""
    text = _FAILED.sub("", _PLACE.sub("", str(error).strip()))
    if "Check failed" in str(error) and not text.strip():
        return "xgrammar cannot compile it"
    return text


class XgrammarCheck:
    """Compiles texts with a checkpoint's vocabulary, and makes the masks of their first tokens, as an engine would.

    Args:
        model: a directory with a tokenizer.
    """

    def __init__(self, model: Path, *, trust_remote_code: bool = False) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=trust_remote_code)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._walker = Walker(
            tokenizer.get_vocab(),
            info.vocab_size,
            xgrammar.allocate_token_bitmask(1, info.vocab_size),
            lambda matcher, mask: matcher.fill_next_token_bitmask(mask),
            lambda matcher, id: matcher.accept_token(id) and not matcher.is_terminated(),
        )

    def __call__(self, kind: str, text: str) -> None:
        """Try a text.

        Args:
            kind: as in `ebnf`.

        Raises:
            ValueError: a rule is cyclic, xgrammar cannot follow the text, or a step takes too long.
        """
        written = ebnf(kind, text)
        rules = acyclic(written)
        self._walker.start(self._matchers(written))
        if has_own_rules(kind, text):
            for abridged in rules.abridged():
                self._walker.abridged(self._matchers(abridged))

    def _matchers(self, rules: str) -> Any:
        try:
            return partial(self._xgrammar.GrammarMatcher, self._compiler.compile_grammar(rules))
        except Exception as error:
            raise ValueError(said(error)) from None


# -- the parts of structural tags (xgrammar's documentation) -----------------------------------------------------------


Tag = Mapping[str, Any]


def with_schemas(tag: Tag, replace: Callable[[Tag], Tag]) -> Tag:
    """Return a tag's format with each part that is a JSON schema replaced."""
    if tag["type"] == "json_schema":
        return replace(tag)
    parts: dict[str, Any] = {
        name: [with_schemas(part, replace) for part in tag[name]] for name in ("elements", "tags") if name in tag
    }
    if "content" in tag:
        parts["content"] = with_schemas(tag["content"], replace)
    return {**tag, **parts}


def contents(structured_output: StructuredOutput) -> Iterator[StructuredOutput]:
    """Give each schema, expression and grammar of a structural tag as structured output of its own."""
    waiting = [json.loads(structured_output.value)["format"]]
    while waiting:
        tag = waiting.pop()
        match tag["type"]:
            case "json_schema" | "qwen_xml_parameter":
                yield StructuredOutput("json_schema", json.dumps(tag["json_schema"], ensure_ascii=False))
            case "regex":
                yield StructuredOutput("regex", tag["pattern"])
            case "grammar":
                yield StructuredOutput("grammar", tag["grammar"])
        waiting += [part for name in ("elements", "tags") for part in tag.get(name, ())]
        waiting += [tag["content"]] if "content" in tag else []


def without_text(structured_output: StructuredOutput) -> StructuredOutput:
    """Return the rule without the text that may come before what it rules."""
    if not structured_output.allows_text:
        return structured_output
    tag = json.loads(structured_output.value)
    tag["format"]["at_least_one"] = True
    return StructuredOutput(structured_output.kind, json.dumps(tag, ensure_ascii=False))
