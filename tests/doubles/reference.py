"""What the double's model must give, computed by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def reference(model: Any, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all ids but the first."""
    found = []
    for at in range(1, len(ids)):
        logits = model.logits(ids[:at]).tolist()
        highest = max(logits)
        found.append(logits[ids[at]] - highest - math.log(math.fsum(math.exp(one - highest) for one in logits)))
    return found
