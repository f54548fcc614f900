"""Times of recordings, in seconds since the epoch."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any


def seconds(value: Any) -> float | None:
    """Return a time that is a number, or ISO 8601; None for anything else. Without a zone it is UTC."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e12 and math.isfinite(value) else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        found = datetime.fromisoformat(_to_microseconds(value.strip().replace("Z", "+00:00").replace("z", "+00:00")))
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        return None


def _to_microseconds(text: str) -> str:
    """Give the fraction six digits, as Python 3.10 wants it."""
    head, dot, rest = text.partition(".")
    if not dot:
        return text
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{head}.{digits[:6]:0<6}{rest[len(digits) :]}"
