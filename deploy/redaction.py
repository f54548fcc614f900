"""Recognize secrets, which are refused in a container's environment and replaced by `***` in all output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from handler.core.secrets import TOKENS

HIDDEN = "***"

_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-.]")  # hfToken and hf.token are hf_token
_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEYS?|AUTHORIZATION)$"
    r"|_(KEY|SECRET|PASSWORD)S?$"
    r"|(^|_)(SECRET|PASSWORD)_(?!ARN$|NAME$|ID$)"
    r"|_(PASS|PWD)$|^PGPASS$"
)
_VALUE = re.compile(
    rf"{TOKENS}"
    r"|(?<=://hooks\.slack\.com/services/)[A-Za-z0-9/]+"
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"  # https://user:password@host
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|(?<=[&?]X-Amz-Signature=)[0-9a-f]+|(?<=[&?]X-Amz-Security-Token=)[^&\s]+"
)
_WORD = (
    r"(api[_-]?keys?|passw(or)?d|passphrase|secret|(secret|private)([_-]?access)?[_-]?key|authorization"
    r"|(hf|hub|auth|access|api|bearer|session)[_-]?token|(?<![a-z0-9_.-])token|(?<=--)token)"
)
_BEFORE = r"[\w.-]{0,40}?" + _WORD  # bounded, to keep matching linear
_WITHIN = re.compile(
    rf"\"{_BEFORE}\"\s?:\s?\"(?!arn:)[^\"]"
    rf"|(?<![\w-])-(-|D)?{_BEFORE}(=|\s)[\"']?(?!-|arn:)[^\s\"']"
    r"|\bbearer\s[\w.~+/=-]{8}",
    re.IGNORECASE,
)
"""Matches a secret inside a value: a JSON member, a command-line argument or a header."""

_NEVER_A_NUMBER = re.compile(r"(^|_)(PASSWORD|PASSWD|PASSPHRASE)S?$")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?|true|false", re.IGNORECASE)
"""Numbers and booleans, e.g. `max_token=512`, are not secrets. SageMaker passes them as strings."""


def is_secret(name: str, value: object) -> bool:
    """Return whether a setting's name or value looks like a secret."""
    text = str(value)
    words = _WORDS.sub("_", name).upper()
    if not text or (_NUMBER.fullmatch(text) and not _NEVER_A_NUMBER.search(words)):
        return False
    return any(form.search(where) for form, where in ((_NAME, words), (_VALUE, text), (_WITHIN, text)))


def redact(value: Any) -> Any:
    """Return the value with secrets replaced by `***`, even inside nested mappings, lists and strings."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _hides(name, item) else redact(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return _VALUE.sub(HIDDEN, value) if isinstance(value, str) else value


def _hides(name: object, value: object) -> bool:
    return isinstance(value, str | int | float) and is_secret(str(name), value)
