"""Why deployments fail: how it shows in texts, and what to change in the specification.

Tables, by contract sagemaker.md, section 8 (`row`), the most telling first. Names in the advice are the specification's
(`lmi deploy schema`).
"""

from __future__ import annotations

from deploy.diagnostics.cause import Cause
from deploy.diagnostics.container import CONTAINER
from deploy.diagnostics.platform import PLATFORM

__all__ = ["CAUSES", "Cause"]

CAUSES = (*CONTAINER, *PLATFORM)
