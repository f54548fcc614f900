"""Limits that users meet: the documents say the numbers by which the code goes."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENTS = Path(__file__).parents[1] / "docs"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WORDS = {3: "three", 10: "ten"}


def undocumented(page: str, *limits: str) -> list[str]:
    """Return the statements about limits, made of the code's own numbers, that a page does not have."""
    text = re.sub(r"\s+", " ", (DOCUMENTS / page).read_text())
    return [limit for limit in limits if limit not in text]
