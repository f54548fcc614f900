"""Known causes of failed deployments: the texts that reveal them, and what to change.

The most specific causes come first. Names in the advice are the specification's (`lmi deploy schema`).
"""

from __future__ import annotations

from deploy.diagnostics.cause import Cause
from deploy.diagnostics.container import CONTAINER
from deploy.diagnostics.platform import PLATFORM

__all__ = ["CAUSES", "Cause"]

CAUSES = (*CONTAINER, *PLATFORM)
