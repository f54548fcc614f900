"""What a deployment consists of, as values: one `Resource` a thing that AWS keeps for us.

The builders (`build/`) make them of a specification, without I/O; `plan.py` holds them against what exists; `apply.py`
makes it so; `export/` writes them as CloudFormation and Terraform.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


class Kind(enum.Enum):
    """In the order in which they are made; they go in the opposite one."""

    MODEL = "model"
    ENDPOINT_CONFIG = "endpoint-config"
    ENDPOINT = "endpoint"
    COMPONENT = "inference-component"
    SCALABLE_TARGET = "scalable-target"
    SCALING_POLICY = "scaling-policy"
    ALARM = "alarm"


@dataclass(frozen=True)
class Resource:
    """One thing that AWS keeps.

    Attributes:
        kind: which of boto3's calls makes it (the table is `calls.py`).
        name: what AWS knows it by, unique among its kind in the account and region.
        request: the keyword arguments of the boto3 call that makes it, tags included.
        needs: the keys of those that must be there before.
    """

    kind: Kind
    name: str
    request: Json
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.kind.value}/{self.name}"
