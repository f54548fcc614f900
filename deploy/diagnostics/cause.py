"""One reason why deployments fail."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One reason why deployments fail.

    Attributes:
        name: for people and tests.
        row: of the contract's table of what users hit.
        texts: any of them in FailureReason, an error's message or the log gives it away; letters' case is the same.
        says: what to change.
        symptom: only what a failure looks like: said where nothing more telling was found.
    """

    name: str
    row: int
    texts: tuple[str, ...]
    says: str
    symptom: bool = False

    def shown_by(self, text: str) -> bool:
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.texts)
