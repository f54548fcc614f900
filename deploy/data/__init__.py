"""Dated tables, read once: instance types, prices, models, AWS's registries."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(name: str) -> Any:
    """Return the content of `deploy/data/<name>.json`. Callers must not change it."""
    return json.loads(files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
