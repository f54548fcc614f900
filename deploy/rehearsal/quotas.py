"""Service Quotas of SageMaker, which moto lacks: two of each instance type, or what was asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from moto.core.exceptions import ServiceException
from moto.servicequotas.responses import ServiceQuotasResponse

from deploy.service_model import instance_types

_AT_FIRST = 2.0


class Quotas:
    """The quotas of all instance types, by their code."""

    def __init__(self) -> None:
        shapes = {"endpoint": "ProductionVariantInstanceType", "transform job": "TransformInstanceType"}
        names = [f"{type} for {use} usage" for use, shape in shapes.items() for type in instance_types(shape)]
        self._quotas = {_code(name): _quota(name) for name in names}

    def install(self) -> None:
        """Put its calls in the place of moto's, for good."""
        for name in ("list_service_quotas", "get_service_quota", "request_service_quota_increase"):
            setattr(ServiceQuotasResponse, name, _method(getattr(self, name)))

    def list_service_quotas(self, p: Mapping[str, Any]) -> dict[str, Any]:
        return {"Quotas": list(self._quotas.values()) if p["ServiceCode"] == "sagemaker" else []}

    def get_service_quota(self, p: Mapping[str, Any]) -> dict[str, Any]:
        return {"Quota": self._named(p)}

    def request_service_quota_increase(self, p: Mapping[str, Any]) -> dict[str, Any]:
        """Grant it at once."""
        quota = self._named(p)
        quota["Value"] = float(p["DesiredValue"])
        names = ("ServiceCode", "QuotaCode", "QuotaName")
        asked = {"DesiredValue": quota["Value"], "Status": "APPROVED", **{name: quota[name] for name in names}}
        return {"RequestedQuota": asked}

    def _named(self, p: Mapping[str, Any]) -> dict[str, Any]:
        code = p["QuotaCode"]
        if p["ServiceCode"] != "sagemaker" or code not in self._quotas:
            raise ServiceException("NoSuchResourceException", f"There is no quota {code} of {p['ServiceCode']}.")
        return self._quotas[code]


def _quota(name: str) -> dict[str, Any]:
    return {
        "ServiceCode": "sagemaker",
        "ServiceName": "Amazon SageMaker",
        "QuotaCode": _code(name),
        "QuotaName": name,
        "Value": _AT_FIRST,
        "Adjustable": True,
    }


def _code(name: str) -> str:
    """Return a code in AWS's form; AWS's own are not known here."""
    return f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}"


def _method(call: Any) -> Any:
    return lambda self: json.dumps(call(json.loads(self.body)))
