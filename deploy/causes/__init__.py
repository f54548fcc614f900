"""Why deployments fail: how it shows in texts, and what to change in the specification.

Tables, by contract sagemaker.md, section 8 (`row`), the most telling first. Names in the advice are the specification's
(`lmi deploy schema`).
"""

from __future__ import annotations

from deploy.causes.cause import Cause
from deploy.causes.container import CONTAINER
from deploy.causes.platform import PLATFORM

__all__ = ["CAUSES", "Cause"]

CAUSES = (*CONTAINER, *PLATFORM)
