"""Dated tables that lie beside the code, read once: instance types, prices, models, AWS's registries."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(name: str) -> Any:
    """The JSON of `deploy/data/<name>.json`; callers do not change it."""
    return json.loads(files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
