"""Data tables about instance types, prices, models, AWS's registries and causes of failures."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


def text(name: str) -> str:
    """Return the content of a file in `deploy/data/`."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


@cache
def table(name: str) -> Any:
    """Return the content of `deploy/data/<name>.json`. Callers must not change it."""
    return json.loads(text(f"{name}.json"))
