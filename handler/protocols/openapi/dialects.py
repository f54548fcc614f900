"""All dialects: a line for each schema of `protocols.registry`, by its name. docs/wire.md is the text beside this."""

from __future__ import annotations

from collections.abc import Mapping

from handler.protocols.openapi import lmi_bodies, openai_bodies, tgi_bodies, triton_bodies
from handler.protocols.openapi.base import Components, Dialect

COMPONENTS: Components = {
    **lmi_bodies.COMPONENTS,
    **tgi_bodies.COMPONENTS,
    **openai_bodies.COMPONENTS,
    **triton_bodies.COMPONENTS,
}

DIALECTS: Mapping[str, Dialect] = {
    **lmi_bodies.DIALECTS,
    **tgi_bodies.DIALECTS,
    **openai_bodies.DIALECTS,
    **triton_bodies.DIALECTS,
}

NOT_SERVED = frozenset({"no_dynamic_batch"})
"""Schemas that only refuse: no one is told to use them."""
