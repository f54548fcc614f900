"""The rules that the installed xgrammar makes of a schema, an expression or a structural tag."""

from __future__ import annotations

import json
import re

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
    """Whether a client wrote rules, which may be costly: xgrammar's own rules of a schema are not."""
    return kind in ("REGEX", "GRAMMAR") or any(name in text for name in ('"pattern', '"grammar"', '"regex"'))


def said(error: Exception) -> str:
    """Say what xgrammar found, without the place in its source; a failed check of its own has no words for a client."""
    text = _FAILED.sub("", _PLACE.sub("", str(error).strip()))
    if "Check failed" in str(error) and not text.strip():
        return "xgrammar cannot compile it"
    return text
