"""The double of AWS does what the tests of `deploy` rely on, by the tests' own clients, who may do everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from botocore import xform_name
from botocore.exceptions import BotoCoreError, ClientError
from botocore.model import OperationModel
from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.sagemaker.responses import SageMakerResponse

from deploy.aws import Aws, as_deploy_error
from deploy.cli.main import main
from deploy.client import Patience, Predictor, RequestFailed
from deploy.emulator.account import Starts
from deploy.emulator.cloud import SERVER_KEY
from deploy.emulator.sagemaker import Fate
from deploy.service_model import compiled_pattern, service
from tests.deploy.doubles.archives import archive
from tests.deploy.doubles.aws import ACCOUNT, Cloud
from tests.doubles.downloads import serving
from tests.one_test import in_one_test
from tests.servers import http

# -- aws ---------------------------------------------------------------------------------------------------------------
# The double of AWS does what the tests of `deploy` rely on. By the tests' own clients, who may do everything.


ROLE = "arn:aws:iam::123456789012:role/r"


def made(cloud: Cloud, *, model: str | None = "m") -> Any:
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"})
    variant = {"VariantName": "v", "InitialInstanceCount": 1, "InstanceType": "ml.p5.48xlarge"}
    if model is not None:
        variant["ModelName"] = model
    for name in ("c1", "c2"):
        sagemaker.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant], ExecutionRoleArn=ROLE)
    sagemaker.create_endpoint(EndpointName="e", EndpointConfigName="c1")
    return sagemaker


def states(sagemaker: Any, looks: int) -> list[str]:
    return [sagemaker.describe_endpoint(EndpointName="e")["EndpointStatus"] for _ in range(looks)]


def refused(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as raised:
        call(**arguments)
    return f"{raised.value.response['Error']['Code']}: {raised.value.response['Error']['Message']}"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({}, "Exactly one of InstanceType and InstancePools"),
        (
            {"InstanceType": "ml.g5.xlarge", "InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": 1}]},
            "one of",
        ),
        (
            {"InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": n} for n in (1, 2)]},
            "different instance types",
        ),
        ({"InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": 6}]}, "value less than or equal to 5"),
        ({"InstancePools": [{"InstanceType": "ml.x5.xlarge", "Priority": 1}]}, "enum value set"),
        (
            {"InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": 1, "ModelNameOverride": "none"}]},
            "model/none",
        ),
    ],
)
def test_pools_are_as_botocores_model_has_them(cloud: Cloud, variant: dict[str, Any], message: str) -> None:
    sagemaker = made(cloud)
    variant = {"VariantName": "v", "ModelName": "m", "InitialInstanceCount": 1, **variant}
    assert message in refused(
        sagemaker.create_endpoint_config, EndpointConfigName="c3", ProductionVariants=[variant], ExecutionRoleArn=ROLE
    )


def test_instances_are_managed_for_components_only(cloud: Cloud) -> None:
    """As AWS's answer is quoted in terraform-provider-aws#45926."""
    sagemaker = made(cloud)
    managed = {"Status": "ENABLED", "MinInstanceCount": 1, "MaxInstanceCount": 2}
    variant = {"VariantName": "v", "InitialInstanceCount": 1, "InstanceType": "ml.g5.xlarge"}
    variant["ManagedInstanceScaling"] = managed
    call, given = sagemaker.create_endpoint_config, {"EndpointConfigName": "c3", "ExecutionRoleArn": ROLE}
    said = refused(call, **given, ProductionVariants=[{**variant, "ModelName": "m"}])
    assert said == "ValidationException: ManagedInstanceScaling is only supported for inference component endpoints."
    assert call(**given, ProductionVariants=[variant])["EndpointConfigArn"]


def test_a_component_begins_with_a_copy_and_may_lose_it(cloud: Cloud) -> None:
    """As AWS's answer is quoted in stdapi-ai/stdapi.ai#43."""
    sagemaker = made(cloud, model=None)
    states(sagemaker, 2)
    need = {"MinMemoryRequiredInMb": 1024}
    given: dict[str, Any] = {"InferenceComponentName": "i", "EndpointName": "e", "VariantName": "v"}
    given["Specification"] = {"ModelName": "m", "ComputeResourceRequirements": need}
    said = refused(sagemaker.create_inference_component, **given, RuntimeConfig={"CopyCount": 0})
    assert said == "ValidationException: Inference components copy count an integer larger than 0"
    sagemaker.create_inference_component(**given, RuntimeConfig={"CopyCount": 1})
    for _ in range(2):
        sagemaker.describe_inference_component(InferenceComponentName="i")
    none = {"CopyCount": 0}
    assert sagemaker.update_inference_component_runtime_config(InferenceComponentName="i", DesiredRuntimeConfig=none)


def test_an_endpoint_is_made_and_changed_by_and_by(cloud: Cloud) -> None:
    sagemaker = made(cloud)
    assert states(sagemaker, 3) == ["Creating", "InService", "InService"]
    sagemaker.update_endpoint(EndpointName="e", EndpointConfigName="c2")
    assert refused(sagemaker.update_endpoint, EndpointName="e", EndpointConfigName="c2").startswith(
        "ValidationException: Cannot update in-progress endpoint"
    )
    assert states(sagemaker, 1) == ["InService"]
    assert sagemaker.describe_endpoint(EndpointName="e")["EndpointConfigName"] == "c2"


def test_ends_can_be_chosen(cloud: Cloud) -> None:
    cloud.sagemaker.fate("e", "InService", polls=2)
    cloud.sagemaker.fate("e", "RolledBack", "an alarm went off")
    cloud.sagemaker.fate("e", "Failed", "no capacity")
    sagemaker = made(cloud)
    assert states(sagemaker, 3) == ["Creating", "Creating", "InService"]
    sagemaker.update_endpoint(EndpointName="e", EndpointConfigName="c2")
    assert states(sagemaker, 2) == ["Updating", "InService"]
    said = sagemaker.describe_endpoint(EndpointName="e")
    assert (said["EndpointConfigName"], said["FailureReason"]) == ("c1", "an alarm went off")
    sagemaker.update_endpoint(EndpointName="e", EndpointConfigName="c2")
    assert states(sagemaker, 2) == ["Updating", "Failed"]


def test_conflicts_are_said_as_aws_says_them(cloud: Cloud) -> None:
    sagemaker = made(cloud)
    assert refused(sagemaker.create_model, ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"}) == (
        'ValidationException: Cannot create already existing model "arn:aws:sagemaker:us-east-1:123456789012:model/m".'
    )
    assert refused(sagemaker.describe_endpoint, EndpointName="f") == (
        'ValidationException: Could not find endpoint "arn:aws:sagemaker:us-east-1:123456789012:endpoint/f".'
    )
    assert refused(sagemaker.delete_endpoint_config, EndpointConfigName="c3").startswith(
        "ValidationException: Could not find endpoint configuration"
    )


def test_an_endpoint_goes_by_and_by_and_its_scaling_with_it(cloud: Cloud) -> None:
    sagemaker = made(cloud)
    states(sagemaker, 2)
    scaling = cloud.client("application-autoscaling")
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/e/variant/v",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    scaling.register_scalable_target(**target, MinCapacity=1, MaxCapacity=2, Tags={"a": "b"})
    arn = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"][0]["ScalableTargetARN"]
    assert scaling.list_tags_for_resource(ResourceARN=arn)["Tags"] == {"a": "b"}
    sagemaker.delete_endpoint(EndpointName="e")
    assert states(sagemaker, 1) == ["Deleting"]
    refused(sagemaker.describe_endpoint, EndpointName="e")
    assert refused(scaling.deregister_scalable_target, **target).startswith("ObjectNotFoundException")


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({"InstanceType": "ml.g5.xlarge"}, True),
        ({"VariantName": "w"}, True),
        ({"InstanceType": None, "InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": 1}]}, True),
        ({"InitialInstanceCount": 2}, False),
    ],
    ids=["type", "name", "pools", "count"],
)
def test_a_registered_variant_keeps_its_name_and_type(
    cloud: Cloud, change: dict[str, Any], *, is_refused: bool
) -> None:
    sagemaker = made(cloud)
    states(sagemaker, 2)
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/e/variant/v",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    cloud.client("application-autoscaling").register_scalable_target(**target, MinCapacity=1, MaxCapacity=2)
    before = sagemaker.describe_endpoint_config(EndpointConfigName="c1")["ProductionVariants"][0]
    variant = {name: value for name, value in {**before, **change}.items() if value is not None}
    sagemaker.create_endpoint_config(EndpointConfigName="c3", ProductionVariants=[variant])
    update = {"EndpointName": "e", "EndpointConfigName": "c3"}
    if is_refused:
        assert "must be deregistered" in refused(sagemaker.update_endpoint, **update)
        cloud.client("application-autoscaling").deregister_scalable_target(**target)
    sagemaker.update_endpoint(**update)
    assert states(sagemaker, 2) == ["Updating", "InService"]


def test_components_live_on_an_endpoint_in_service(cloud: Cloud) -> None:
    sagemaker = made(cloud, model=None)
    component: dict[str, Any] = {
        "InferenceComponentName": "ic",
        "EndpointName": "e",
        "VariantName": "v",
        "Specification": {
            "ModelName": "m",
            "ComputeResourceRequirements": {"NumberOfAcceleratorDevicesRequired": 1, "MinMemoryRequiredInMb": 1024},
        },
        "RuntimeConfig": {"CopyCount": 2},
    }
    assert "not InService" in refused(sagemaker.create_inference_component, **component)
    states(sagemaker, 2)
    sagemaker.create_inference_component(**component)
    said = [sagemaker.describe_inference_component(InferenceComponentName="ic") for _ in range(2)]
    assert [one["InferenceComponentStatus"] for one in said] == ["Creating", "InService"]
    assert said[-1]["RuntimeConfig"]["DesiredCopyCount"] == 2
    adapter = {
        **component,
        "InferenceComponentName": "lora",
        "Specification": {"BaseInferenceComponentName": "ic", "Container": {"ArtifactUrl": "s3://b/a.tar.gz"}},
    }
    del adapter["RuntimeConfig"]
    sagemaker.create_inference_component(**adapter)
    assert "uses it" in refused(sagemaker.delete_inference_component, InferenceComponentName="ic")
    assert "with inference components" in refused(sagemaker.delete_endpoint, EndpointName="e")
    listed = sagemaker.list_inference_components(EndpointNameEquals="e")["InferenceComponents"]
    assert [one["InferenceComponentName"] for one in listed] == ["lora", "ic"]  # the newest first


def test_pages_have_ten_and_tags_are_kept(cloud: Cloud) -> None:
    sagemaker = cloud.client("sagemaker")
    for number in range(12):
        sagemaker.create_model(ModelName=f"m{number:02}", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"})
    assert len(sagemaker.list_models(NameContains="m")["Models"]) == 10
    pages = sagemaker.get_paginator("list_models").paginate(NameContains="m0")
    assert [len(page["Models"]) for page in pages] == [10]
    arn = sagemaker.describe_model(ModelName="m00")["ModelArn"]
    sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "b"}])
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "a", "Value": "b"}]


# -- requests ----------------------------------------------------------------------------------------------------------
# Each operation of the rehearsal is held against botocore's description of it, as AWS does, and boto3 does not.
#
# A sample request is made of the description; one member at a time then violates it.


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
        read = None if pattern is None else compiled_pattern(pattern)
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
        read = None if pattern is None else compiled_pattern(pattern)
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
    scope = f"{SERVER_KEY}/20260101/us-east-1/{model.signing_name}/aws4_request"
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
    signed = f"AWS4-HMAC-SHA256 Credential={SERVER_KEY}/20260101/us-east-1/{service_name}/aws4_request"
    kind = "application/x-www-form-urlencoded"
    headers = {"Content-Type": kind, "Authorization": signed, **headers}
    answer = http.request(method, cloud.url + path, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert "x-amzn-requestid" in answer.headers
    assert "<!doctype html>" not in answer.text
    code = "InternalFailure" if status == 500 else "SerializationException"
    assert code in answer.text


# -- a web page in the place of AWS's answer, in every protocol of AWS: one line with its status -----------------------


PAGE = "<!DOCTYPE html>\n<html><head><title>Login &amp;\n welcome</title></head>\n<body>" + "<p>row</p>\n" * 500
CALLS = {
    "sagemaker": "list_endpoints",  # JSON
    "sts": "get_caller_identity",  # query
    "cloudwatch": "describe_alarms",  # CBOR
    "s3": "list_buckets",  # XML
    "ec2": "describe_subnets",  # EC2's query
}


@contextmanager
def pages(status: int, kind: str = "text/html", body: str = PAGE) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@in_one_test(
    ("service", "status"), [(service, status) for service in CALLS for status in (200, 302, 403, 407, 502, 503)]
)
def test_every_protocol_tells_the_status_in_a_line(service: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(status) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises((BotoCoreError, ClientError)) as raised:
            getattr(Aws("us-east-1").client(service), CALLS[service])()
    assert isinstance(raised.value, BotoCoreError | ClientError)
    said = str(as_deploy_error(raised.value))
    if (service, status) == ("s3", 200):
        status = 500  # which botocore itself makes of it
    assert str(status) in said
    assert "\n" not in said
    assert len(said) < 200, said
    assert "<" not in said
    assert ("(Login & welcome)" in said) == (status < 500)


def test_a_command_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pages(403) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(["status", "chat"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "lmi deploy: DescribeEndpoint: HTTP 403: got a web page (Login & welcome) instead of AWS's response "
        "(from a proxy or a login page?)\n"
    )


def test_a_body_that_is_neither_page_nor_answer_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pages(200, "text/plain", "no XML\n" * 100) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(["doctor", "--name", "chat", "--role", "arn:aws:iam::123456789012:role/lmi", "--image",
                     "123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi:1", "--model", "s3://models/a/",
                     "--instance-type", "ml.g5.xlarge", "--set", "instance.unchecked=true"]) in (1, 2)  # fmt: skip
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert max(map(len, (said.out + said.err).splitlines())) < 300
    assert "cannot be parsed" in said.out + said.err


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_client_of_an_endpoint_is_told_too(status: int) -> None:
    session = boto3.session.Session("a", "b", region_name="us-east-1")
    with pages(status) as url:
        predictor = Predictor("chat", "us-east-1", endpoint_url=url, session=session, patience=Patience(busy=0, cold=0))
        with pytest.raises(RequestFailed) as raised:
            predictor.predict({"inputs": "a"})
    said = str(raised.value)
    assert str(status) in said
    assert len(said.splitlines()) == 1
    assert "<p>" not in said


# -- what a rehearsal starts: every model of an endpoint or a component must have its image ----------------------------


ABSENT = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/absent:1"
FROM_AWS = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.36.0-lmi22.0.0-cu129"
SERVING = {"VariantName": "AllTraffic", "InitialInstanceCount": 1}
ONE_TYPE = {**SERVING, "InstanceType": "ml.g5.xlarge"}
POOLS = [
    {"InstanceType": "ml.g5.xlarge", "Priority": 1},
    {"InstanceType": "ml.g6.xlarge", "Priority": 2, "ModelNameOverride": "absent"},
]


@pytest.mark.parametrize(
    "wanted",
    [
        {"Specification": {"ModelName": "absent"}},
        {
            "Specifications": [
                {"InstanceType": "ml.g5.xlarge", "ModelName": "there"},
                {"InstanceType": "ml.g6.xlarge", "ModelName": "absent"},
            ]
        },
        {"ProductionVariants": [{**ONE_TYPE, "ModelName": "absent"}]},
        {"ProductionVariants": [{**SERVING, "ModelName": "there", "InstancePools": POOLS}]},
    ],
)
def test_a_start_needs_the_image_of_each_model(cloud: Cloud, wanted: dict[str, Any]) -> None:
    sagemaker = cloud.client("sagemaker")
    for name, image in (("there", FROM_AWS), ("absent", ABSENT)):
        role = f"arn:aws:iam::{ACCOUNT}:role/model"
        sagemaker.create_model(ModelName=name, PrimaryContainer={"Image": image}, ExecutionRoleArn=role)
    things = cloud.sagemaker.things
    kind = "inference-component"
    if "ProductionVariants" in wanted:
        kind = "endpoint"
        sagemaker.create_endpoint_config(EndpointConfigName="first", **wanted)
        wanted = {"EndpointConfigName": "first"}
    thing = cloud.sagemaker.create(kind, "new", dict(wanted), "us-east-1")
    assert Starts(cloud, print)(thing, wanted) == Fate("Failed", f"The requested image '{ABSENT}' could not be found.")
    del things["model", "absent"]
    assert Starts(cloud, print)(thing, wanted) == Fate("InService")


def test_model_data_by_url_are_an_object(cloud: Cloud) -> None:
    s3, role = cloud.client("s3"), f"arn:aws:iam::{ACCOUNT}:role/model"
    s3.create_bucket(Bucket="models")
    s3.put_object(Bucket="models", Key="llama/model.tar.gz", Body=archive({"model.safetensors": b""}))
    s3.put_object(Bucket="models", Key="zip/model.tar.gz", Body=b"PK")
    s3.put_object(Bucket="models", Key="out/model.tar.gz", Body=archive({"../model.safetensors": b""}))
    cloud.policies[role] = [{"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}]
    gzip = {"S3Uri": "s3://models/out/model.tar.gz", "S3DataType": "S3Object", "CompressionType": "Gzip"}
    data: dict[str, dict[str, Any]] = {
        "object": {"ModelDataUrl": "s3://models/llama/model.tar.gz"},
        "prefix": {"ModelDataUrl": "s3://models/llama/"},
        "zip": {"ModelDataUrl": "s3://models/zip/model.tar.gz"},
        "outside": {"ModelDataSource": {"S3DataSource": gzip}},
        "as it is": {"ModelDataSource": {"S3DataSource": {**gzip, "CompressionType": "None"}}},
    }
    thing = cloud.sagemaker.create("inference-component", "new", {}, "us-east-1")
    fates = []
    for number, source in enumerate(data.values()):
        container, name = {"Image": FROM_AWS, **source}, f"model-{number}"
        cloud.client("sagemaker").create_model(ModelName=name, PrimaryContainer=container, ExecutionRoleArn=role)
        fates.append(Starts(cloud, print)(thing, {"Specification": {"ModelName": name}}))
    del cloud.policies[role]
    assert fates[:2] == [Fate("InService"), Fate("Failed", "Could not find model data at s3://models/llama/.")]
    assert [fate.status for fate in fates[2:]] == ["Failed", "Failed", "InService"]
    for fate, why in zip(fates[2:4], ("cannot be read as a tar.gz", "is outside"), strict=True):
        assert fate.reason is not None
        assert fate.reason.startswith("Failed to extract model data archive from URL")
        assert why in fate.reason


# -- who may call ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
    ],
)
def test_a_page_of_another_site_may_not_call(cloud: Cloud, headers: dict[str, str]) -> None:
    """Its signature would do: the rehearsal's access keys are public."""
    scope = f"Credential={SERVER_KEY}/20260101/us-east-1/s3/aws4_request"
    signed = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature={64 * '0'}"}
    assert put(cloud, "/mine", signed) == 200
    assert put(cloud, "/theirs", {**signed, **headers}) == 403
    names = [bucket["Name"] for bucket in cloud.client("s3").list_buckets()["Buckets"]]
    assert names == ["mine"]


@pytest.mark.parametrize("path", ["/moto-api/recorder/start-recording", "//moto-api/data.json", "/%6doto-api/"])
def test_moto_s_own_operations_are_refused(cloud: Cloud, path: str) -> None:
    assert put(cloud, path, {}) == 400


def put(cloud: Cloud, path: str, headers: dict[str, str]) -> int:
    """Return the answer's status."""
    with closing(HTTPConnection(cloud.url.removeprefix("http://"))) as connection:
        connection.request("PUT", path, headers=headers)
        return connection.getresponse().status


# -- moto, which the server changes only while it runs ----------------------------------------------------------------


def test_moto_is_restored_when_the_server_stops(cloud: Cloud) -> None:
    def attributes() -> list[Any]:
        return [getattr(owner, name, None) for owner, replaced in cloud.replacements() for name in replaced]

    before = attributes()
    other = Cloud()
    try:
        assert not any(new is old for new, old in zip(attributes(), before, strict=True))
    finally:
        other.stop()
    assert attributes() == before
