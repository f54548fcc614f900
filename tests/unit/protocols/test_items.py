"""Each row of `ITEMS` has what reads it and what describes it."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args, get_type_hints

import pytest

from handler.protocols.responses import api
from handler.protocols.responses.chat import InputReader
from handler.protocols.responses.types import ITEMS

WRITTEN = {kind: known.written for kind, known in ITEMS.items() if known.written.event}


def types_in(declared: Any) -> Iterator[str]:
    """Yield the values of `type` of a TypedDict, or of all in a union."""
    if isinstance(declared, UnionType):
        for member in get_args(declared):
            yield from types_in(member)
    else:
        yield from get_args(get_type_hints(declared)["type"])


@pytest.mark.parametrize("kind", ITEMS)
def test_a_reader_exists_for_the_meaning(kind: str) -> None:
    assert callable(getattr(InputReader, f"_{ITEMS[kind].meaning}", None)), f"InputReader has no _{ITEMS[kind].meaning}"


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_document_has_what_a_model_writes(kind: str) -> None:
    assert kind in types_in(api.OutputItem), "add a TypedDict of the item to OutputItem in api.py"
    assert f"{WRITTEN[kind].event}.delta" in types_in(api.Delta), "add a TypedDict of the event to Delta in api.py"
    assert f"{WRITTEN[kind].event}.done" in types_in(api.Done), "add a TypedDict of the event to Done in api.py"


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_last_event_has_the_fields_of_the_row(kind: str) -> None:
    [done] = [each for each in get_args(api.Done) if f"{WRITTEN[kind].event}.done" in types_in(each)]
    hints = get_type_hints(done)
    assert {WRITTEN[kind].field, *WRITTEN[kind].more, *WRITTEN[kind].repeated} <= hints.keys()
