"""SageMaker's SDKs against `lmi deploy local --aws`, and what docs/client.md says about them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.exceptions import ClientError

from deploy.deployer.calls import CALLS
from deploy.export.sdk import sdk_program
from deploy.resources.build import resources
from deploy.resources.resource import resolved
from handler import __version__
from handler.config.loader import read_config
from tests.clients import toolchains
from tests.clients.driver import Driver, Outcome, Script
from tests.deploy.cases import CASES, decision, spec
from tests.deploy.doubles.archives import archive
from tests.deploy.local.servers import rehearsal
from tests.examples.programs import EXAMPLES

pytestmark = pytest.mark.clients

_TESTS = Path(__file__).parent
PAGE = (_TESTS.parents[1] / "docs" / "client.md").read_text()
SAYS = " one two three"
_NOWHERE = "http://127.0.0.1:9"
IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi-handler:{__version__}"
OBJECTS = [
    ("my-bucket", "model.tar.gz", "model/config.json"),
    ("models", "llama-3-8b/config.json", "adapters/french.tar.gz", "adapters/legal.tar.gz"),
]
"""Of the programs, and of the deployment that is exported: buckets with their objects."""
STEPS = ("create", "wait", "invoke", "stream", "delete")


class Sdk(NamedTuple):
    """One of them.

    Attributes:
        name: of its program in scripts/sagemaker/programs.
    """

    name: str
    environment: str
    package: str


SDKS = (
    Sdk("v2", "sagemaker", "sagemaker"),
    Sdk("core", "sagemaker-3", "sagemaker-core"),
    Sdk("serve", "sagemaker-3", "sagemaker-serve"),
)


def version(package: str) -> str:
    """The tested one. sagemaker-core 1 comes with version 2."""
    name = "sagemaker" if package == "sagemaker" else "sagemaker-3"
    found = re.search(rf"^{package}==(.*)$", (_TESTS / f"requirements-{name}.txt").read_text(), re.M)
    assert found is not None
    return found[1]


class Program:
    """A program, run step by step in the environment of its SDK."""

    def __init__(self, sdk: Sdk, variables: dict[str, str]) -> None:
        python = str(toolchains.python(sdk.environment))
        scripts = _TESTS / "scripts"
        search = {"PYTHONPATH": str(scripts), "PYTHONUTF8": "1", "HTTPS_PROXY": _NOWHERE}
        self._script = Script([python, str(scripts / "sagemaker" / "drive_page.py")], {**variables, **search})
        self._driver = Driver(self._script)
        text = (scripts / "sagemaker" / "programs" / f"{sdk.name}.py").read_text()
        head, *steps = re.split(r"^# (?=[A-Z][a-z]+$)", text, flags=re.M)
        self._steps = {name.lower(): code for name, _, code in (step.partition("\n") for step in steps)}
        assert tuple(self._steps)[: len(STEPS)] == STEPS
        self._printed = {"": self.run(head)}

    def alone(self, step: str) -> str:
        """Run a step after the last, which needs only the first; return what it prints."""
        return self.run(self._steps[step])

    def run(self, code: str) -> str:
        return str(self._driver.generate("", code))

    def call(self, code: str) -> Outcome:
        return self._driver.call("generate", "", code)

    def upto(self, step: str) -> str:
        """Run what has not been run before a step, and it; return what it prints."""
        for name in STEPS[: STEPS.index(step) + 1]:
            if name not in self._printed:
                self._printed[name] = self.run(self._steps[name])
        return self._printed[step]

    def close(self) -> None:
        self._script.close()


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """AWS, with the bucket, the model and the role that the programs name."""
    with rehearsal(
        tmp_path_factory.mktemp("rehearsal"), "--engine", "echo", "--image", f"lmi-handler:{__version__}"
    ) as (
        _,
        own,
    ):
        s3, iam = client("s3", own), client("iam", own)
        for bucket, *keys in OBJECTS:
            s3.create_bucket(Bucket=bucket)
            for key in keys:
                files = archive({"config.json": b"{}"}) if key.endswith(".tar.gz") else b"{}"
                s3.put_object(Bucket=bucket, Key=key, Body=files)
        principal = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
        iam.create_role(RoleName="lmi", AssumeRolePolicyDocument=policy(principal))
        may = policy({"Effect": "Allow", "Action": "*", "Resource": "*"})
        iam.put_role_policy(RoleName="lmi", PolicyName="lmi", PolicyDocument=may)
        yield own


def policy(statement: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def client(service: str, variables: dict[str, str]) -> Any:
    session = boto3.Session(variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"])
    return session.client(service, variables["AWS_REGION"], endpoint_url=variables["AWS_ENDPOINT_URL"])


@pytest.fixture(
    scope="module", params=[pytest.param(SDKS[0], marks=pytest.mark.nightly), *SDKS[1:]], ids=lambda sdk: sdk.name
)
def sdk(request: pytest.FixtureRequest) -> Sdk:
    found: Sdk = request.param
    return found


@pytest.fixture(scope="module")
def program(sdk: Sdk, variables: dict[str, str]) -> Iterator[Program]:
    with contextlib.closing(Program(sdk, variables)) as running:
        yield running


@pytest.fixture(scope="module")
def control(variables: dict[str, str]) -> Any:
    return client("sagemaker", variables)


def test_create(sdk: Sdk, program: Program, control: Any) -> None:
    program.upto("create")
    config = control.describe_endpoint_config(EndpointConfigName=f"chat-{sdk.name}")
    (variant,) = config["ProductionVariants"]
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 1200
    container = control.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
    assert container["Image"] == IMAGE
    assert container["Environment"] == {"OPTION_MAX_MODEL_LEN": "8192"}
    if sdk.name == "serve":
        assert container["ModelDataUrl"] == "s3://my-bucket/model.tar.gz"
    else:
        assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://my-bucket/model/"


def test_wait(sdk: Sdk, program: Program, control: Any) -> None:
    program.upto("wait")
    (found,) = control.list_endpoints(NameContains=f"chat-{sdk.name}")["Endpoints"]
    assert found["EndpointStatus"] == "InService"


def test_invoke_for_sagemaker_sdk(program: Program) -> None:
    assert program.upto("invoke") == f"{SAYS}\n"


def test_stream(sdk: Sdk, program: Program) -> None:
    """Version 3's own fails. Where it no longer does, it is mended, and the page's sentence goes."""
    printed = program.upto("stream")
    if sdk.name == "v2":
        *_, last = map(json.loads, printed.splitlines())
        assert last["generated_text"] == SAYS
        return
    assert printed == SAYS
    own = program.call('endpoint.invoke_with_response_stream(body=json.dumps(body), content_type="application/json")')
    assert own.error == "builtins.AttributeError"
    assert f"`Endpoint.invoke_with_response_stream` of sagemaker-core {version('sagemaker-core')} fails" in PAGE
    assert f"`{own.message}`" in PAGE


def test_component(sdk: Sdk, program: Program, control: Any) -> None:
    """It takes the model, or what made it, from the first step."""
    program.upto("create")
    assert program.alone("component").endswith(f"{SAYS}\n")
    found = control.describe_inference_component(InferenceComponentName=f"a-{sdk.name}")
    assert found["InferenceComponentStatus"] == "InService"
    assert found["EndpointName"] == f"shared-{sdk.name}"


def djl_model(program: Program) -> None:
    """The page has each of the variables, and this server reads all of them."""
    code = """
import json
from sagemaker.djl_inference import DJLModel
print(json.dumps(DJLModel(
    model_id="org/name", image_uri=model.image_uri, role=model.role, sagemaker_session=session, engine="Python",
    dtype="bf16", task="text-generation", tensor_parallel_degree=2, job_queue_size=100, model_loading_timeout=600,
    prediction_timeout=60, huggingface_hub_token="hf_token", min_workers=1, max_workers=1, parallel_loading=False,
).env))
"""
    environ = json.loads(program.run(code).splitlines()[-1])
    found = read_config(environ=environ)
    assert not found.problems
    without_effect = {name for name in environ if any(name in warning for warning in found.config.warnings)}
    listed = PAGE.partition("**`DJLModel`**")[2].partition("\n")[0]
    assert set(re.findall("`([A-Z_]+)`", listed)) == environ.keys() - without_effect


def serializers(program: Program) -> None:
    assert program.alone("serializers") == f"{SAYS}\n"


def zeros(program: Program) -> None:
    """Where this fails, the SDK is mended: the page's sentence goes, and what the export does about it."""
    code = "from sagemaker.core.utils.utils import serialize\n"
    code += 'print(serialize(ProductionVariant(variant_name="a", initial_instance_count=0)))'
    assert program.run(code) == "{'VariantName': 'a'}\n"
    assert f"sagemaker-core {version('sagemaker-core')} drops" in PAGE


def exports(program: Program) -> None:
    """`lmi deploy export --format sdk` of each kind of deployment makes the calls that `up` makes, and no other."""
    program.run(
        """
import contextlib
from unittest import mock
import boto3
from sagemaker.core import resources

class Recorder:
    def __init__(self, calls):
        self._calls = calls

    def __getattr__(self, name):
        return lambda **given: self._calls.append([name, given]) or {"PolicyARN": "the policy's"}

def print_calls(program):
    recorder = Recorder([])
    with contextlib.ExitStack() as stack:
        for name in ("Model", "EndpointConfig", "Endpoint", "InferenceComponent"):
            stack.enter_context(mock.patch.object(getattr(resources, name), "get"))
        stack.enter_context(mock.patch.object(resources.Base, "get_sagemaker_client", return_value=recorder))
        stack.enter_context(mock.patch.object(boto3, "client", return_value=recorder))
        exec(program, {})
    print(json.dumps(recorder._calls))
"""
    )
    for case in CASES:
        made = resources(spec(case), decision(case))
        printed = program.run(f"print_calls({sdk_program(made, 'eu-west-1')!r})")
        wanted = [[CALLS[one.kind].create, resolved(one.request, lambda _: "the policy's")] for one in made]
        assert json.loads(printed.splitlines()[-1]) == wanted, case


def an_export(program: Program) -> None:
    """It creates an endpoint, waits for it before its components and for these before their adapters, and scales."""
    decided = decision("components", region="us-east-1", image=IMAGE)
    program.run(f"exec({sdk_program(resources(spec('components'), decided), 'us-east-1')!r}, {{}})")
    call = """print(Predictor("llama", component="llama-chat").predict(body)["generated_text"])"""
    assert program.run(call) == f"{SAYS}\n"


def example(name: str, program: Program) -> None:
    """It creates an endpoint, prints a streamed answer, and deletes all of it."""
    settings = {
        "IMAGE": IMAGE,
        "ROLE": "arn:aws:iam::123456789012:role/lmi",
        "BUCKET": "my-bucket",
        "MODEL": "s3://my-bucket/model.tar.gz",
        "HF_MODEL_ID": "org/name",
        "ENDPOINT_NAME": "example",
        "INSTANCE_TYPE": "ml.g5.xlarge",
    }
    code = (EXAMPLES / "sagemaker" / name).read_text()
    printed = program.run(f"import os; os.environ |= {settings}; exec({code!r}, {{}})")
    assert " The capital of France is The" in printed
    left = """
for kind, names in (("models", "Models"), ("endpoints", "Endpoints"), ("endpoint_configs", "EndpointConfigs")):
    print(getattr(boto3.client("sagemaker"), f"list_{kind}")(NameContains="example")[names])
"""
    assert program.run(f"import boto3{left}") == "[]\n[]\n[]\n"


def model_builder(program: Program) -> None:
    """It names a prefix where it got no archive, and drops the timeout whose name is its own."""
    code = """
requests = []
own = Session(default_bucket="my-bucket")
own.create_model = lambda **request: requests.append(request["container_defs"]["ModelDataUrl"]) or 1 / 0
own.endpoint_from_production_variants = lambda **request: requests.append(request["production_variants"][0]) or 1 / 0
bare = ModelBuilder(
    image_uri=builder.image_uri, role_arn=builder.role_arn, instance_type="ml.g6.xlarge", sagemaker_session=own
)
try:
    bare.build(model_name="bare")
except ZeroDivisionError:
    bare.built_model, bare.model_name = builder.built_model, "bare"
try:
    bare.deploy(endpoint_name="bare", container_timeout_in_seconds=1200)
except ZeroDivisionError:
    print(json.dumps(requests))
"""
    location, variant = json.loads(program.run(code).splitlines()[-1])
    assert re.fullmatch("s3://my-bucket/model-builder/.*/", location)
    assert not [name for name in variant if "Timeout" in name]


NOTES: dict[str, list[Callable[[Program], None]]] = {
    "v2": [djl_model],
    "core": [serializers, zeros, exports, an_export, partial(example, "sdk_resources.py")],
    "serve": [model_builder, partial(example, "sdk_model_builder.py")],
}


def test_notes(sdk: Sdk, program: Program) -> None:
    """What the page says of each beside its program."""
    program.upto("invoke")
    for note in NOTES[sdk.name]:
        note(program)


def test_delete(sdk: Sdk, program: Program, control: Any) -> None:
    program.upto("delete")
    for kind in ("endpoint", "endpoint_config", "model"):
        name = "".join(word.capitalize() for word in kind.split("_"))
        with pytest.raises(ClientError, match="Could not find"):
            getattr(control, f"describe_{kind}")(**{f"{name}Name": f"chat-{sdk.name}"})


def test_the_tested_versions_are_on_the_page(sdk: Sdk) -> None:
    assert f"tested with {sdk.package} {version(sdk.package)}\n" in PAGE
