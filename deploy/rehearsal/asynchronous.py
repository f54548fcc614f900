"""InvokeEndpointAsync: SageMaker takes the request, and does the rest in the name of the role.

What the role's policies do not allow fails: reading the request, writing the answer, telling topics.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy.rehearsal.authorization import Where, needs_of_action, needs_of_s3
from deploy.rehearsal.identity_policy import Need
from deploy.rehearsal.sagemaker import ACCOUNT, Invalid, Thing
from deploy.s3.uri import bucket_and_key

if TYPE_CHECKING:
    from deploy.rehearsal.cloud import Cloud

_HEADER = "X-Amzn-SageMaker-"


@dataclass(frozen=True)
class Accepted:
    """A request that SageMaker has taken.

    Attributes:
        id: of the request (InferenceId).
        output, failure: where the answer or the reason comes to.
    """

    cloud: Cloud
    id: str
    body: bytes
    location: str | None
    role: str
    places: dict[str, Any]
    where: Where
    output: str
    failure: str
    waits: bool = False  # the endpoint has no instance, and nothing wakes it

    def answer(self, start_response: Any) -> list[bytes]:
        headers = {f"{_HEADER}OutputLocation": self.output, f"{_HEADER}FailureLocation": self.failure}
        start_response("202 Accepted", [("Content-Type", "application/json"), *headers.items()])
        return [json.dumps({"InferenceId": self.id}).encode()]

    def work(self, ask: Callable[[bytes], bytes]) -> None:
        """Do the rest.

        Args:
            ask: takes the request and returns the container's answer, or raises RuntimeError with its reason.
        """
        if self.waits:
            return
        why, data = self._asked(ask)
        if data is not None:
            self._put(self.output, data)
        elif self.cloud.missing(self.role, self._writing(self.failure)) is None:
            self._put(self.failure, why.encode())
        topic = self.places.get("NotificationConfig", {}).get("SuccessTopic" if data is not None else "ErrorTopic")
        if topic is not None and self.cloud.missing(self.role, self._telling(topic)) is None:
            self.cloud.client("sns", self.where.region).publish(TopicArn=topic, Message="{}")

    def _asked(self, ask: Callable[[bytes], bytes]) -> tuple[str, bytes | None]:
        """Return the container's answer, or why there is none."""
        missing = self.cloud.missing(self.role, [*self._reading(), *self._writing(self.output)])
        if missing is not None:
            return f"The role may not {missing}", None
        try:
            return "", ask(self._input())
        except RuntimeError as error:
            return str(error), None

    def _input(self) -> bytes:
        if self.location is None:
            return self.body
        bucket, key = bucket_and_key(self.location)
        return bytes(self.cloud.client("s3", self.where.region).get_object(Bucket=bucket, Key=key)["Body"].read())

    def _reading(self) -> Iterator[Need]:
        if self.location is not None:
            bucket, key = bucket_and_key(self.location)
            yield from needs_of_s3("GET", bucket, key, {}, b"", self.where, self.cloud.keys.get(bucket))

    def _writing(self, uri: str) -> Iterator[Need]:
        bucket, key = bucket_and_key(uri)
        encrypted = self.places.get("KmsKeyId") or self.cloud.keys.get(bucket)
        yield from needs_of_s3("PUT", bucket, key, {}, b"", self.where, encrypted)

    def _telling(self, topic: str) -> Iterator[Need]:
        yield from needs_of_action("sns:Publish", {"TopicArn": topic}, self.where)
        attributes = self.cloud.client("sns", self.where.region).get_topic_attributes(TopicArn=topic)["Attributes"]
        if key := attributes.get("KmsMasterKeyId"):
            via = {"kms:ViaService": f"sns.{self.where.region}.{self.where.suffix}"}
            for action in ("kms:GenerateDataKey", "kms:Decrypt"):
                yield from needs_of_action(action, {"KeyId": key}, self.where, **via)

    def _put(self, uri: str, body: bytes) -> None:
        bucket, key = bucket_and_key(uri)
        s3 = self.cloud.client("s3", self.where.region)
        s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType="application/json")


def accept(cloud: Cloud, endpoint: str, region: str, body: bytes, location: str | None) -> Accepted:
    """Take a request.

    Args:
        location: the object that holds the request, in place of `body`.

    Raises:
        Invalid: there is no such endpoint in service, or it is not asynchronous.
    """
    found = cloud.sagemaker.get("endpoint", endpoint)
    if found.status != "InService":
        raise Invalid(f"Endpoint {endpoint} is not in service.")
    config = cloud.sagemaker.get("endpoint-config", found.request["EndpointConfigName"]).request
    if "AsyncInferenceConfig" not in config:
        raise Invalid(f"Endpoint {endpoint} is not for asynchronous inference: it has no AsyncInferenceConfig.")
    role = cloud.sagemaker.get("model", config["ProductionVariants"][0]["ModelName"]).request["ExecutionRoleArn"]
    places = config["AsyncInferenceConfig"]["OutputConfig"]
    name = str(uuid.uuid4())
    output = f"{places['S3OutputPath'].rstrip('/')}/{name}.out"
    failure = f"{places.get('S3FailurePath', places['S3OutputPath']).rstrip('/')}/{name}-error.out"
    waits = not _has_instances(found)
    if waits:
        cloud.scaling.wake(endpoint, region)
        waits = not _has_instances(found)
    return Accepted(cloud, name, body, location, role, places, Where(region, ACCOUNT), output, failure, waits)


def _has_instances(endpoint: Thing) -> bool:
    return any(endpoint.request.get("Counts", {"all": 1}).values())
