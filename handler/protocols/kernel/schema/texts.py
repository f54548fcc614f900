"""The schemas of texts to embed or to compare."""

from __future__ import annotations

from typing import Any

from handler.protocols.kernel.json_schema import COUNT, TEXT, Shape, listing
from handler.protocols.kernel.texts import MAX_TEXTS

NON_EMPTY: Shape = {**TEXT, "minLength": 1}

_IDS = listing(COUNT, minItems=1)


def text_list(items: Shape, most: int = MAX_TEXTS) -> Shape:
    return listing(items, minItems=1, maxItems=most)


def texts(most: int = MAX_TEXTS) -> dict[str, Any]:
    """Describe a text, token ids, or a list of those."""
    return {"anyOf": [NON_EMPTY, _IDS, text_list({"anyOf": [TEXT, _IDS]}, most)]}
