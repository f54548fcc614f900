"""docs/adopt.md says what becomes of the public endpoints."""

from __future__ import annotations

from tests.deploy.public_endpoints import PUBLIC
from tests.deploy.unit.adopt import document


def test_the_document_is_up_to_date() -> None:
    assert len(PUBLIC) >= 30
    written = document.DOCUMENT.read_text(encoding="utf-8")
    assert written == document.render(), "write it anew: python -m tests.deploy.unit.adopt.document"
