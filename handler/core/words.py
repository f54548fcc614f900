"""Words of foreign programs, made fit for clients and for the log: exceptions, and answers of other servers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

_MOST_READ = 4_096  # characters that are looked at
_MOST_FOR_CLIENTS = 300
_MOST_FOR_LOG = 1_000
_SHORTEST_KEY = 4  # characters; masking a shorter one would spoil other words

_KEY = "[key]"
_KEYS = re.compile(
    r"(?i:\b(?:bearer|basic)\s+)[\w.~+/=-]{4,}"
    r"|\b(?:sk|pk|hf|rk|gsk|ghp|xox[abp])[-_][\w-]{8,}"
    r"|\bA[KS]IA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}(?:\.[\w-]*){0,2}"
    r"|(?i:\b(?:x-)?(?:api[-_ ]?key|access[-_ ]?token|authorization|password|secret|signature)\b['\"]?\s*[:=]\s*['\"]?"
    r"(?:(?:bearer|basic)\s+)?)"
    r"(?!\[key\])[^\s'\",;&}]{4,}"
)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]{1,500}@")

_PAGE = re.compile(r"<(?:!doctype\b|html\b|head\b|body\b|title\b)", re.IGNORECASE)
_TAG = re.compile(
    r"</?(?:a|b|i|p|hr|br|h[1-6]|div|span|pre|code|center|font|table|t[rdh]|ul|ol|li|img|svg|script|style|link|meta"
    r"|form|input|iframe)\b[^<>]{0,500}>",
    re.IGNORECASE,
)
_TRACEBACK = "Traceback (most recent call last)"
_REPR = re.compile(
    r"\b(?:\w{1,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Warning)"
    r"\((?:'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\")(?:,[^()]{0,200})?\)",
    re.DOTALL,
)
_EXCEPTION = re.compile(r"\b(?:[a-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Timeout)\b:?\s*")
_MASKS = (
    (re.compile(r"<[^<>]{1,200} at 0x[0-9a-fA-F]+>|\b0x[0-9a-fA-F]{6,}\b"), "[object]"),
    (re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,15}://[^\s'\"<>)\]]+"), "[address]"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?::\d{1,5})?"), "[address]"),
    (re.compile(r"\[[0-9a-fA-F]{0,4}(?::[0-9a-fA-F.]{0,15}){2,7}(?:%\w{1,15})?\](?::\d{1,5})?"), "[address]"),
    (re.compile(r"\b(?:localhost|[a-zA-Z0-9-]{1,63}(?:\.[a-zA-Z0-9-]{1,63}){1,8}):\d{2,5}\b"), "[address]"),
    (re.compile(r"\b(?:[a-zA-Z0-9-]{1,63}\.){1,8}(?:internal|local|svc|lan|amazonaws\.com)\b"), "[address]"),
    (re.compile(r"(?<![\w#.:/])[~.]{0,2}/[\w.+@%=-]+(?:/[\w.+@%=-]+)+/?"), "[path]"),
    (re.compile(r"(?<![\w#.:/])/[\w.+@%=-]+\.[a-zA-Z]\w{0,9}\b"), "[path]"),
    (re.compile(r"\b[A-Z]:\\[^\s'\"]+"), "[path]"),
    (re.compile(r"(?:, )?\bline \d+, in \w+"), ""),
)


def client_words(text: str, secrets: Iterable[str] = ()) -> str:
    """Return what a client may read of a foreign message: one bounded line without keys, addresses, paths, HTML or
    Python's names; "" where nothing is left.

    Args:
        secrets: keys and names that must not be in it, beside those that look like keys.
    """
    text = mask_keys(text, secrets)[:_MOST_READ]
    if _PAGE.search(text):
        return ""
    if _TRACEBACK in text:
        text = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    text = _TAG.sub(" ", text)
    text = _EXCEPTION.sub("", _REPR.sub(r"\1\2", text))
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return _cut(text, _MOST_FOR_CLIENTS)


def log_words(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a foreign message for the log: one line of at most 1,000 characters, its keys masked."""
    return _cut(mask_keys(text, secrets)[:_MOST_READ], _MOST_FOR_LOG)


def mask_keys(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace `secrets`, and all that looks like a key."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_KEY:
            for form in {secret, quote(secret, safe="")}:
                text = text.replace(form, _KEY)
    return _CREDENTIALS.sub("***@", _KEYS.sub(_KEY, text[: 4 * _MOST_READ]))


def _cut(text: str, most: int) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
