"""ARNs of the resources that a deployment creates and uses. Pure."""

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
    """Resources, and the condition under which they are allowed."""

    resources: list[str]
    condition: Condition | None = None


class Arns:
    """ARNs in one deployment's partition, region and account; empty for resources that the specification does not have.

    Attributes:
        data: S3 URIs of the models, each once.
        uploads: those that `up` uploads.
        places: S3 URIs of the models and their adapters.
        written, read: what SageMaker writes and reads besides.
        requests, answers: S3 URIs of asynchronous inference. Requests are stored beside the answers.
        checked: S3 URIs of whose buckets the key is looked up.
    """

    def __init__(self, spec: Spec, decision: Decision) -> None:
        _, self._partition, *_, account, _ = spec.role.split(":", 5)
        self.account: str = decision.account or account
        self._region = decision.region
        self.spec, self.encryption = spec, spec.encryption
        self._served = [(server, decision.of(server)) for server in servers(spec)]
        if decision.shadow is not None:
            self._served.append((shadow_of(spec), decision.shadow))
        self.data = _once(decided.model_data for _, decided in self._served)
        self.uploads = uploads(spec) if self.data else []
        self.places = self.data + [one.artifact for component in spec.components for one in component.adapters]
        self.written, self.read = written(spec), [*read(spec)]
        queue, batch = spec.asynchronous, spec.batch
        self.requests = [queue.output] if queue else []
        self.answers = _once([queue.output, queue.failures]) if queue else []
        self.batch_input, self.batch_output = ([batch.input], [batch.output]) if batch else ([], [])
        captured = [spec.capture.output] if spec.capture else []
        self.checked = [*self.places, *self.answers, *captured, *self.batch_input, *self.batch_output]

    def of(self, service: str, rest: str, *, region: str | None = None) -> str:
        where = self._region if region is None else region
        return f"arn:{self._partition}:{service}:{where}:{self.account}:{rest}"

    def principals(self, *kinds: str) -> list[str]:
        """Return ARN patterns that match all of the account's roles or users."""
        return [self.of("iam", f"{kind}/*", region="") for kind in kinds]

    def models(self) -> list[str]:
        return self._sagemaker("model", [_versions(self.spec.name)])

    def configs(self) -> list[str]:
        return self._sagemaker("endpoint-config", [_versions(self.spec.name)] if self.spec.endpoint is None else [])

    def endpoint(self) -> list[str]:
        """Return the endpoint: its own, or another deployment's."""
        return self._sagemaker("endpoint", [self.spec.endpoint_name])

    def own_endpoint(self) -> list[str]:
        return self.endpoint() if self.spec.endpoint is None else []

    def shared_endpoint(self) -> list[str]:
        """Return another deployment's endpoint, and its configuration, whose name is not known."""
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
        """Return the names of the components, each before its adapters."""
        return [name for item in self.spec.components for name in (item.name, *(child.name for child in item.adapters))]

    def _sagemaker(self, kind: str, names: list[str]) -> list[str]:
        """Return each name as written and in lower case: SageMaker lowers names in ARNs; policies heed case."""
        return [
            self.of("sagemaker", f"{kind}/{name}")
            for name in _once(spelling for name in names for spelling in (name, name.lower()))
        ]

    def batch_logs(self) -> list[str]:
        """Return the ARNs of the log group of all transform jobs, with and without streams, and of the
        deployment's streams in it.
        """
        group = self.of("logs", f"log-group:{TRANSFORM_LOGS}")
        streams = [group, f"{group}:log-stream:", f"{group}:log-stream:{job_prefix(self.spec.name)}*"]
        return streams if self.spec.batch else []

    def logs(self) -> list[str]:
        """Return the ARNs of the log groups, and of their streams."""
        groups = [f"/aws/sagemaker/Endpoints/{self.spec.name}"] if self.spec.endpoint is None else []
        groups += [f"/aws/sagemaker/InferenceComponents/{name}" for name in self._component_names()]
        return [self.of("logs", f"log-group:{group}{end}") for group in groups for end in ("", ":*")]

    def alarms(self) -> list[str]:
        return [self.of("cloudwatch", f"alarm:{self.spec.name}/*")]

    def tracking_alarms(self) -> list[str]:
        """Return the alarms that target tracking creates."""
        return [self.of("cloudwatch", "alarm:TargetTracking-*")] if self.spec.scaling is not None else []

    def scaling_role(self, service: str) -> list[str]:
        role = self.of("iam", f"role/aws-service-role/{service}/*", region="")
        return [role] if self.spec.scaling is not None else []

    def network(self) -> list[str]:
        return ["*"] if self.spec.network.subnets else []

    def shells(self) -> list[str]:
        """Instances that may be logged into, which take no resource."""
        shadows = self.spec.sagemaker.endpoint_config.get("ShadowProductionVariants", ())
        return ["*"] if any(one.get("EnableSSMAccess") for one in (self.spec.sagemaker.variant, *shadows)) else []

    def repositories(self) -> list[str]:
        """Return the images' ECR repositories, each once; images elsewhere have none."""
        return _once(
            f"arn:{self._partition}:ecr:{one['region']}:{one['account']}:repository/{one['repository']}"
            for one in (ECR_URI.fullmatch(decided.image) for _, decided in self._served)
            if one is not None
        )

    def own_repositories(self) -> list[str]:
        return [arn for arn in self.repositories() if arn.split(":")[4] == self.account]

    def registry_logins(self) -> list[str]:
        """Return the function that logs into a registry which is not ECR."""
        config = self.spec.sagemaker.model.get("PrimaryContainer", {}).get("ImageConfig", {})
        return _once([config.get("RepositoryAuthConfig", {}).get("RepositoryCredentialsProviderArn")])

    def objects(self, uris: list[str]) -> list[str]:
        """Return the ARN of an archive, or of everything below another S3 URI."""
        places = [uri.removeprefix("s3://") for uri in uris]
        ends = ["" if place.endswith(ARCHIVE) else "*" if "/" in place else "/*" for place in places]
        return [f"arn:{self._partition}:s3:::{place}{end}" for place, end in zip(places, ends, strict=True)]

    def buckets(self, uris: list[str]) -> list[str]:
        return _once(f"arn:{self._partition}:s3:::{bucket_and_key(uri)[0]}" for uri in uris)

    def listed(self, uris: list[str]) -> list[Scope]:
        """Return the buckets, each with its prefixes as a condition."""
        prefixes: dict[str, set[str]] = {}
        for uri in uris:
            (bucket,) = self.buckets([uri])
            prefixes.setdefault(bucket, set()).add(f"{bucket_and_key(uri)[1]}*")
        return [Scope([bucket], {"StringLike": {"s3:prefix": sorted(keys)}}) for bucket, keys in prefixes.items()]

    def secrets(self) -> list[str]:
        """Return the secrets of the models' tokens, each once."""
        return _once(served.model.token_secret for served, _ in self._served)

    def keys(self) -> list[str]:
        """Return all keys of the account in the region, and the volumes', which may be another's."""
        if not (self.checked or self.spec.topics or self.secrets() or self.encryption.volume_key):
            return []
        own = self.of("kms", "key/")
        volumes = [arn for scope in self.key(self.encryption.volume_key) for arn in scope.resources]
        return [f"{own}*", *(arn for arn in volumes if not arn.startswith(own))]

    def key(self, key: str | None, condition: Condition | None = None) -> list[Scope]:
        """Return the scopes of a KMS key: IAM takes an alias as a condition, not as a resource."""
        if key is None:
            return []
        if key.startswith("arn:") and ":alias/" not in key:
            return [Scope([key], condition)]
        if "alias/" in key:
            alias = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": key[key.index("alias/") :]}}
            return [Scope([self.of("kms", "key/*")], {**alias, **(condition or {})})]
        return [Scope([self.of("kms", f"key/{key}")], condition)]

    def key_via(self, service: str, key: str | None) -> list[Scope]:
        """Return a key that a service of this region uses in its caller's name. Its host differs between partitions."""
        return self.key(key, {"StringLike": {"kms:ViaService": f"{service}.{self._region}.*"}})


def _versions(name: str) -> str:
    """Return the pattern of the names of a thing's versions."""
    return f"{version_name(name, {})[: -len(digest({}))]}*"


def _once(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value is not None))
