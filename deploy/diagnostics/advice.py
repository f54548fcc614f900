"""From what AWS and the container say of a failure to what has to change in the specification."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deploy.diagnostics import CAUSES, Cause

_QUOTA_TYPE = re.compile(r"'?(ml\.[a-z0-9-]+\.[a-z0-9]+)'?")


def causes(reason: str, log_tail: Sequence[str] = ()) -> list[Cause]:
    """What may have been the cause, the most telling first; symptoms only where nothing else was found."""
    text = "\n".join((reason, *log_tail))
    found = [cause for cause in CAUSES if cause.shown_by(text)]
    return [cause for cause in found if not cause.symptom] or found


def advice(reason: str, log_tail: Sequence[str] = (), name: str = "NAME") -> str:
    """What to change, a line for each likely cause (two at most); empty where nothing is known.

    Args:
        reason: FailureReason, or an error's message.
        log_tail: the last lines of the container's log.
        name: the endpoint's, where it is known.
    """
    said = []
    for cause in causes(reason, log_tail)[:2]:
        instance = _QUOTA_TYPE.search(reason)
        says = cause.says.replace("{type}", instance.group(1) if instance else "<instance.type>")
        said.append(says.replace("{name}", name))
    return "\n".join(said)
