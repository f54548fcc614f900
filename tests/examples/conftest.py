from __future__ import annotations

import pytest

from tests.deploy.local.conftest import loop

__all__ = ["loop"]


@pytest.fixture(autouse=True)
def _without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lmi deploy export` asks it for a model's size."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
