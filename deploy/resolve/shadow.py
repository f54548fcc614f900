"""Decide what serves, and its shadow: each by itself, as a specification of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.errors import DoesNotFit, SpecError
from deploy.resolve.candidates import Resolution
from deploy.spec.shadow import shadow_of

if TYPE_CHECKING:
    from deploy.spec import Spec


def with_shadow(spec: Spec, resolve: Callable[[Spec], Resolution]) -> Resolution:
    """Return the resolution of what serves, with the shadow's decision and warnings.

    Raises:
        SpecError, DoesNotFit: as `resolve`; the shadow's say so.
    """
    serving = resolve(spec.model_copy(update={"shadow": None}))
    try:
        shadow = resolve(shadow_of(spec)).decision
    except (SpecError, DoesNotFit) as error:
        raise type(error)(f"shadow: {error}", error.advice) from None
    own = [f"shadow: {warning}" for warning in shadow.warnings if warning not in serving.decision.warnings]
    warnings = (*serving.decision.warnings, *own)
    return replace(serving, decision=replace(serving.decision, shadow=shadow, warnings=warnings))
