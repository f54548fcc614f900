"""Each operation of the rehearsal is held against botocore's description of it, as AWS does, and boto3 does not.

A sample request is made of the description; one member at a time then violates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore import xform_name
from botocore.model import OperationModel
from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.sagemaker.responses import SageMakerResponse

from deploy.emulator.cloud import OWN
from deploy.service_model import _compiled, service
from tests.deploy.doubles.aws import Cloud
from tests.servers import http

ARN = "arn:aws:iam::123456789012:role/service-role/a"
TEXTS = ("a", "1", "2026", ARN, "s3://bucket/key", "arn:aws:sagemaker:us-east-1:123456789012:model/a", "a" * 40)
"""Of which one fits most of the patterns."""

Change = Callable[[Any], Any]


def sample(shape: Any, depth: int = 0) -> Any:
    """A value that fits a shape, with all members: structures within themselves end."""
    least = max(1, shape.metadata.get("min", 1))
    if shape.type_name == "structure":
        members = shape.members if depth < 6 else {}
        return {name: sample(member, depth + 1) for name, member in members.items()}
    if shape.type_name == "list":
        return [sample(shape.member, depth + 1)] * least
    if shape.type_name == "map":
        return {sample(shape.key): sample(shape.value, depth + 1)}
    if shape.type_name == "string":
        pattern = shape.metadata.get("pattern")
        read = None if pattern is None else _compiled(pattern)
        fits = [text for text in TEXTS if read is None or read.fullmatch(text)]
        return shape.enum[0] if shape.enum else next(iter(fits), "a") * (least if not pattern else 1)
    return {"boolean": True, "timestamp": 1.0, "blob": "YQ=="}.get(shape.type_name, least)


def violations(shape: Any, value: Any, at: str, put: Change) -> Iterator[tuple[str, str, Any]]:
    """What is changed, the words of its refusal, and the request then: `put` puts a value in the member's place."""
    most, least = shape.metadata.get("max"), shape.metadata.get("min", 0)
    kind = shape.type_name
    if kind == "structure":
        for name, member in shape.members.items():
            if name in value:
                place = f"{at}.{name[0].lower()}{name[1:]}".lstrip(".")

                def inside(new: Any, name: str = name) -> Any:
                    return put({**value, name: new})

                if name in shape.required_members:
                    without = {other: value[other] for other in value if other != name}
                    yield f"no {place}", f"null at '{place}' failed", put(without)
                yield from violations(member, value[name], place, inside)
    elif kind == "list":
        yield f"text as {at}", f"at '{at}' can not be converted", put("a")
        if most is not None and most < 1000:
            yield f"long {at}", f"at '{at}' failed", put(value[:1] * (most + 1))
        yield from violations(shape.member, value[0], f"{at}.1.member", lambda new: put([new, *value[1:]]))
    elif kind == "map":
        yield f"list as {at}", f"at '{at}' can not be converted", put([])
    elif kind == "string":
        yield f"number as {at}", f"at '{at}' can not be converted", put(7)
        if most is not None and most < 10_000:
            yield f"long {at}", f"at '{at}' failed", put("a" * (most + 1))
        pattern = shape.metadata.get("pattern")
        read = None if pattern is None else _compiled(pattern)
        if shape.enum or (read is not None and not read.fullmatch("\n?!")):
            yield f"odd {at}", f"at '{at}' failed", put("\n?!")
    elif kind in ("integer", "long", "float", "double"):
        yield f"text as {at}", f"at '{at}' can not be converted", put("a")
        if most is not None:
            yield f"large {at}", f"at '{at}' failed", put(most + 1)
        if "min" in shape.metadata:
            yield f"small {at}", f"at '{at}' failed", put(least - 1)
    elif kind == "boolean":
        yield f"text as {at}", f"at '{at}' can not be converted", put("true")


def served(signed_for: str, responses: type) -> list[OperationModel]:
    """The operations that the rehearsal itself answers, not moto."""
    model = service(signed_for)
    own = [name for name in model.operation_names if xform_name(name) in vars(responses)]
    return [
        model.operation_model(name)
        for name in own
        if getattr(responses, xform_name(name)).__module__.startswith("deploy.")
    ]


def ask(cloud: Cloud, operation: OperationModel, request: Any) -> tuple[int, str, str]:
    """Status, code and message of an answer, to a client that checks nothing itself and is not botocore."""
    model = operation.service_model
    scope = f"{OWN}/20260101/us-east-1/{model.signing_name}/aws4_request"
    headers = {
        "x-amz-target": f"{model.metadata['targetPrefix']}.{operation.name}",
        "content-type": "application/x-amz-json-1.1",
        "authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0",
    }
    answer = http.post(cloud.url, json=request, headers=headers)
    assert answer.headers["x-amzn-requestid"]
    told = answer.json() if answer.content else {}
    return answer.status_code, told.get("__type", ""), told.get("message", told.get("Message", ""))


@pytest.mark.parametrize(
    ("signed_for", "responses"),
    [("sagemaker", SageMakerResponse), ("application-autoscaling", ApplicationAutoScalingResponse)],
)
def test_a_request_that_its_description_refuses_is_the_clients_error(
    cloud: Cloud, signed_for: str, responses: type
) -> None:
    operations = served(signed_for, responses)
    assert operations
    tried, found = 0, {}
    for operation in operations:
        shape = operation.input_shape
        for what, words, request in violations(shape, sample(shape), "", lambda new: new):
            tried += 1
            status, code, message = ask(cloud, operation, request)
            refused = (status, code) in ((400, "ValidationException"), (400, "SerializationException"))
            if not refused or words not in message:
                found[f"{operation.name}: {what}"] = (status, code, message)
    assert tried > 20 * len(operations) or signed_for != "sagemaker"
    assert found == {}


@pytest.mark.parametrize(
    ("service_name", "method", "path", "body", "headers", "status"),
    [
        ("sts", "POST", "/", b"Action=AssumeRole&Version=2011-06-15&RoleName[]=a", {}, 500),
        ("iam", "POST", "/", b"Action=CreateServiceLinkedRole&Version=2010-05-08&%%%", {}, 500),
        ("nobodys", "POST", "/", b"{}", {"X-Amz-Target": "A.B"}, 500),
        ("monitoring", "POST", "/service/A/operation/PutMetricAlarm", b"\xff", {}, 400),
        ("monitoring", "POST", "/service/A/operation/PutMetricAlarm", b"\x01", {}, 400),
    ],
)
def test_what_a_request_breaks_is_an_error_in_its_protocol(
    cloud: Cloud, service_name: str, method: str, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    signed = f"AWS4-HMAC-SHA256 Credential={OWN}/20260101/us-east-1/{service_name}/aws4_request"
    kind = "application/x-www-form-urlencoded"
    headers = {"Content-Type": kind, "Authorization": signed, **headers}
    answer = http.request(method, cloud.url + path, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert "x-amzn-requestid" in answer.headers
    assert "<!doctype html>" not in answer.text
    code = "InternalFailure" if status == 500 else "SerializationException"
    assert code in answer.text
