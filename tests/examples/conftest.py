from __future__ import annotations

from tests.deploy.local.conftest import loop

__all__ = ["loop"]
