"""InvokeEndpointAsync in the double of AWS: SageMaker takes the request, and does the rest in the name of the role.

Everything is done at once, by what the role's policies allow: reading the request, writing the answer, telling topics.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deploy.client.asynchronous import split_s3
from tests.deploy.doubles.authorization import Where, needs_of_action, needs_of_s3
from tests.deploy.doubles.identity_policy import Need
from tests.deploy.doubles.sagemaker_double import ACCOUNT, Invalid

if TYPE_CHECKING:
    from tests.deploy.doubles.aws import Cloud

_HEADER = "X-Amzn-SageMaker-"


def submit(cloud: Cloud, endpoint: str, region: str, body: bytes, location: str | None) -> tuple[dict[str, str], bytes]:
    """Answer a request; return headers and body of the acceptance.

    Args:
        location: the object that holds the request, in place of `body`.
    """
    found = cloud.sagemaker.get("endpoint", endpoint)
    if found.status != "InService":
        raise Invalid(f"Endpoint {endpoint} is not in service.")
    config = cloud.sagemaker.get("endpoint-config", found.request["EndpointConfigName"]).request
    role = cloud.sagemaker.get("model", config["ProductionVariants"][0]["ModelName"]).request["ExecutionRoleArn"]
    places = config["AsyncInferenceConfig"]["OutputConfig"]
    name = str(uuid.uuid4())
    output = f"{places['S3OutputPath'].rstrip('/')}/{name}.out"
    failure = f"{places.get('S3FailurePath', places['S3OutputPath']).rstrip('/')}/{name}-error.out"
    s3, where = cloud.client("s3", region), Where(region, ACCOUNT)
    headers = {f"{_HEADER}OutputLocation": output, f"{_HEADER}FailureLocation": failure}
    accepted = headers, json.dumps({"InferenceId": name}).encode()
    if not any(found.request.get("Counts", {"all": 1}).values()):
        cloud.scaling.wake(endpoint, region)
        if not any(found.request["Counts"].values()):
            return accepted  # and it waits
    missing = cloud.missing(role, [*_reading(cloud, location, where), *_writing(cloud, places, output, where)])
    if missing is None:
        if location is not None:
            bucket, key = split_s3(location)
            body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        _put(s3, output, json.dumps({"generated_text": json.loads(body)["inputs"]}).encode())
    elif cloud.missing(role, _writing(cloud, places, failure, where)) is None:
        _put(s3, failure, f"The role may not {missing}".encode())
    topic = places.get("NotificationConfig", {}).get("ErrorTopic" if missing else "SuccessTopic")
    if topic is not None and cloud.missing(role, _telling(cloud, topic, where)) is None:
        cloud.client("sns", region).publish(TopicArn=topic, Message="{}")
    return accepted


def _reading(cloud: Cloud, location: str | None, where: Where) -> Iterator[Need]:
    if location is not None:
        bucket, key = split_s3(location)
        yield from needs_of_s3("GET", bucket, key, {}, b"", where, cloud.keys.get(bucket))


def _writing(cloud: Cloud, places: dict[str, Any], uri: str, where: Where) -> Iterator[Need]:
    bucket, key = split_s3(uri)
    yield from needs_of_s3("PUT", bucket, key, {}, b"", where, places.get("KmsKeyId") or cloud.keys.get(bucket))


def _telling(cloud: Cloud, topic: str, where: Where) -> Iterator[Need]:
    yield from needs_of_action("sns:Publish", {"TopicArn": topic}, where)
    attributes = cloud.client("sns", where.region).get_topic_attributes(TopicArn=topic)["Attributes"]
    if key := attributes.get("KmsMasterKeyId"):
        via = {"kms:ViaService": f"sns.{where.region}.{where.suffix}"}
        for action in ("kms:GenerateDataKey", "kms:Decrypt"):
            yield from needs_of_action(action, {"KeyId": key}, where, **via)


def _put(s3: Any, uri: str, body: bytes) -> None:
    bucket, key = split_s3(uri)
    s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType="application/json")
