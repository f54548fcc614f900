"""One reason why deployments fail."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One reason why deployments fail.

    Attributes:
        name: for people and tests.
        texts: patterns; any of them in FailureReason, an error's message or the log reveals it. Case is ignored.
        says: what to change.
        symptom: what many failures look like: used only if there is no other cause.
    """

    name: str
    texts: tuple[str, ...]
    says: str
    symptom: bool = False

    def matches(self, text: str) -> bool:
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.texts)
