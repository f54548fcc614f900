"""ARNs of everything that a deployment creates and uses."""

from __future__ import annotations

from typing import Any

from deploy.resolve.decision import Decision
from deploy.resolve.ecr import ECR_URI
from deploy.resources.names import TRANSFORM_LOGS, batch_name, digest, job_prefix, version_name
from deploy.spec import Spec


class Arns:
    """ARNs in one deployment's partition, region and account."""

    def __init__(self, spec: Spec, decision: Decision) -> None:
        _, self._partition, *_, account, _ = spec.role.split(":", 5)
        self.account: str = decision.account or account
        self._region = decision.region
        self._spec = spec
        self._versions = f"{version_name(spec.name, {})[: -len(digest({}))]}*"

    def of(self, service: str, rest: str, *, region: str | None = None) -> str:
        where = self._region if region is None else region
        return f"arn:{self._partition}:{service}:{where}:{self.account}:{rest}"

    def models(self) -> list[str]:
        return self._sagemaker("model", [self._versions])

    def configs(self) -> list[str]:
        return self._sagemaker("endpoint-config", [self._versions])

    def endpoints(self) -> list[str]:
        return self._sagemaker("endpoint", [self._spec.endpoint_name])

    def components(self) -> list[str]:
        return self._sagemaker("inference-component", self._component_names())

    def _component_names(self) -> list[str]:
        """Return the names of the components, each before its adapters."""
        return [
            name for item in self._spec.components for name in (item.name, *(child.name for child in item.adapters))
        ]

    def _sagemaker(self, kind: str, names: list[str]) -> list[str]:
        """Return each name as written and in lower case: SageMaker lowers names in ARNs; policies heed case."""
        spelt = dict.fromkeys(spelling for name in names for spelling in (name, name.lower()))
        return [self.of("sagemaker", f"{kind}/{name}") for name in spelt]

    def transform_jobs(self) -> list[str]:
        return self._sagemaker("transform-job", [f"{job_prefix(self._spec.name)}*"])

    def batch_models(self) -> list[str]:
        versions = version_name(batch_name(self._spec.name), {})[: -len(digest({}))]
        return self._sagemaker("model", [f"{versions}*"])

    def batch_logs(self) -> list[str]:
        """Return the ARNs of the group of all jobs, in both spellings, and of the deployment's streams there."""
        group = self.of("logs", f"log-group:{TRANSFORM_LOGS}")
        return [group, f"{group}:log-stream:", f"{group}:log-stream:{job_prefix(self._spec.name)}*"]

    def logs(self) -> list[str]:
        """Return the ARNs of the log groups, and of their streams."""
        groups = [f"/aws/sagemaker/Endpoints/{self._spec.name}"] if self._spec.endpoint is None else []
        groups += [f"/aws/sagemaker/InferenceComponents/{name}" for name in self._component_names()]
        return [self.of("logs", f"log-group:{group}{end}") for group in groups for end in ("", ":*")]

    def alarms(self) -> list[str]:
        return [self.of("cloudwatch", f"alarm:{self._spec.name}/*")]

    def repository(self, image: str) -> str | None:
        """Return the ARN of the image's ECR repository; None: the image is elsewhere."""
        parts = ECR_URI.fullmatch(image)
        if parts is None:
            return None
        return f"arn:{self._partition}:ecr:{parts['region']}:{parts['account']}:repository/{parts['repository']}"

    def is_own(self, image: str) -> bool:
        """Whether the image is in this account's ECR."""
        parts = ECR_URI.fullmatch(image)
        return parts is not None and parts["account"] == self.account

    def objects(self, uri: str) -> str:
        """Return the ARN of one adapter's file, or of everything below another S3 URI."""
        place = uri.removeprefix("s3://")
        end = "" if uri.endswith(".tar.gz") else "*" if "/" in place else "/*"
        return f"arn:{self._partition}:s3:::{place}{end}"

    def bucket(self, name: str) -> str:
        return f"arn:{self._partition}:s3:::{name}"

    def via(self, service: str) -> dict[str, Any]:
        """Return the condition that a service of this region uses a key. The host's end differs between partitions."""
        return {"StringLike": {"kms:ViaService": f"{service}.{self._region}.*"}}

    def keys(self) -> list[str]:
        """Return all keys of the account in the region."""
        return [self.of("kms", "key/*")]

    def is_own_key(self, arn: str) -> bool:
        """Whether `keys` has it."""
        return arn.startswith(self.of("kms", "key/"))

    def key(self, key: str, condition: dict[str, Any] | None = None) -> tuple[list[str], dict[str, Any] | None]:
        """Return a KMS key's resources and condition: IAM takes an alias as a condition, not as a resource."""
        if key.startswith("arn:") and ":alias/" not in key:
            return [key], condition
        if "alias/" in key:
            name = key[key.index("alias/") :]
            alias = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": name}}
            return self.keys(), {**alias, **(condition or {})}
        return [self.of("kms", f"key/{key}")], condition
