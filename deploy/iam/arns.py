"""ARNs of the resources that a deployment creates and uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from deploy.resolve.decision import Decision
from deploy.resolve.images import ECR_URI
from deploy.resources.resource import TRANSFORM_LOGS, batch_name, digest, job_prefix, version_name
from deploy.s3.prefix import ARCHIVE, bucket_and_key
from deploy.spec import Spec
from deploy.spec.components import servers, shadow_of, uploads
from deploy.spec.options import read, written

Condition = dict[str, dict[str, Any]]


class Scope(NamedTuple):
    """ARNs of resources, and the condition under which access to them is allowed."""

    resources: list[str]
    condition: Condition | None = None


class Arns:
    """The ARNs that a deployment needs. Methods return [] for resources that the specification does not have.

    Attributes:
        data: the S3 URIs of the models, without duplicates.
        uploads: the S3 URIs of the models that `up` uploads.
        artifacts: the S3 URIs of the models and their adapters.
        written, read: further S3 URIs that SageMaker writes and reads.
        requests, responses: the S3 URIs for the requests and responses of asynchronous inference.
        batch_input, batch_output: the S3 URIs for the input and output of batch transform.
        checked: the S3 URIs in buckets whose encryption is checked.
    """

    def __init__(self, spec: Spec, decision: Decision) -> None:
        _, self._partition, *_, account, _ = spec.role.split(":", 5)
        self.account: str = decision.account or account
        self._region = decision.region
        self.spec, self.encryption = spec, spec.encryption
        self._served = _decided(spec, decision)
        self.data = _once(decided.model_data for _, decided in self._served)
        self.uploads = uploads(spec) if self.data else []
        self.artifacts = self.data + [adapter.artifact for item in spec.components for adapter in item.adapters]
        self.written, self.read = written(spec), [*read(spec)]
        queue, batch = spec.asynchronous, spec.batch
        self.requests = [queue.output] if queue else []
        self.responses = _once([queue.output, queue.failures]) if queue else []
        self.batch_input, self.batch_output = ([batch.input], [batch.output]) if batch else ([], [])
        captured = [spec.capture.output] if spec.capture else []
        self.checked = [*self.artifacts, *self.responses, *captured, *self.batch_input, *self.batch_output]

    def of(self, service: str, resource: str, *, region: str | None = None) -> str:
        where = self._region if region is None else region
        return f"arn:{self._partition}:{service}:{where}:{self.account}:{resource}"

    def principals(self, *kinds: str) -> list[str]:
        """Return ARN patterns that match all of the account's roles or users."""
        return [self.of("iam", f"{kind}/*", region="") for kind in kinds]

    def models(self) -> list[str]:
        return self._sagemaker("model", [_versions(self.spec.name)])

    def configs(self) -> list[str]:
        return self._sagemaker("endpoint-config", [_versions(self.spec.name)] if self.spec.endpoint is None else [])

    def endpoint(self) -> list[str]:
        """Return the ARNs of the deployment's own endpoint, or of the shared endpoint that it uses."""
        return self._sagemaker("endpoint", [self.spec.endpoint_name])

    def deployment_endpoint(self) -> list[str]:
        return self.endpoint() if self.spec.endpoint is None else []

    def shared_endpoint(self) -> list[str]:
        """Return the ARNs of the shared endpoint, and of all configurations because its configuration is unknown."""
        return [] if self.spec.endpoint is None else [*self.endpoint(), *self.every("endpoint-config")]

    def components(self) -> list[str]:
        return self._sagemaker("inference-component", self._component_names())

    def transform_jobs(self) -> list[str]:
        return self._sagemaker("transform-job", [f"{job_prefix(self.spec.name)}*"] if self.spec.batch else [])

    def batch_models(self) -> list[str]:
        return self._sagemaker("model", [_versions(batch_name(self.spec.name))] if self.spec.batch else [])

    def every(self, kind: str) -> list[str]:
        return [self.of("sagemaker", f"{kind}/*")]

    def _component_names(self) -> list[str]:
        """Return the names of the components, each followed by its adapters."""
        return [name for item in self.spec.components for name in (item.name, *(child.name for child in item.adapters))]

    def _sagemaker(self, kind: str, names: list[str]) -> list[str]:
        """Return ARNs with each name as written and in lowercase, as in SageMaker. IAM is case-sensitive."""
        return [
            self.of("sagemaker", f"{kind}/{name}")
            for name in _once(spelling for name in names for spelling in (name, name.lower()))
        ]

    def batch_logs(self) -> list[str]:
        """Return the ARNs of the log group of all transform jobs, and of the deployment's streams in this group.

        The ARN of the group is returned with and without streams.
        """
        group = self.of("logs", f"log-group:{TRANSFORM_LOGS}")
        streams = [group, f"{group}:log-stream:", f"{group}:log-stream:{job_prefix(self.spec.name)}*"]
        return streams if self.spec.batch else []

    def logs(self) -> list[str]:
        """Return the ARNs of the log groups of the endpoint and the components, and of their streams."""
        groups = [f"/aws/sagemaker/Endpoints/{self.spec.name}"] if self.spec.endpoint is None else []
        groups += [f"/aws/sagemaker/InferenceComponents/{name}" for name in self._component_names()]
        return [self.of("logs", f"log-group:{group}{end}") for group in groups for end in ("", ":*")]

    def alarms(self) -> list[str]:
        return [self.of("cloudwatch", f"alarm:{self.spec.name}/*")]

    def tracking_alarms(self) -> list[str]:
        """Return an ARN pattern for the alarms that target tracking creates."""
        return [self.of("cloudwatch", "alarm:TargetTracking-*")] if self.spec.scaling is not None else []

    def adopted_alarms(self) -> list[str]:
        """Return an ARN pattern for the alarms that target tracking creates for another owner's endpoint."""
        return [self.of("cloudwatch", f"alarm:TargetTracking-endpoint/{self.spec.endpoint_name}/*")]

    def scaling_role(self, service: str) -> list[str]:
        role = self.of("iam", f"role/aws-service-role/{service}/*", region="")
        return [role] if self.spec.scaling is not None else []

    def network(self) -> list[str]:
        return ["*"] if self.spec.network.subnets else []

    def shells(self) -> list[str]:
        """Return `*` if any variant allows access to instances through SSM. Its actions cannot be limited by ARN."""
        shadows = self.spec.sagemaker.endpoint_config.get("ShadowProductionVariants", ())
        return ["*"] if any(fields.get("EnableSSMAccess") for fields in (self.spec.sagemaker.variant, *shadows)) else []

    def repositories(self) -> list[str]:
        """Return the ARNs of the ECR repositories of the images, without duplicates. Other registries are omitted."""
        return _once(
            f"arn:{self._partition}:ecr:{match['region']}:{match['account']}:repository/{match['repository']}"
            for match in (ECR_URI.fullmatch(decided.image) for _, decided in self._served)
            if match is not None
        )

    def account_repositories(self) -> list[str]:
        return [arn for arn in self.repositories() if arn.split(":")[4] == self.account]

    def registry_logins(self) -> list[str]:
        """Return the ARN of the Lambda function that provides the credentials for a private registry."""
        config = self.spec.sagemaker.model.get("PrimaryContainer", {}).get("ImageConfig", {})
        return _once([config.get("RepositoryAuthConfig", {}).get("RepositoryCredentialsProviderArn")])

    def objects(self, uris: list[str]) -> list[str]:
        """Return an ARN for each S3 URI: the ARN of an archive, or else a pattern for all objects under the URI."""
        return [f"arn:{self._partition}:s3:::{_object_pattern(uri.removeprefix('s3://'))}" for uri in uris]

    def buckets(self, uris: list[str]) -> list[str]:
        return _once(f"arn:{self._partition}:s3:::{bucket_and_key(uri)[0]}" for uri in uris)

    def listed(self, uris: list[str]) -> list[Scope]:
        """Return a scope for each bucket in the URIs, with a condition that allows listing only the URIs' prefixes."""
        prefixes: dict[str, set[str]] = {}
        for uri in uris:
            (bucket,) = self.buckets([uri])
            prefixes.setdefault(bucket, set()).add(f"{bucket_and_key(uri)[1]}*")
        return [Scope([bucket], {"StringLike": {"s3:prefix": sorted(keys)}}) for bucket, keys in prefixes.items()]

    def secrets(self) -> list[str]:
        """Return the ARNs of the secrets that contain the models' tokens, without duplicates."""
        return _once(served.model.token_secret for served, _ in self._served)

    def keys(self) -> list[str]:
        """Return the ARNs of the account's KMS keys in the region, and of the volume key if it is not one of them."""
        if not (self.checked or self.spec.topics or self.secrets() or self.encryption.volume_key):
            return []
        keys_prefix = self.of("kms", "key/")
        volumes = [arn for scope in self.key(self.encryption.volume_key) for arn in scope.resources]
        return [f"{keys_prefix}*", *(arn for arn in volumes if not arn.startswith(keys_prefix))]

    def key(self, key: str | None, condition: Condition | None = None) -> list[Scope]:
        """Return the scopes of a KMS key. IAM supports an alias only as a condition, not as a resource."""
        if key is None:
            return []
        if key.startswith("arn:") and ":alias/" not in key:
            return [Scope([key], condition)]
        if "alias/" in key:
            alias = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": key[key.index("alias/") :]}}
            return [Scope([self.of("kms", "key/*")], {**alias, **(condition or {})})]
        return [Scope([self.of("kms", f"key/{key}")], condition)]

    def key_via(self, service: str, key: str | None) -> list[Scope]:
        """Return the scopes of a KMS key whose use is limited to `service` in this region, in any partition."""
        return self.key(key, {"StringLike": {"kms:ViaService": f"{service}.{self._region}.*"}})


def _versions(name: str) -> str:
    """Return a pattern that matches the names of all versions of a resource."""
    return f"{version_name(name, {})[: -len(digest({}))]}*"


def _object_pattern(path: str) -> str:
    """Return a pattern for an archive, or for all objects in a bucket or under a prefix."""
    if path.endswith(ARCHIVE):
        return path
    return f"{path}*" if "/" in path else f"{path}/*"


def _decided(spec: Spec, decision: Decision) -> list[tuple[Spec, Decision]]:
    """Return each server of the deployment, and the shadow, with what was decided for it."""
    decided = [(server, decision.of(server)) for server in servers(spec)]
    return decided if decision.shadow is None else [*decided, (shadow_of(spec), decision.shadow)]


def _once(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value is not None))
