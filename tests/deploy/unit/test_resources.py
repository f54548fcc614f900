"""The requests of a deployment: golden, as botocore takes them, and what a change changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.deployer.preparation import prepare
from deploy.errors import Refused, SpecError
from deploy.resources.build import resources, spec_digest, warnings
from deploy.resources.environment import environment
from deploy.resources.resource import (
    Kind,
    Ref,
    Resource,
    digest,
    refs,
    resolved,
    scoped_name,
    tag_map,
    tags,
    version_name,
)
from deploy.resources.updating import endpoint_deployment, num_batches
from deploy.spec import Spec
from handler.config.loader import read_config
from tests.deploy.cases import CASES, SECRET, TOPIC, decision, spec
from tests.deploy.strict import OPERATIONS, input_of, plain, wrong_in, wrong_words
from tests.one_test import in_one_test

# -- what the golden files cannot say: what a change changes, and what is refused --------------------------------------


def made(case: str, said: Spec | None = None, **changes: Any) -> dict[Kind, list[Resource]]:
    found: dict[Kind, list[Resource]] = {kind: [] for kind in Kind}
    for resource in resources(said or spec(case), decision(case, **changes)):
        found[resource.kind].append(resource)
    return found


def names(resources: dict[Kind, list[Resource]]) -> tuple[str, str]:
    return resources[Kind.MODEL][0].name, resources[Kind.ENDPOINT_CONFIG][0].name


def test_only_what_a_thing_holds_renews_it() -> None:
    model, config = names(made("plain"))
    assert names(made("plain", spec("plain", alarms=None, tags={"team": "other"}))) == (model, config)
    other_model, other_config = names(made("plain", spec("plain", options={"dtype": "fp16"})))
    assert other_model != model
    assert other_config != config  # it names the model
    same_model, third_config = names(made("plain", spec("plain", routing="random")))
    assert same_model == model
    assert third_config != config


@pytest.mark.parametrize("case", ["plain", "components"])
def test_an_adopted_variant_keeps_its_name_everywhere(case: str) -> None:
    instance = spec(case).instance.model_copy(update={"variant": "primary"})
    scaled: dict[str, Any] = {} if case == "components" else {"scaling": {"max": 3, "concurrency": 8}}
    built = made(case, spec(case, **scaled).model_copy(update={"instance": instance}))
    text = repr([resource.request for found in built.values() for resource in found])
    assert "AllTraffic" not in text
    assert text.count("primary") > 1


def test_everything_taggable_bears_the_deployment_and_the_digest() -> None:
    said = spec("components")
    for resource in resources(said, decision("components")):
        marks: Any = resource.request.get("Tags")
        if resource.kind is Kind.SCALING_POLICY:
            assert marks is None
        elif resource.kind is Kind.SCALABLE_TARGET:
            assert marks == {"lmi:deployment": "llama", "lmi:spec": spec_digest(said)}
        else:
            assert {"Key": "lmi:deployment", "Value": "llama"} in marks
            assert {"Key": "lmi:spec", "Value": spec_digest(said)} in marks


def test_the_users_tags_are_there_too() -> None:
    said = spec("plain", tags={"team": "search"})
    marks = made("plain", said)[Kind.MODEL][0].request["Tags"]
    assert {mark["Key"]: mark["Value"] for mark in marks} == {
        "team": "search",
        "lmi:deployment": "llama",
        "lmi:spec": spec_digest(said),
    }


def test_waking_refers_to_the_policy_that_it_starts() -> None:
    wake = next(one for one in made("components")[Kind.ALARM] if one.name == "llama/llama-chat/no-capacity")
    (ref,) = refs(wake.request)
    assert (ref.key, ref.attribute) == ("scaling-policy/llama/llama-chat/wake", "PolicyARN")
    assert wake.needs == (ref.key,)


@pytest.mark.parametrize(
    ("name", "given", "cooldown"),
    [
        ("components", 60, 60),
        ("components", 400, 400),
        ("asynchronous-asleep", 60, 900),
        ("asynchronous-asleep", 1200, 1200),
    ],
)
def test_waking_heeds_the_cooldown_of_the_specification(name: str, given: int, cooldown: int) -> None:
    """The queue's own is longer than the default, or a start that is not over would add an instance."""
    scaling = {"min": 0, "max": 8, "concurrency": 4, "scale_out_cooldown": given}
    policies = made(name, spec(name, scaling=scaling))[Kind.SCALING_POLICY]
    rules = [one.request["StepScalingPolicyConfiguration"] for one in policies if one.name.endswith("wake")]
    assert {rule["Cooldown"] for rule in rules} == {cooldown}


def test_only_what_may_sleep_is_woken() -> None:
    awake = spec("components", scaling={"min": 1, "max": 8, "concurrency": 4})
    alarms = [one for one in made("components", awake)[Kind.ALARM] if "no-capacity" in one.name]
    assert [one.name for one in alarms] == ["llama/llama-chat/no-capacity", "llama/llama-batch/no-capacity"]
    assert not refs([one.request for one in alarms])  # they tell, and roll back, but start nothing
    assert len(made("components", awake)[Kind.SCALING_POLICY]) == 2


def test_a_single_instance_is_updated_beside_itself_and_the_user_is_told() -> None:
    deployment = made("single")[Kind.ENDPOINT][0].update["DeploymentConfig"]
    assert deployment["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]["Type"] == "ALL_AT_ONCE"
    assert "AutoRollbackConfiguration" not in deployment  # there are no alarms
    assert "a single instance cannot be updated in batches" in warnings(spec("single"), decision("single"))[0]
    assert warnings(spec("plain"), decision("plain", warnings=("dear",))) == ("dear",)


@pytest.mark.parametrize(("count", "percent", "size"), [(2, 50, 1), (3, 50, 1), (8, 25, 2), (8, 5, 1)])
def test_a_batch_is_whole_instances_and_at_most_half(count: int, percent: int, size: int) -> None:
    said = spec(
        "plain", instance={"type": "ml.g6e.xlarge", "count": count}, update={"batch_percent": percent, "wait": 60}
    )
    rolling = made("plain", said)[Kind.ENDPOINT][0].update["DeploymentConfig"]["RollingUpdatePolicy"]
    assert rolling["MaximumBatchSize"] == {"Type": "INSTANCE_COUNT", "Value": size}
    assert 600 <= rolling["MaximumExecutionTimeoutInSeconds"] <= 28800


def test_an_update_leaves_to_scaling_what_is_its() -> None:
    assert made("prefix-aware")[Kind.ENDPOINT][0].update["RetainAllVariantProperties"] is True
    assert made("plain")[Kind.ENDPOINT][0].update["RetainAllVariantProperties"] is False
    chat = made("components")[Kind.COMPONENT][0]
    assert "RuntimeConfig" not in chat.update
    assert chat.request["RuntimeConfig"] == {"CopyCount": 4}
    assert chat.update["DeploymentConfig"]["RollingUpdatePolicy"]["MaximumBatchSize"]["Type"] == "CAPACITY_PERCENT"


def test_endpoints_and_components_have_their_own_alarms_to_roll_back_by() -> None:
    found = made("components")
    assert found[Kind.ENDPOINT][0].needs[1:] == ("alarm/llama/5xx", "alarm/llama/model-errors")
    rollback = found[Kind.COMPONENT][0].update["DeploymentConfig"]["AutoRollbackConfiguration"]
    assert [one["AlarmName"] for one in rollback["Alarms"]] == ["llama/llama-chat/5xx", "llama/llama-chat/model-errors"]


def test_latency_is_in_microseconds_and_somebody_is_told() -> None:
    latency = next(one.request for one in made("plain")[Kind.ALARM] if one.name == "llama/latency")
    assert latency["Threshold"] == 20_000_000.0
    assert latency["ExtendedStatistic"] == "p95"
    assert latency["AlarmActions"] == [TOPIC]


def test_an_archive_of_a_model_is_sagemaker_s_to_unpack() -> None:
    """It is ModelDataUrl, or ModelDataSource where fields of that are passed."""
    decided = replace(decision("plain"), model_data="s3://models/llama.tar.gz")
    (plain,) = (one for one in resources(spec("plain"), decided) if one.kind is Kind.MODEL)
    assert plain.request["PrimaryContainer"]["ModelDataUrl"] == "s3://models/llama.tar.gz"
    accepted = {"S3DataSource": {"ModelAccessConfig": {"AcceptEula": True}}}
    said = spec(
        "plain",
        model={"s3": "s3://models/llama.tar.gz"},
        sagemaker={"model": {"PrimaryContainer": {"ModelDataSource": accepted}}},
    )
    (passed,) = (one for one in resources(said, decided) if one.kind is Kind.MODEL)
    assert "ModelDataUrl" not in passed.request["PrimaryContainer"]
    assert passed.request["PrimaryContainer"]["ModelDataSource"]["S3DataSource"] == {
        "S3Uri": "s3://models/llama.tar.gz", "S3DataType": "S3Object", "CompressionType": "Gzip",
        "ModelAccessConfig": {"AcceptEula": True},
    }  # fmt: skip


def test_a_component_on_cpus_asks_for_no_accelerator() -> None:
    said = spec("cpu", components=[{"name": "one", "cpus": 2}])
    component = made("cpu", said)[Kind.COMPONENT][0].request["Specification"]
    assert component["ComputeResourceRequirements"] == {"MinMemoryRequiredInMb": 1024, "NumberOfCpuCoresRequired": 2.0}


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("components", {"components": [{"name": "a", "accelerators": 8}]},
     r"component a: accelerators: 8 GPUs are requested, but ml\.g6e\.12xlarge has 4"),
    ("components", {"instance": {"type": "ml.g6e.12xlarge", "count": 9, "managed": {"min": 0, "max": 4}}},
     r"instance\.count: 9 is greater than instance\.managed\.max"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resources(spec(case, **changes), decision(case))


def test_secrets_are_refused_unless_allowed() -> None:
    said = spec("plain", environment={"HF_TOKEN": "abc"})
    with pytest.raises(Refused):
        resources(said, decision("plain"))
    assert resources(said, decision("plain"), allow_plaintext_secret=True)


@in_one_test("count", [2, 3, 5, 19, 21, 39, 41, 99, 1000])
@in_one_test("percent", [5, 7, 49, 50])
def test_a_batch_is_5_to_50_percent_of_the_instances(count: int, percent: int) -> None:
    """RollingUpdatePolicy refuses what is less or more: 1 of 39 is."""
    said = spec("plain", instance={"type": "ml.g6e.xlarge", "count": count}, update={"batch_percent": percent})
    policy = endpoint_deployment(said, decision("plain"), [])["RollingUpdatePolicy"]
    size = policy["MaximumBatchSize"]["Value"]
    assert 0.05 <= size / count <= 0.5
    assert num_batches(said) == -(-count // size)


def variables(case: str = "plain", *, allow: bool = False, **changes: object) -> dict[str, str]:
    return environment(spec(case, **changes), decision(case), allow_plaintext_secret=allow)


def with_model(case: str = "plain", **model: object) -> Spec:
    return spec(case, model={**spec(case).model.model_dump(exclude_none=True), **model})


def test_options_become_what_the_handler_reads() -> None:
    options = {"max_rolling_batch_size": 64, "enable_chunked_prefill": True, "llm_engine": "vllm", "batch_size": 1}
    found = variables(options=options)
    assert found["OPTION_MAX_ROLLING_BATCH_SIZE"] == "64"
    assert found["OPTION_ENABLE_CHUNKED_PREFILL"] == "true"
    assert found["SERVING_BATCH_SIZE"] == "1"
    config = read_config(environ=found).checked()
    assert config.max_rolling_batch_size == 64
    assert config.engine == "vllm"
    assert config.max_model_len == 8192
    assert config.model_loading_timeout == 870.0
    assert config.engine_options["enable_chunked_prefill"] is True


def test_all_wrong_options_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.dtype=int9\n")
    options = {
        "llm_engine": "vllm",
        "max_rolling_batchsize": 1,
        "tgi_compat": "maybe",
        "batch_size": 4,
        "enable_streaming": True,
        "sampler_type": "auto",
        "option.dtype": "bf16",
        "model_id": "gpt2",
        "max_model_len": 4096,
    }
    model = {"path": str(tmp_path), "upload": "s3://bucket/model/", "context": 8192}
    with pytest.raises(SpecError) as raised:
        variables(model=model, options=options, environment={"OPTION_OF_TOMORROW": "1", "OPTION_MAX_LORAS": "0"})
    head, *lines = str(raised.value).splitlines()
    wanted = [
        "options.option.dtype: write it without `option.`",
        "options.model_id: set the model with model.id",
        "options.max_model_len and model.context contradict each other",
        "options.enable_streaming: enable_streaming=true needs batch_size=1, but batch_size=4",
        "environment.OPTION_MAX_LORAS: max_loras=0: must be a whole number of at least 1",
        "options.max_rolling_batchsize: unknown option 'max_rolling_batchsize'; did you mean 'max_rolling_batch_size'?",
        "options.sampler_type: sampler_type is for trtllm; the engine here is vllm",
        "options.tgi_compat: tgi_compat=maybe: must be true or false",
        "serving.properties, line 1: dtype=int9: must be one of",
    ]
    assert (head, len(lines)) == (f"{len(wanted)} problems:", len(wanted))
    for line, start in zip(sorted(lines), sorted(wanted), strict=True):
        assert line.startswith(f"  {start}")
    assert "Omit options.max_model_len." in raised.value.advice
    assert "`lmi options`" in raised.value.advice


def test_an_option_is_any_engines_where_the_image_chooses_the_engine() -> None:
    assert variables(options={"sampler_type": "auto", "load_format": "dummy"})["OPTION_LOAD_FORMAT"] == "dummy"


@in_one_test(("case", "name", "value"), [
    ("plain", "OPTION_MODEL_ID", "meta-llama/Meta-Llama-3-8B-Instruct"),
    ("components", "OPTION_MODEL_ID", "/opt/ml/model"),
    ("isolated", "OPTION_MODEL_ID", "/opt/ml/model"),
    ("isolated", "HF_HUB_OFFLINE", "1"),
    ("isolated", "TRANSFORMERS_OFFLINE", "1"),
    ("aws-image", "HF_MODEL_ID", "Qwen/Qwen3-8B"),
    ("aws-image", "OPTION_ENTRYPOINT", "djl_python.lmi_vllm.vllm_async_service"),
    ("plain", "HF_TOKEN_SECRET_ARN", SECRET),
    ("components", "OPTION_ENABLE_LORA", "true"),
    ("components", "SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY", "2"),
])  # fmt: skip
def test_what_the_rest_of_the_specification_makes_of_it(case: str, name: str, value: str) -> None:
    assert variables(case)[name] == value


def test_nothing_is_offline_nor_trusted_unless_asked_for() -> None:
    assert not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OPTION_TRUST_REMOTE_CODE"} & set(variables())


def test_a_model_is_spread_as_decided_unless_an_option_says_otherwise() -> None:
    four = decision("components", tensor_parallel=4)
    assert environment(spec("components"), four)["OPTION_TENSOR_PARALLEL_DEGREE"] == "4"
    asked = spec("components", options={"tensor_parallel_degree": 2})
    assert environment(asked, four)["OPTION_TENSOR_PARALLEL_DEGREE"] == "2"
    asked = spec("components", environment={"TENSOR_PARALLEL_DEGREE": "2"})
    assert "OPTION_TENSOR_PARALLEL_DEGREE" not in environment(asked, four)
    assert "OPTION_TENSOR_PARALLEL_DEGREE" not in variables()


@in_one_test(("changes", "places"), [
    ({"options": {"max_model_len": 4096}}, ("options.max_model_len", "model.context")),
    ({"options": {"max_seq_len": 4096}}, ("options.max_seq_len", "model.context")),
    ({"environment": {"OPTION_MAX_MODEL_LEN": "1"}}, ("environment.OPTION_MAX_MODEL_LEN", "model.context")),
    ({"environment": {"HF_MODEL_ID": "gpt2"}}, ("environment.HF_MODEL_ID", "model.id")),
    ({"options": {"dtype": "bf16"}, "environment": {"OPTION_DTYPE": "fp16"}}, ("options.dtype", "OPTION_DTYPE")),
    ({"options": {"revision": "a"}, "environment": {"HF_REVISION": "b"}}, ("options.revision", "HF_REVISION")),
    ({"options": {"sessions_path": "a"}, "environment": {"SAGEMAKER_SESSIONS_PATH": "b"}}, ("sessions_path",)),
])  # fmt: skip
def test_contradictions_name_both_places(changes: dict[str, Any], places: tuple[str, str]) -> None:
    with pytest.raises(SpecError) as raised:
        variables(**changes)
    assert all(place in str(raised.value) for place in places)


def test_an_isolated_container_cannot_be_told_to_ask_the_hub() -> None:
    with pytest.raises(SpecError, match=r"environment\.HF_HUB_OFFLINE and network\.isolated contradict each other"):
        variables("isolated", environment={"HF_HUB_OFFLINE": "0"})


def test_model_data_may_hold_the_model_further_down() -> None:
    found = variables("isolated", environment={"OPTION_MODEL_ID": "/opt/ml/model/llama"})
    assert found["OPTION_MODEL_ID"] == "/opt/ml/model/llama"
    with pytest.raises(SpecError, match="contradict"):
        variables("isolated", environment={"OPTION_MODEL_ID": "gpt2"})


def test_saying_the_same_twice_is_no_contradiction() -> None:
    assert variables(options={"max_model_len": 8192})["OPTION_MAX_MODEL_LEN"] == "8192"


def test_an_unknown_option_can_be_passed_on_as_a_variable() -> None:
    assert variables(environment={"OPTION_OF_TOMORROW": "1"})["OPTION_OF_TOMORROW"] == "1"


def test_awss_image_takes_any_option_but_reads_no_secrets() -> None:
    assert variables("aws-image", options={"new_in_lmi": 1})["OPTION_NEW_IN_LMI"] == "1"
    awss = decision("aws-image")
    with pytest.raises(SpecError, match="AWS's image does not read secrets"):
        environment(spec("plain", image={"aws": "djl-lmi"}), awss)
    by_uri = environment(spec("aws-image", image={"uri": awss.image}, options={"new_in_lmi": 1}), awss)
    assert by_uri["HF_MODEL_ID"] == "Qwen/Qwen3-8B"


@in_one_test("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MY_SECRET", "DB_PASSWORD", "OPENAI_API_KEY"])
def test_secrets_are_refused(name: str) -> None:
    with pytest.raises(Refused) as raised:
        variables(environment={name: "abc123def"})
    assert f"environment.{name}" in str(raised.value)
    assert "model.token_secret" in raised.value.advice
    assert "abc123def" not in str(raised.value) + raised.value.advice
    assert variables(environment={name: "abc123def"}, allow=True)[name] == "abc123def"


def test_the_containers_own_key_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="on SageMaker, clients authenticate with SigV4") as raised:
        variables(environment={"LMI_API_KEY": "k"})
    assert "sagemaker:InvokeEndpoint" in raised.value.advice


def test_what_sagemaker_would_not_take_is_refused_with_its_size() -> None:
    with pytest.raises(SpecError, match="MY-NAME: a variable's name must consist of letters"):
        variables(environment={"MY-NAME": "x"})
    with pytest.raises(SpecError, match="SERVE: the value has 1025 bytes, but the maximum is 1024"):
        variables(environment={"SERVE": "ü" * 512 + "x"})
    with pytest.raises(SpecError, match=r"N{2}.*: the name has 1100 bytes"):
        variables(environment={"N" * 1100: "x"})
    with pytest.raises(SpecError, match=r"10\d variables, but SageMaker accepts at most 100"):
        variables(environment={f"V{number}": "x" for number in range(100)})
    with pytest.raises(SpecError, match="bytes in total, but SageMaker accepts at most 32768") as raised:
        variables(environment={f"V{number}": "x" * 1000 for number in range(40)})
    assert "serving.properties" in raised.value.advice


def test_a_revision_of_the_hub_and_the_same_option_are_one() -> None:
    assert "OPTION_REVISION" not in variables(environment={"HF_REVISION": "main"})
    assert "OPTION_MAX_MODEL_LEN" not in environment(with_model(context=None), decision("plain"))


def test_wrong_options_are_named_beside_what_cannot_be_decided() -> None:
    wrong = spec("plain", options={"dtype": "int9"}, instance={"type": "ml.g6e.xlarg"})
    with pytest.raises(SpecError) as raised:
        prepare(wrong, "eu-west-1", None)
    head, *lines = str(raised.value).splitlines()
    assert (head, len(lines)) == ("2 problems:", 2)
    assert "ml.g6e.xlarg" in lines[0]
    assert lines[1].startswith("  options.dtype: dtype=int9: must be one of")


@pytest.mark.parametrize("name", ["SAGEMAKER_MULTI_MODEL", "LORA_ADAPTERS"])
def test_variables_that_the_container_refuses_are_refused_before(name: str) -> None:
    with pytest.raises(SpecError, match=rf"environment\.{name}: {name}=true: "):
        variables(environment={name: "true"})


# -- every request of every kind of deployment, exactly, and as botocore's own validation takes it ---------------------
# A golden file that changes renews what people have deployed: CHANGELOG.md says so. `--update-golden` writes them
# anew.


GOLDEN = Path(__file__).parents[2] / "golden" / "deploy"


@pytest.mark.parametrize("case", CASES)
def test_requests(case: str, request: pytest.FixtureRequest) -> None:
    found = [_as_json(resource) for resource in resources(spec(case), decision(case))]
    path = GOLDEN / f"{case}.json"
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps(found, indent=2) + "\n")
    assert found == json.loads(path.read_text())


def test_every_golden_file_has_its_case_in_resources() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


@in_one_test("case", CASES)
def test_aws_takes_every_request(case: str) -> None:
    """botocore's validation lets any text pass, of any length; its model says which AWS takes."""
    for resource in resources(spec(case), decision(case)):
        assert bool(resource.update) == (OPERATIONS[resource.kind][2] is not None), resource.key
        assert [*wrong_in(resource)] == []


def test_a_wrong_word_would_be_found() -> None:
    wrong = {"ModelName": "a_b", "PrimaryContainer": {"Mode": "Many", "Environment": {"A-B": "x"}}}
    found = list(wrong_words(input_of("sagemaker", "CreateModel"), wrong))
    assert [one.partition(":")[0] for one in found] == [
        ".ModelName",
        ".PrimaryContainer.Mode",
        ".PrimaryContainer.Environment",
    ]


@in_one_test("case", CASES)
def test_what_a_resource_needs_comes_before_it(case: str) -> None:
    made = resources(spec(case), decision(case))
    keys = [resource.key for resource in made]
    assert len(set(keys)) == len(keys)
    for place, resource in enumerate(made):
        assert set(resource.needs) <= set(keys[:place]), resource.key


def _as_json(resource: Resource) -> dict[str, Any]:
    return {
        "key": resource.key,
        "needs": list(resource.needs),
        "request": plain(resource.request),
        "update": plain(resource.update),
    }


def test_values_take_their_places() -> None:
    ref = Ref("scaling-policy/a", "PolicyARN")
    request = {"AlarmActions": [ref, "x"], "Dimensions": ({"Value": ref},), "Period": 30}
    assert refs(request) == (ref, ref)
    assert resolved(request, lambda ref: f"arn:{ref.key}") == {
        "AlarmActions": ["arn:scaling-policy/a", "x"],
        "Dimensions": [{"Value": "arn:scaling-policy/a"}],
        "Period": 30,
    }
    assert refs({"Period": 30}) == ()


def test_a_version_is_found_again_by_its_content_alone() -> None:
    name = version_name("llama", {"a": 1, "b": [2]})
    assert name == version_name("llama", {"b": [2], "a": 1}) == f"llama-{digest({'a': 1, 'b': [2]})}"
    assert name != version_name("llama", {"a": 1, "b": [3]})
    assert len(version_name("x" * 63, {})) == 63


def test_no_two_deployments_share_a_name_beside_them() -> None:
    assert scoped_name("a", "b", "5xx") == "a/b/5xx" != scoped_name("a-b", "5xx")


def test_tags_in_both_forms() -> None:
    marks = tags("llama", "1234", {"team": "search"})
    assert tag_map(marks) == {"team": "search", "lmi:deployment": "llama", "lmi:spec": "1234"}
