"""A specification: where it is read from, every error with its place, and SageMaker's limits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from pydantic import TypeAdapter, ValidationError

from deploy.cli.arguments import add_spec, spec_of
from deploy.errors import SpecError
from deploy.resolve.images import LISTED_AMIS
from deploy.spec import Spec, sections, values
from deploy.spec.options import options_problems
from deploy.spec.reading import read_spec
from tests.deploy.cases import SECRET
from tests.one_test import in_one_test

# -- reading -----------------------------------------------------------------------------------------------------------
# A specification of a file, of `--set`, and of the flags; every error with its place and what would be right.


TEXT = """
name: llama
role: arn:aws:iam::111122223333:role/endpoint
image: {repository: lmi-handler}
model: {id: meta-llama/Llama-3.1-8B}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "llama.yaml"
    path.write_text(TEXT)
    return path


def wrong(file: Path, *settings: str, text: str = TEXT) -> str:
    """What is said, without the file's name."""
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_spec(file, settings)
    assert caught.value.status == 2
    return str(caught.value).replace(str(file), "FILE")


def test_a_file_and_what_is_laid_over_it(file: Path) -> None:
    spec = read_spec(file, ["instance.type=ml.g5.xlarge", "instance.count=3", "options.llm_engine=vllm"])
    assert (spec.name, spec.instance.type, spec.instance.count) == ("llama", "ml.g5.xlarge", 3)
    assert spec.options == {"llm_engine": "vllm"}
    assert spec.model.id == "meta-llama/Llama-3.1-8B"


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text(
        '{"name": "llama", "role": "arn:aws:iam::111122223333:role/endpoint", '
        '"image": {"aws": "djl-lmi"}, "model": {"s3": "s3://bucket/llama/"}}'
    )
    assert read_spec(path).image.aws == "djl-lmi"


def test_flags_alone_make_one(file: Path) -> None:
    parser = argparse.ArgumentParser()
    add_spec(parser)
    given = ["--name", "x", "--role", "arn:aws:iam::111122223333:role/r", "--model", "a/b", "--count", "2"]
    given += ["--image", "111122223333.dkr.ecr.us-east-1.amazonaws.com/x:1", "--set", "instance.count=4"]
    spec = spec_of(parser.parse_args(given))
    assert (spec.name, spec.model.id, spec.instance.count) == ("x", "a/b", 4)


def test_settings_make_sections_lists_and_names_with_dots(file: Path) -> None:
    spec = read_spec(
        file,
        ["network={subnets: [subnet-1], security_groups: [sg-1]}", r"tags.example\.com/team=a", "alarms=null"],
    )
    assert spec.network.subnets == ("subnet-1",)
    assert dict(spec.tags) == {"example.com/team": "a"}
    assert spec.alarms is None


def test_a_section_that_is_empty_in_the_file_can_be_set(file: Path) -> None:
    file.write_text(TEXT + "scaling:\n")
    spec = read_spec(file, ["scaling.max=3", "scaling.concurrency=8"])
    assert spec.scaling is not None
    assert spec.scaling.max == 3


def test_variables_on_the_command_line_are_as_they_are_written(file: Path) -> None:
    settings = ["PORT=8080", "DEBUG=true", "RATE=0.50", "MODE=0777", "AT=12:30:45", "DAY=2026-11-20", "QUOTED='1'"]
    spec = read_spec(file, [f"environment.{one}" for one in settings])
    assert spec.environment == dict(one.replace("'", "").split("=") for one in settings)


@pytest.mark.parametrize("value", ["0777", "12:30:45", "on", "8080", "0.5", "2026-11-20", "", "[1]"])
def test_variables_that_yaml_takes_for_something_else_are_to_be_quoted(file: Path, value: str) -> None:
    file.write_text(TEXT + f"environment:\n  X: {value}\n")
    with pytest.raises(SpecError, match=r"environment\.X: must be a string \(put it in quotes\)"):
        read_spec(file)
    file.write_text(TEXT + f"environment:\n  X: '{value}'\n")
    assert read_spec(file).environment == {"X": value}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("instance.count=0", "instance.count: must be at least 1 (given: 0)"),
        ("instance.count=many", 'instance.count: must be a whole number (given: "many")'),
        ("instance.count=2.5", "instance.count: must be a whole number (given: 2.5)"),
        ("instance.type=g5.xlarge",
         'instance.type: must be auto, or a SageMaker type, such as ml.g6e.xlarge (given: "g5.xlarge")'),
        ("instance.typ=ml.g5.xlarge", "instance.typ: there is no such setting; did you mean instance.type?"),
        ("instance_type=ml.g5.xlarge", "instance_type: there is no such setting; did you mean instance.type?"),
        ("prefix_length=2048", "prefix_length: there is no such setting; did you mean routing.prefix_length?"),
        ("xyzzy=1", "xyzzy: there is no such setting"),
        ("name=-a", 'name: must be letters, digits and inner hyphens, such as llama-3-8b (given: "-a")'),
        ("role=me", 'role: must be written as arn:aws:iam::111122223333:role/Name (given: "me")'),
        ("model.dtype=bf17",
         'model.dtype: must be auto, fp32, bf16, fp16, fp8, int8, mxfp4, fp4 or int4 (given: "bf17")'),
        ("routing=fastest", 'routing: must be least_outstanding or random (given: "fastest")'),
        ("routing.prefix_length=2048", "routing.concurrency_threshold: is required"),
        ("routing={prefix_length: 3, concurrency_threshold: 8}",
         "routing.prefix_length: must be at least 1024 (given: 3)"),
        ("options.x=[1]", "options.x: must be a string, a number, true or false (put JSON in quotes)"),
        ("environment.X=[1]", "environment.X: must be a string (put it in quotes)"),
        ('environment.X="a\\nb"',
         'environment.X: must not contain control characters or line breaks (given: "a\\nb")'),
        ("model={id: ''}", 'model.id: must not be empty (given: "")'),
        ("network.subnets=a", 'network.subnets: must be a list (given: "a")'),
        ("components=[{name: a, copis: 2}]",
         "components.0.copis: there is no such setting; did you mean components.copies?"),
        ("image.uri=docker.io/me/x:1",
         "image.uri: must be an image in ECR, such as 111122223333.dkr.ecr.us-east-1.amazonaws.com/name:tag or "
         '...@sha256:... (SageMaker pulls images only from ECR) (given: "docker.io/me/x:1")'),
        ("image.tag=a b", 'image.tag: must be an image\'s tag, such as 1.0-cu130 (given: "a b")'),
        ("image.aws=djl-lmi", "image: set exactly one of uri, repository, aws, not repository and aws"),
        ("model.path=here", "model: set exactly one of id, s3, path, not id and path"),
        ("model.token_secret=hf_abcdef", "model.token_secret: must be written as "
         "arn:aws:secretsmanager:us-east-1:111122223333:secret:hf-token-AbCdEf"),
        (f"model={{s3: s3://bucket/model/, token_secret: '{SECRET}'}}",
         "model: token_secret requires a model on the hub (id)"),
        ("scaling={max: 2}", "scaling.concurrency: is required"),
        ("scaling={min: 3, max: 2, concurrency: 1}", "scaling: min must not be greater than max"),
        ("tags.lmi:x=a", "tags: lmi:x: names that start with aws: or lmi: are reserved"),
        ("encryption.model_key=alias/k", "encryption.model_key requires a model or adapters in S3"),
        ("encryption.secret_key=alias/k", "encryption.secret_key requires model.token_secret"),
        ("encryption.topic_key=alias/k", "encryption.topic_key requires async.notify_success or async.notify_error"),
        ("encryption.output_key=alias/k", "encryption.output_key requires async or batch"),
            ("encryption.input_key=alias/k", "encryption.input_key requires batch"),
        ("instance.price=2", "instance.price requires instance.type to be a type other than auto"),
        ("network.isolated=true",
         "network.isolated: the container cannot reach the hub; use model.path or model.s3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(file: Path, setting: str, said: str) -> None:
    assert wrong(file, setting) == f"FILE: {said}"


def test_all_errors_are_said_at_once(file: Path) -> None:
    said = wrong(file, "instance.count=0", "update.keep=0")
    assert said.splitlines() == [
        "FILE:",
        "  instance.count: must be at least 1 (given: 0)",
        "  update.keep: must be at least 1 (given: 0)",
    ]


def test_sections_that_disagree_and_wrong_options_are_said_with_them(file: Path) -> None:
    settings = [
        "instance.count=0",
        "name=-a",
        "encryption.output_key=alias/k",
        r"tags.lmi:x=a",
        "network.isolated=true",
    ]
    options = ["options.max_rolling_batchsize=1", "options.dtype=int9", "options.x=[1]", "options.model_id=a"]
    said = wrong(file, *settings, *options, "environment.OPTION_MAX_LORAS='0'", "environment.OPTION_OF_TOMORROW=1")
    starts = [
        "name: must be letters",
        "options.x: must be a string",
        "instance.count: must be at least 1",
        "network.isolated: the container cannot reach the hub",
        "tags: lmi:x: names that start with",
        "encryption.output_key requires async or batch",
        "options.model_id: set the model with model.id",
        "options.max_rolling_batchsize: unknown option 'max_rolling_batchsize'; did you mean 'max_rolling_batch_size'?",
        "options.dtype: dtype=int9: must be one of",
        "environment.OPTION_MAX_LORAS: max_loras=0: must be a whole number of at least 1",
    ]
    head, *lines = said.splitlines()
    assert (head, len(lines)) == ("FILE:", len(starts))
    for line, start in zip(sorted(lines), sorted(starts), strict=True):
        assert line.startswith(f"  {start}")


@pytest.mark.parametrize("name", ["LORA_ADAPTERS", "TOKENIZER_CONFIG_PATH"])
def test_a_foreign_variable_that_the_container_refuses_is_refused(file: Path, name: str) -> None:
    assert f"environment.{name}: {name}=a.py:b: " in wrong(file, "instance.count=0", f"environment.{name}=a.py:b")
    alone = read_spec(file, [f"environment.{name}=a.py:b"])
    assert [problem.partition("=")[0] for problem in options_problems(alone)] == [f"environment.{name}: {name}"]


def test_what_follows_from_a_wrong_section_alone_is_not_said(file: Path) -> None:
    assert "encryption.output_key" not in wrong(file, "encryption.output_key=alias/k", "async={output: 1}")
    assert "hub" not in wrong(file, "network.isolated=true", "model.id=1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "FILE: is empty"),
        ("- a", "FILE: must be a mapping of names to values"),
        (TEXT + "name: again\n", "FILE: name occurs twice, in lines 2 and 6"),
        (TEXT + "instance: {count: 1, count: 2}\n", "FILE: count occurs twice, in line 6"),
    ],
)
def test_files_that_are_none(file: Path, text: str, said: str) -> None:
    assert wrong(file, text=text) == said


def test_what_is_no_yaml_is_said_in_a_line(file: Path) -> None:
    said = wrong(file, text="name: x\nimage: [\n")
    assert said == "FILE: is not valid YAML: line 3, column 1: expected the node content, but found '<stream end>'"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: No such file"):
        read_spec(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("name", "--set name: must be KEY=VALUE, such as instance.type=ml.g5.xlarge"),
        ("a..b=1", "--set a..b=1: must be KEY=VALUE, such as instance.type=ml.g5.xlarge"),
        ("name.x=1", "--set name.x=1: name is not a mapping, so it has no fields"),
        ("model.shape={a: 1, a: 2}", "--set model.shape={a: 1, a: 2}: a occurs twice, in line 1"),
    ],
)
def test_settings_that_are_none(file: Path, setting: str, said: str) -> None:
    assert wrong(file, setting) == said


def test_the_command_line_is_named_where_there_is_no_file() -> None:
    with pytest.raises(SpecError, match=r"^the command line:\n  role: is required\n  image: is required"):
        read_spec(None, ["name=x"])
    with pytest.raises(SpecError, match="there is no specification"):
        read_spec(None)


def test_anchors_are_no_names_that_stand_twice(file: Path) -> None:
    file.write_text(TEXT + "environment: &e {A: x}\noptions: {<<: *e, b: 1}\n")
    found: dict[str, Any] = read_spec(file).options
    assert found == {"A": "x", "b": 1}


@pytest.mark.parametrize("more", [
    "? [a]\n: 1\n", "options: {max_tokens: " + "9" * 5000 + "}\n", "options: {x: " + "[" * 1000 + "]" * 1000 + "}\n",
])  # fmt: skip
def test_what_python_cannot_read_is_no_yaml(tmp_path: Path, more: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"name: llama\n{more}")
    with pytest.raises(SpecError, match="is not valid YAML"):
        read_spec(path)
    with pytest.raises(SpecError, match="is not valid YAML"):
        read_spec(None, [f"options={{{more.strip().lstrip('?')}}}"] if "?" not in more else ["options={? [a] : 1}"])


@pytest.mark.parametrize("setting", ["scaling={max: 2, concurrency: .inf}", "options.temperature=.nan"])
def test_numbers_without_end_are_refused(setting: str) -> None:
    with pytest.raises(SpecError, match=setting.partition("=")[0].split(".")[0]):
        read_spec(None, [setting])


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ('environment: {A: "\\ud800"}', "a.yaml: line 2: \\ud800 contains a lone surrogate"),
        ('sagemaker: {variant: {"\\udc80": x}}', "a.yaml: line 2: \\udc80 contains a lone surrogate"),
        (
            'sagemaker: {model: {PrimaryContainer: {ContainerHostname: "x\\ud800"}}}',
            "a.yaml: line 2: x\\ud800 contains a lone surrogate",
        ),
    ],
)
def test_half_of_a_character_is_refused(tmp_path: Path, more: str, line: str) -> None:
    """YAML may write one, and no request of AWS, no digest and no terminal takes it."""
    path = tmp_path / "a.yaml"
    path.write_text(f"name: x\n{more}\n")
    with pytest.raises(SpecError) as caught:
        read_spec(path)
    assert line in str(caught.value)
    for setting in ("sagemaker.variant.\udc80=1", 'tags.a="\\ud800"'):
        with pytest.raises(SpecError) as caught:
            read_spec(None, [setting])
        assert "half of a character" in str(caught.value)
        str(caught.value).encode()


# -- the specification takes no more than SageMaker does: its limits are those of botocore's service model -------------


SERVICE = botocore.session.Session().get_service_model("sagemaker")


def numbers(section: type[values.Section], name: str) -> tuple[Any, Any]:
    """Least and most."""
    field = dict(_branches(section.model_json_schema()["properties"][name]))
    return field.get("minimum"), field.get("maximum")


def _branches(field: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for one in field.get("anyOf", [field]):
        yield from one.items()


@in_one_test(
    ("section", "name", "shape"),
    [
        (sections.Timeouts, "download", "ProductionVariantModelDataDownloadTimeoutInSeconds"),
        (sections.Timeouts, "startup", "ProductionVariantContainerStartupHealthCheckTimeoutInSeconds"),
        (sections.Timeouts, "provision", "VariantInstanceProvisionTimeoutInSeconds"),
        (sections.Instance, "volume_gb", "ProductionVariantVolumeSizeInGB"),
        (sections.Pool, "priority", "InstancePoolPriority"),
        (sections.Async, "concurrency", "MaxConcurrentInvocationsPerInstance"),
        (sections.Update, "wait", "WaitIntervalInSeconds"),
    ],
)
def test_numbers_have_its_bounds(section: type[values.Section], name: str, shape: str) -> None:
    told = SERVICE.shape_for(shape).metadata
    assert numbers(section, name) == (told["min"], told["max"])


def test_pools_are_as_many_as_aws_takes() -> None:
    assert sections.Instance.model_json_schema()["properties"]["pools"]["maxItems"] == 5
    assert SERVICE.shape_for("InstancePoolList").metadata["max"] == 5


def test_prefix_aware_routing_has_its_bounds() -> None:
    told = SERVICE.shape_for("PrefixAwareRoutingConfig").members
    for name, member in (("prefix_length", "PrefixLength"), ("concurrency_threshold", "ConcurrencyThreshold")):
        assert numbers(sections.PrefixAware, name) == (told[member].metadata["min"], told[member].metadata["max"])


@in_one_test(
    ("annotation", "shape", "right"),
    [
        (values.Name, "EndpointName", "a-1"),
        (values.Name, "InferenceComponentName", "a-1"),
        (values.ImageUri, "ContainerImage", "1" * 12 + ".dkr.ecr.us-east-1.amazonaws.com/x:1"),
        (values.RoleArn, "RoleArn", "arn:aws:iam::111122223333:role/service-role/x"),
        (values.KeyId, "KmsKeyId", "mrk-0123456789abcdef0123456789abcdef"),
        (values.TopicArn, "SnsTopicArn", "arn:aws-cn:sns:cn-north-1:111122223333:x"),
        (values.S3Prefix, "S3ModelUri", "s3://bucket/"),
        (values.ModelUri, "S3ModelUri", "s3://bucket/x.tar.gz"),
        (values.ArtifactUri, "Url", "s3://bucket/x.tar.gz"),
        (values.OutputUri, "DestinationS3Uri", "s3://bucket"),
        (values.VpcId, "SubnetId", "subnet-0"),
        (values.TagKey, "TagKey", "a b"),
        (values.TagValue, "TagValue", ""),
    ],
)
def test_texts_are_not_longer_than_it_takes(annotation: Any, shape: str, right: str) -> None:
    take = TypeAdapter(annotation).validate_python
    assert take(right) == right
    longest = SERVICE.shape_for(shape).metadata["max"]
    fill = right.replace("x", "x" * longest) if "x" in right else right + "1" * (longest + 1)
    with pytest.raises(ValidationError):
        take(fill)
    assert TypeAdapter(annotation).json_schema()["maxLength"] <= longest


def test_lists_have_its_lengths() -> None:
    fields = sections.Network.model_json_schema()["properties"]
    assert fields["subnets"]["maxItems"] == SERVICE.shape_for("Subnets").metadata["max"]
    assert fields["security_groups"]["maxItems"] == SERVICE.shape_for("VpcSecurityGroupIds").metadata["max"]
    tags = Spec.model_json_schema()["properties"]["tags"]
    own = 3  # lmi:deployment, lmi:spec, lmi:before
    assert tags["maxProperties"] == SERVICE.shape_for("TagList").metadata["max"] - own


def test_the_hosts_are_all_that_botocore_knows() -> None:
    assert set(LISTED_AMIS) == set(SERVICE.shape_for("ProductionVariantInferenceAmiVersion").enum)


def test_every_instance_type_of_sagemaker_is_a_name_that_is_taken() -> None:
    take = TypeAdapter(values.InstanceType).validate_python
    types = SERVICE.shape_for("ProductionVariantInstanceType").enum
    assert [take(one) for one in types] == types


@in_one_test("region", ["us-east-1", "us-isob-east-1", "eusc-de-east-1", "cn-northwest-1", "mx-central-1"])
def test_regions_of_all_partitions_are_taken(region: str) -> None:
    assert TypeAdapter(values.Region).validate_python(region) == region
