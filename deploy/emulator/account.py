"""The emulated AWS account. Initially, it contains only quotas, and the images that a user would have pushed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import re
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import moto.iam.models
import moto.secretsmanager.utils
from botocore.exceptions import ClientError
from moto.core.exceptions import ServiceException
from moto.servicequotas.responses import ServiceQuotasResponse

from deploy.emulator import authorization
from deploy.emulator.authorization import Permission, RoleStore, Where, needs_of_action
from deploy.emulator.cloud import SERVER_KEY, Call, Cloud
from deploy.emulator.patch import Replacements, json_result, methods
from deploy.emulator.runtimes import Runtimes
from deploy.emulator.sagemaker import ACCOUNT, Fate, Thing
from deploy.emulator.serving import Front, LocalPlan, Log, cannot_listen
from deploy.operations.logs import component_group, endpoint_group
from deploy.s3.archive import read_archive
from deploy.s3.prefix import bucket_and_key
from deploy.service_model import instance_types
from deploy.spec.options import Setting, wrong_options

_LINES = 10_000  # number of log lines to keep for endpoints that are created later
_READS = ("FilterLogEvents", "GetLogEvents", "DescribeLogStreams", "DescribeLogGroups", "StartQuery")
_AT_A_TIME = 500  # maximum number of log lines to send in one call


class ContainerLog:
    """The log of the container behind all endpoints, copied to CloudWatch Logs whenever a client reads logs.

    The log lines of instances that fail to start are stored separately.
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_LINES)
        self._count = 0
        self._written: dict[str, int] = {}  # number of copied lines, by the resource's ARN and creation time
        self._failed: dict[str, list[dict[str, Any]]] = {}  # log events of failed starts, by the resource's ARN

    def add(self, line: str) -> None:
        self._lines.append((self._count, _event(line)))
        self._count += 1

    def add_failed(self, thing: Thing, line: str) -> None:
        """Add a log line of an instance that fails to start."""
        self._failed.setdefault(thing.arn, []).append(_event(line))

    def on_call(self, cloud: Cloud, call: Call) -> None:
        """Update the log groups of the call's region if the call reads logs."""
        if call.operation in _READS and call.service == "logs":
            for (kind, _), thing in list(cloud.sagemaker.things.items()):
                if kind in ("endpoint", "inference-component") and call.region == thing.arn.split(":")[3]:
                    self._copy(cloud, thing)

    def _copy(self, cloud: Cloud, thing: Thing) -> None:
        if failed := self._failed.pop(thing.arn, None):
            _write(cloud, thing, str(uuid.uuid4()), failed)
        if thing.status != "Failed":
            key = f"{thing.arn} {thing.created}"
            _write(cloud, thing, key, [event for number, event in self._lines if number >= self._written.get(key, 0)])
            self._written[key] = self._count


def _event(line: str) -> dict[str, Any]:
    return {"timestamp": int(time.time() * 1000), "message": line}


def _write(cloud: Cloud, thing: Thing, instance: str, events: list[dict[str, Any]]) -> None:
    """Write log events to an instance's log stream, with timestamps that are not older than the resource."""
    created = math.ceil(thing.created.timestamp() * 1000)
    events = [{**event, "timestamp": max(event["timestamp"], created)} for event in events]
    group = endpoint_group(thing.name) if thing.kind == "endpoint" else component_group(thing.name)
    stream = f"AllTraffic/i-{hashlib.sha256(instance.encode()).hexdigest()[:17]}"
    logs = cloud.client("logs", thing.arn.split(":")[3])
    with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
        logs.create_log_group(logGroupName=group)
    with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
    for first in range(0, len(events), _AT_A_TIME):
        part = events[first : first + _AT_A_TIME]
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=part)


# -- SageMaker's Service Quotas, which moto does not support: 2 instances of each type, or the requested number --------


_AT_FIRST = 2.0


class Quotas:
    """SageMaker's quotas for all instance types, and the Service Quotas operations on them."""

    def __init__(self) -> None:
        shapes = {"endpoint": "ProductionVariantInstanceType", "transform job": "TransformInstanceType"}
        names = [f"{type} for {use} usage" for use, shape in shapes.items() for type in instance_types(shape)]
        self._quotas = {_code(name): _quota(name) for name in names}

    def list_service_quotas(self, p: Mapping[str, Any], region: str) -> dict[str, Any]:
        return {"Quotas": list(self._quotas.values()) if p["ServiceCode"] == "sagemaker" else []}

    def get_service_quota(self, p: Mapping[str, Any], region: str) -> dict[str, Any]:
        return {"Quota": self._find_quota(p)}

    def request_service_quota_increase(self, p: Mapping[str, Any], region: str) -> dict[str, Any]:
        """Grant the requested quota immediately."""
        quota = self._find_quota(p)
        quota["Value"] = float(p["DesiredValue"])
        names = ("ServiceCode", "QuotaCode", "QuotaName")
        change = {"DesiredValue": quota["Value"], "Status": "APPROVED", **{name: quota[name] for name in names}}
        return {"RequestedQuota": change}

    def of(self, instance_type: str) -> float:
        """Return the number of instances of a type that the account's endpoints may use."""
        return float(self._quotas[_code(f"{instance_type} for endpoint usage")]["Value"])

    def _find_quota(self, p: Mapping[str, Any]) -> dict[str, Any]:
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
    """Return a made-up quota code in AWS's format."""
    return f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}"


# -- starts of endpoints and components, which need an image, model data, and a role that may read both ----------------


REHEARSAL = "LMI_REHEARSAL"
"""Environment variable of a model that makes its endpoint or component fail to start."""
_ENDS = {
    "exit": "the container exits with status 1",
    "no-ping": "the container never responds to /ping",
    "ping-500": "the container responds to /ping with status 500",
}
"""Startup failures of a container, each with its log line. SageMaker reports the same FailureReason for all of them."""
_NO_CAPACITY, _NO_QUOTA = "no-capacity", "no-quota"
FAILURES = (*_ENDS, _NO_CAPACITY, _NO_QUOTA)
_ACCOUNT_IMAGE = re.compile(
    rf"{ACCOUNT}\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.[a-z.]+/"
    r"(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>.+))?"
)
_PULLS = ("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability")


class Starts:
    """A callable for `SageMaker.fate_of` that decides the outcome of creations and updates, with AWS's failure reasons.

    Args:
        log: callback for each log line of a container that does not become ready.
    """

    def __init__(self, cloud: Cloud, log: Callable[[Thing, str], None]) -> None:
        self._cloud, self._log = cloud, log

    def __call__(self, thing: Thing, request: Mapping[str, Any]) -> Fate:
        where = Where(thing.arn.split(":")[3], ACCOUNT)
        faults = (self._fault(thing, model, variant, where) for variant, model in self._models(thing, request))
        reason = next(filter(None, faults), None)
        if reason is None:
            return Fate("InService")
        return Fate("RolledBack" if thing.before is not None else "Failed", reason)

    def _models(self, thing: Thing, parameters: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the name of the variant and the CreateModel request of each model to serve."""
        things = self._cloud.sagemaker.things
        for part in self._parts(thing, parameters):
            variant = part.get("VariantName") or thing.request.get("VariantName", "")
            names = [part.get("ModelName"), *(pool.get("ModelNameOverride") for pool in part.get("InstancePools", ()))]
            yield from ((variant, things["model", name].request) for name in names if ("model", name) in things)

    def _parts(self, thing: Thing, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the component's specifications or the endpoint's variants, each of which may name a model."""
        if thing.kind == "inference-component":
            return [parameters.get("Specification", {}), *parameters.get("Specifications", ())]
        config = self._cloud.sagemaker.things.get(("endpoint-config", parameters.get("EndpointConfigName", "")))
        fields = ("ProductionVariants", "ShadowProductionVariants")
        return [variant for field in fields for variant in config.request.get(field, ())] if config else []

    def _fault(self, thing: Thing, model: Mapping[str, Any], variant: str, where: Where) -> str | None:
        container, role = model.get("PrimaryContainer", {}), model["ExecutionRoleArn"]
        environment = container.get("Environment", {})
        if _failure_of(model) == _NO_CAPACITY:
            return (
                "Unable to provision requested ML compute capacity due to InsufficientInstanceCapacity error. "
                "Please retry using a different ML instance type."
            )
        if _failure_of(model) == _NO_QUOTA and thing.kind == "inference-component":
            return f"{REHEARSAL}={_NO_QUOTA}: quotas limit the instances of endpoints, not inference components."
        image = container.get("Image", "")
        return (
            self._image(image, role, where)
            or self._data(container, role, where)
            or (
                f"The primary container for production variant {variant} did not pass the ping health check."
                if self._ends(thing, environment, in_account=_ACCOUNT_IMAGE.fullmatch(image) is not None)
                else None
            )
        )

    def _ends(self, thing: Thing, environment: Mapping[str, str], *, in_account: bool) -> bool:
        """Return whether the container fails to become ready. If so, log the reasons as the container would.

        Args:
            in_account: whether the image is in this account, and therefore contains this package's server.
        """
        settings = [Setting(name, value, f"environment variable {name}") for name, value in environment.items()]
        lines = [f"cannot start: {problem}" for problem in wrong_options(settings, None)] if in_account else []
        if end := _ENDS.get(environment.get(REHEARSAL, "")):
            lines.append(f"{REHEARSAL}={environment[REHEARSAL]}: {end}")
        for line in lines:
            self._log(thing, line)
        return bool(lines)

    def _image(self, image: str, role: str, where: Where) -> str | None:
        match = _ACCOUNT_IMAGE.fullmatch(image)
        if match is None:  # an image of another account, for example AWS's
            return None
        image_id = {"imageDigest": match["digest"]} if match["digest"] else {"imageTag": match["tag"] or "latest"}
        repository = {"repositoryName": match["repository"]}
        try:
            self._cloud.client("ecr", match["region"]).describe_images(**repository, imageIds=[image_id])
        except ClientError:
            return f"The requested image '{image}' could not be found."
        pulls = (need for action in _PULLS for need in needs_of_action(action, repository, where))
        if self._cloud.missing(role, [Permission("ecr:GetAuthorizationToken", "*"), *pulls]) is not None:
            return f"The role '{role}' does not have BatchGetImage permission for the image: '{image}'."
        return None

    def _data(self, container: Mapping[str, Any], role: str, where: Where) -> str | None:
        source = container.get("ModelDataSource", {}).get("S3DataSource", {})
        if archive := container.get("ModelDataUrl"):
            source = {"S3Uri": archive, "S3DataType": "S3Object", "CompressionType": "Gzip"}
        if (uri := source.get("S3Uri")) is None:
            return None
        first = self._first_object(uri, where)
        if first is None or (source["S3DataType"] == "S3Object" and first != uri):
            return f"Could not find model data at {uri}."
        store = RoleStore(self._cloud, role, where)
        if (missing := self._cloud.missing(role, [store.listing(uri), *store.reading(first)])) is not None:
            return f"Could not access model data at {uri}: the role {role} is not authorized to perform: {missing}."
        if source["CompressionType"] == "Gzip" and (fault := self._fault_of_archive(uri, where)):
            return (
                f'Failed to extract model data archive from URL "{uri}". Please ensure that the object located at the '
                f"URL is a valid tar.gz archive. (The emulator: {fault}.)"
            )
        return None

    def _first_object(self, uri: str, where: Where) -> str | None:
        """Return the URI of the first object with the prefix `uri`, or None if there is no such object or bucket."""
        bucket, prefix = bucket_and_key(uri)
        try:
            listing = self._cloud.client("s3", where.region).list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        except ClientError:
            return None
        return next((f"s3://{bucket}/{item['Key']}" for item in listing.get("Contents", ())), None)

    def _fault_of_archive(self, uri: str, where: Where) -> str:
        bucket, key = bucket_and_key(uri)
        with self._cloud.client("s3", where.region).get_object(Bucket=bucket, Key=key)["Body"] as body:
            return read_archive(body).fault


def _failure_of(model: Mapping[str, Any]) -> str | None:
    """Return the failure that a model's environment variable LMI_REHEARSAL requests, or None."""
    value: str | None = model.get("PrimaryContainer", {}).get("Environment", {}).get(REHEARSAL)
    return value


OWNER = "owner"
"""The access key of the account owner, who has all permissions."""
_OWNER_ARN = f"arn:aws:sts::{ACCOUNT}:user/moto"  # the ARN that moto's STS returns for unknown access keys
_NOT_EMULATED = {
    "CreateTrainingJob": "training jobs do not run here",
    "CreateProcessingJob": "processing jobs do not run here",
    "CreateInferenceRecommendationsJob": "inference recommendations are not available here",
    "Search": "use the List operations instead",
}
"""Operations that moto would accept without any effect, or run on its own state rather than the emulator's."""
_DOCKER = "application/vnd.docker"
_MANIFEST = {
    "schemaVersion": 2,
    "mediaType": f"{_DOCKER}.distribution.manifest.v2+json",
    # There is no digest of a configuration: moto does not serve layers, so clients could not read it.
    "config": {"size": 1},
    "layers": [{"mediaType": f"{_DOCKER}.image.rootfs.diff.tar.gzip", "size": 1, "digest": f"sha256:{'1' * 64}"}],
}


class Account(Cloud):
    """An emulated AWS in which IAM policies are enforced and one container serves all endpoints.

    Args:
        port: port on loopback, or 0 for any free port.
        runtimes: the emulators of SageMaker Runtime, by endpoint.
        log: the container log.
        report: callback for a line of text about each denied permission.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int, runtimes: Runtimes, log: ContainerLog, report: Callable[[str], None]) -> None:
        self._runtimes, self._log, self._report, self._quotas = runtimes, log, report, Quotas()
        super().__init__(port)
        self.trusted.add(OWNER)
        self.sagemaker.polls = 0  # no delays, because `lmi deploy up` polls only every 15 s
        self.sagemaker.may_take = authorization.trusts_sagemaker
        self.sagemaker.fate_of = Starts(self, log.add_failed)
        self.sagemaker.quota_of = lambda type, model: 0 if _failure_of(model) == _NO_QUOTA else self._quotas.of(type)

    def replacements(self) -> Replacements:
        return [
            *super().replacements(),
            *authorization.replacements(_OWNER_ARN),
            (ServiceQuotasResponse, methods(self._quotas, json_result, "of")),
            # Secrets' ARNs end in the suffix that the documents show, instead of a random one.
            (moto.secretsmanager.utils, {"generate_str_id": lambda *args, **more: "AbCdEf"}),
            (moto.iam.models, {"load_iam_aws_managed_policies": lambda: True}),
        ]

    def push(self, image: str, region: str) -> None:
        """Register an image in ECR, as `docker push` would."""
        repository, _, tag = image.rpartition(":")
        ecr = self.client("ecr", region)
        with contextlib.suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        ecr.put_image(repositoryName=repository, imageTag=tag, imageManifest=json.dumps(_MANIFEST))

    def policies_of(self, caller: str) -> Iterable[Mapping[str, Any]]:
        return authorization.policies_of(caller)

    def arn_of(self, caller: str) -> str | None:
        return authorization.arn_of(caller)

    def on_denial(self, need: Permission) -> None:
        self._report(f"aws       | denied: {need}")

    def on_call(self, call: Call) -> None:
        if call.caller != SERVER_KEY:
            self._log.on_call(self, call)

    def refusal(self, call: Call) -> tuple[str, str] | None:
        if call.service == "sagemaker" and (reason := _NOT_EMULATED.get(call.operation)):
            return "ValidationException", f"{call.operation} is not emulated: {reason}."
        if call.operation == "CreateModel" and (failure := _failure_of(call.parameters)) and failure not in FAILURES:
            return "ValidationException", f"{REHEARSAL}={failure}: must be one of {', '.join(FAILURES)}."
        return None

    def invoked(self, call: Call, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return self._runtimes.invoked(self, call, environ, start_response)

    def transform(self, payload: bytes, content_type: str) -> bytes:
        return self._runtimes.transform(payload, content_type)


def account(log: ContainerLog, images: Sequence[str], region: str) -> Front:
    """Return a front end that serves an emulated AWS account in front of the container.

    Args:
        log: the container log.
        images: images to register in ECR, as REPOSITORY:TAG.
        region: region of the images.
    """

    @contextlib.asynccontextmanager
    async def front(plan: LocalPlan, report: Callable[[str], None], say: Log) -> AsyncIterator[str]:
        runtimes = Runtimes(plan.endpoint, asyncio.get_running_loop())
        try:
            cloud = Account(plan.port, runtimes, log, report)
        except OSError as error:
            raise cannot_listen("127.0.0.1", plan.port, error) from None
        try:
            for image in images:
                await asyncio.to_thread(cloud.push, image, region)
            yield cloud.url
        finally:
            await runtimes.close()
            await asyncio.to_thread(cloud.stop)

    return front


def variables(url: str, region: str) -> dict[str, str]:
    """Return the environment variables that make AWS clients use the emulator at `url`."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": OWNER,
        "AWS_SECRET_ACCESS_KEY": OWNER,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
    }
