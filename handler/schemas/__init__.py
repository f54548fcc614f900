"""The dialects by name. README.md beside this file says how to add one."""

from __future__ import annotations

from handler.schemas.base import Schema
from handler.schemas.batch import DynamicBatch
from handler.schemas.lmi import Lmi
from handler.schemas.tgi import TgiCompat

SCHEMAS: dict[str, Schema] = {schema.name: schema for schema in (Lmi(), TgiCompat(), DynamicBatch())}


def choose(*, rolling_batch: str, tgi_compat: bool) -> Schema:
    """The dialect of /invocations, chosen once; nothing below asks again."""
    if rolling_batch == "disable":
        return SCHEMAS["dynamic_batch"]
    return SCHEMAS["tgi_compat" if tgi_compat else "lmi"]
