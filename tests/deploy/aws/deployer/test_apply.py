"""Deployments put to AWS's double: made, changed, failing, and taken away; what only looks like theirs stays."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from botocore.exceptions import ClientError

from deploy.aws import Aws, is_missing
from deploy.deployer.apply import Run
from deploy.deployer.calls import CALLS, CONSISTENCY_SECONDS, call, removal, show
from deploy.deployer.plan import Plan, Verb
from deploy.errors import DeployError, Failed, Refused
from deploy.resources.resource import TAG_DEPLOYMENT, Kind
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import COMPONENTS, NAME, PLAIN, down, permit, up, wanted_of

# -- deployments put to AWS's double: made, made again, changed, failing, and taken away -------------------------------


def verbs(plan: Plan) -> list[tuple[str, str]]:
    return [(action.verb.value, action.kind.value) for action in plan.changing]


def test_up_makes_everything_and_again_changes_nothing(cloud: Cloud) -> None:
    wanted = wanted_of(PLAIN)
    up(wanted)
    there = cloud.everything()
    assert cloud.sagemaker.names("endpoint") == [NAME]
    assert len(there) == len(wanted)
    cloud.calls.clear()
    assert verbs(up(wanted)) == []
    assert cloud.changes() == []
    assert cloud.everything() == there


def test_down_leaves_nothing_and_twice_is_fine(cloud: Cloud) -> None:
    up(wanted_of(COMPONENTS))
    assert cloud.sagemaker.names("inference-component") == ["base", "french", "second"]
    down()
    assert cloud.everything() == {}
    cloud.calls.clear()
    assert down().actions == ()
    assert cloud.changes() == []


def test_components_are_made_and_again_nothing_changes(cloud: Cloud) -> None:
    wanted = wanted_of(COMPONENTS)
    up(wanted)
    assert len(cloud.everything()) == len(wanted)
    assert verbs(up(wanted)) == []


def test_an_update_with_a_failed_rollback_is_repeated_and_keeps_versions(cloud: Cloud) -> None:
    up(wanted_of(PLAIN))
    changed = wanted_of(PLAIN, options={"max_tokens": 1})
    cloud.sagemaker.fate(NAME, "UpdateRollbackFailed", "no capacity")
    with pytest.raises(Failed, match="no capacity"):
        up(changed)
    assert len(cloud.sagemaker.names("endpoint-config")) == 2
    again = verbs(up(changed, keep=1))
    assert ("update", "endpoint") in again
    assert "delete" not in [verb for verb, _ in again]
    assert len(cloud.sagemaker.names("endpoint-config")) == 2
    assert verbs(up(changed, keep=1)) == [("delete", "endpoint-config"), ("delete", "model")]


def test_an_update_is_a_new_version_and_old_ones_go(cloud: Cloud) -> None:
    names = []
    for tokens in (1, 2, 3):
        wanted = wanted_of(PLAIN, options={"max_tokens": tokens})
        names.append(next(one.name for one in wanted if one.kind.value == "endpoint-config"))
        up(wanted, keep=2)
        assert cloud.sagemaker.things["endpoint", NAME].request["EndpointConfigName"] == names[-1]
        assert verbs(up(wanted, keep=2)) == []
    assert cloud.sagemaker.names("endpoint-config") == sorted(names[1:])
    assert len(cloud.sagemaker.names("model")) == 2
    down()
    assert cloud.everything() == {}


def test_an_update_says_how_and_which_alarms_undo_it(cloud: Cloud) -> None:
    up(wanted_of(PLAIN))
    plan = up(wanted_of(PLAIN, options={"max_tokens": 2}))
    assert [verb for verb, kind in verbs(plan) if kind in ("model", "endpoint-config")] == ["replace", "replace"]
    (update,) = [action for action in plan.actions if action.operation == "update_endpoint"]
    deployment: Any = (update.request or {})["DeploymentConfig"]
    assert "RollingUpdatePolicy" in deployment
    alarms = [alarm["AlarmName"] for alarm in deployment["AutoRollbackConfiguration"]["Alarms"]]
    assert alarms == ["llama/5xx", "llama/model-errors"]


def test_an_update_that_is_rolled_back_leaves_what_served(cloud: Cloud) -> None:
    def tags() -> Any:
        (alarm,) = cloudwatch.describe_alarms(AlarmNames=["llama/5xx"])["MetricAlarms"]
        return cloudwatch.list_tags_for_resource(ResourceARN=alarm["AlarmArn"])["Tags"]

    cloudwatch = cloud.client("cloudwatch")
    up(wanted_of(PLAIN))
    before, told = cloud.everything(), tags()
    cloud.sagemaker.fate(NAME, "RolledBack", "llama/5xx went off")
    with pytest.raises(Failed, match="rolled back"):
        up(wanted_of(PLAIN, options={"max_tokens": 2}))
    after = cloud.everything()
    assert set(after) == set(before)
    name = f"endpoint/{NAME}"
    assert after[name]["EndpointConfigName"] == before[name]["EndpointConfigName"]
    assert tags() == told
    up(wanted_of(PLAIN, options={"max_tokens": 2}))
    assert tags() != told


ASYNC = {"async": {"output": "s3://results/"}, "scaling": {"min": 0, "max": 4, "concurrency": 8}}
OTHER_TYPE = {"instance": {"type": "ml.g6e.4xlarge", "count": 2}}
OTHER_NAME = {"instance": {"type": "ml.g6e.2xlarge", "count": 2, "variant": "Blue"}}
NIGHTS = "nights"


def scaled(cloud: Cloud) -> dict[str, Any]:
    """Everything of automatic scaling, and whether the alarms trigger policies that exist."""
    policies = {policy["PolicyARN"] for policy in cloud.scaling.policies.values()}
    alarms = cloud.client("cloudwatch").describe_alarms()["MetricAlarms"]
    actions = {arn for alarm in alarms for arn in alarm["AlarmActions"]}
    parts = {key: value for key, value in cloud.everything().items() if "sagemaker:variant" in key}
    return {**parts, "dangling": actions - policies}


@pytest.mark.parametrize("more", [{}, ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("change", [OTHER_TYPE, OTHER_NAME], ids=["type", "name"])
def test_a_variant_that_aws_would_not_update_is_deregistered_before(
    cloud: Cloud, more: dict[str, Any], change: dict[str, Any]
) -> None:
    """AWS refuses the update otherwise, and deletes the policies with the target."""
    content = {**PLAIN, **more}
    permit(cloud, content, {**content, **change})
    up(wanted_of(content))
    wanted = wanted_of(content, **change)
    cloud.calls.clear()
    up(wanted)
    order = [name for name in cloud.changes() if name.startswith(("Deregister", "UpdateEndpoint", "Register"))]
    assert order == ["DeregisterScalableTarget", "UpdateEndpoint", "RegisterScalableTarget"]
    assert len(cloud.scaling.targets) == 1
    assert scaled(cloud)["dangling"] == set()
    assert verbs(up(wanted)) == []


@pytest.mark.parametrize("more", [{}, ASYNC], ids=["plain", "async"])
def test_a_deregistered_variant_is_registered_again_if_its_update_fails(cloud: Cloud, more: dict[str, Any]) -> None:
    content = {**PLAIN, **more}
    permit(cloud, content, {**content, **OTHER_TYPE})
    wanted = wanted_of(content)
    up(wanted)
    where = next(one.request for one in wanted if one.kind.value == "scaling-policy")
    cloud.client("application-autoscaling").put_scaling_policy(**{**where, "PolicyName": NIGHTS})
    before = scaled(cloud)
    cloud.sagemaker.fate(NAME, "RolledBack", "no capacity")
    with pytest.raises(Failed, match="no capacity"):
        up(wanted_of(content, **OTHER_TYPE))
    assert scaled(cloud) == before
    assert verbs(up(wanted)) == []


def test_a_policy_and_a_target_of_others_outlive_a_change_of_the_type(cloud: Cloud) -> None:
    """A user's policy on our target, and the target of an endpoint whose file has no scaling."""
    permit(cloud, PLAIN, {**PLAIN, **OTHER_TYPE})
    wanted = wanted_of(PLAIN)
    up(wanted)
    scaling = cloud.client("application-autoscaling")
    where = next(one.request for one in wanted if one.kind.value == "scaling-policy")
    scaling.put_scaling_policy(**{**where, "PolicyName": NIGHTS})
    up(wanted_of(PLAIN, **OTHER_TYPE))
    assert [key[-1] for key in cloud.scaling.policies] == ["llama/concurrency", NIGHTS]
    for tags in cloud.scaling.tags.values():
        tags.clear()
    before = scaled(cloud)
    up(wanted_of(PLAIN, scaling=None))
    assert scaled(cloud) == before


def test_an_update_that_keeps_type_and_name_stays_registered(cloud: Cloud) -> None:
    up(wanted_of(PLAIN))
    cloud.calls.clear()
    up(wanted_of(PLAIN, options={"max_tokens": 2}))
    assert "DeregisterScalableTarget" not in cloud.changes()


def test_an_endpoint_that_fails_is_taken_away_with_all_that_was_made(cloud: Cloud) -> None:
    reason = "The primary container for production variant AllTraffic did not pass the ping health check."
    cloud.sagemaker.fate(NAME, "Failed", reason)
    with pytest.raises(Failed, match="ping health check") as raised:
        up(wanted_of(PLAIN))
    assert raised.value.advice
    assert cloud.everything() == {}


def test_what_failed_can_be_kept_and_is_replaced_by_the_next_run(cloud: Cloud) -> None:
    cloud.sagemaker.fate(NAME, "Failed", "no capacity")
    with pytest.raises(Failed) as raised:
        up(wanted_of(PLAIN), keep_failed=True)
    assert "lmi deploy down" in raised.value.advice
    assert cloud.sagemaker.things["endpoint", NAME].status == "Failed"
    plan = up(wanted_of(PLAIN))
    assert verbs(plan)[0] == ("delete", "endpoint")
    assert cloud.sagemaker.things["endpoint", NAME].status == "InService"
    assert len(cloud.everything()) == len(wanted_of(PLAIN))


def test_a_component_that_fails_goes_and_the_endpoint_stays(cloud: Cloud) -> None:
    cloud.sagemaker.fate("second", "Failed", "out of memory")
    with pytest.raises(Failed) as raised:
        up(wanted_of(COMPONENTS))
    assert "costs money" in raised.value.advice
    assert cloud.sagemaker.names("inference-component") == ["base", "french"]
    up(wanted_of(COMPONENTS))
    assert len(cloud.everything()) == len(wanted_of(COMPONENTS))


def test_parts_that_are_taken_out_of_the_specification_go(cloud: Cloud) -> None:
    up(wanted_of(COMPONENTS))
    up(wanted_of(COMPONENTS, components=[{"name": "second"}], alarms=None))
    assert cloud.sagemaker.names("inference-component") == ["second"]
    assert sorted(key[0] for key in cloud.scaling.targets) == ["inference-component/second"]
    left = [alarm["AlarmName"] for alarm in cloud.client("cloudwatch").describe_alarms()["MetricAlarms"]]
    assert left == ["llama/second/no-capacity"]


def test_a_changed_component_is_updated_where_it_is(cloud: Cloud) -> None:
    up(wanted_of(COMPONENTS))
    plan = up(wanted_of(COMPONENTS, options={"max_tokens": 2}))
    assert ("update", "inference-component") in verbs(plan)
    models = cloud.sagemaker.names("model")
    assert len(models) == 2
    used = cloud.sagemaker.things["inference-component", "base"].request["Specification"]["ModelName"]
    assert used in models
    assert used == cloud.sagemaker.things["inference-component", "second"].request["Specification"]["ModelName"]


def test_copies_that_scaling_chose_are_left_alone(cloud: Cloud) -> None:
    wanted = wanted_of(COMPONENTS)
    up(wanted)
    runtime = cloud.sagemaker.things["inference-component", "base"].request["RuntimeConfig"]
    runtime["DesiredCopyCount"] = 4
    assert verbs(up(wanted)) == []


def test_another_s_endpoint_is_refused_and_can_be_taken_over(cloud: Cloud) -> None:
    up(wanted_of(PLAIN))
    cloud.sagemaker.things["endpoint", NAME].tags.clear()
    cloud.calls.clear()
    with pytest.raises(Refused, match="endpoint/llama exists and was not created by this deployment"):
        up(wanted_of(PLAIN))
    with pytest.raises(Refused):
        down()
    assert cloud.changes() == []
    assert verbs(up(wanted_of(PLAIN), adopt=True)) == [("tag", "endpoint")]
    down()
    assert cloud.everything() == {}


@pytest.mark.parametrize(("gone_after", "why"), [
    ("", "model/{} exists and was not created by this deployment"),
    ("CreateModel", "model/{} existed, but was deleted meanwhile"),
    ("DescribeModel", "model/{} existed, but was deleted meanwhile"),
])  # fmt: skip
def test_what_another_makes_meanwhile_is_refused_and_what_then_goes_is_told(
    cloud: Cloud, gone_after: str, why: str
) -> None:
    """Somebody makes a model of the desired name just before the run does, and may delete it again."""
    wanted = wanted_of(PLAIN)
    model = next(item for item in wanted if item.kind is Kind.MODEL)
    theirs = ("model", model.name)

    def make(asked: Call) -> None:
        if asked.operation == "CreateModel":
            cloud.before = None
            cloud.sagemaker.create("model", model.name, {**model.request, "Tags": []}, "us-east-1")
            cloud.after = remove

    def remove(asked: Call) -> None:
        if asked.operation == gone_after:
            cloud.sagemaker.things.pop(theirs)

    cloud.before = make
    with pytest.raises(DeployError, match=why.format(model.name)):
        up(wanted)
    assert (theirs in cloud.sagemaker.things) is (gone_after == "")
    assert cloud.sagemaker.names("endpoint") == []
    cloud.before = cloud.after = None
    if gone_after:
        up(wanted)
        assert len(cloud.everything()) == len(wanted)


def test_tags_follow_the_specification(cloud: Cloud) -> None:
    up(wanted_of(PLAIN))
    plan = up(wanted_of(PLAIN, tags={"team": "nlp"}))
    assert {action.verb for action in plan.changing} == {Verb.TAG}
    assert cloud.sagemaker.things["endpoint", NAME].tags["team"] == "nlp"
    assert verbs(up(wanted_of(PLAIN, tags={"team": "nlp"}))) == []


def test_a_neighbour_whose_name_begins_alike_is_left_alone(cloud: Cloud) -> None:
    cloud.client("sagemaker").create_model(
        ModelName="llama-0000aaaa",
        ExecutionRoleArn="arn:aws:iam::123456789012:role/other",
        PrimaryContainer={"Image": "x"},
        Tags=[{"Key": "lmi:deployment", "Value": "llama-0000"}],
    )
    up(wanted_of(PLAIN))
    down()
    assert cloud.sagemaker.names("model") == ["llama-0000aaaa"]


def test_a_call_that_is_denied_takes_what_was_made_with_it(cloud: Cloud) -> None:
    cloud.refuse("CreateEndpoint", "AccessDeniedException", "not authorized to perform: sagemaker:CreateEndpoint")
    with pytest.raises(DeployError, match="CreateEndpoint") as raised:
        up(wanted_of(PLAIN))
    assert raised.value.status == 3
    assert cloud.everything() == {}


def test_conflicts_and_throttling_are_asked_again(cloud: Cloud, pauses: list[float]) -> None:
    cloud.refuse("PutScalingPolicy", "ConcurrentUpdateException", "another update is under way", times=2)
    cloud.refuse("CreateEndpointConfig", "ConflictException", "in use")
    up(wanted_of(PLAIN))
    assert pauses == [1.0, 1.0, 2.0]
    assert len(cloud.everything()) == len(wanted_of(PLAIN))


def test_a_name_that_another_run_just_took_is_found_to_be_ours(cloud: Cloud) -> None:
    """Two runs at once: the second one's creation says that it exists already."""
    wanted = wanted_of(PLAIN)
    run = Run()

    def other_run(call: Any) -> None:
        if call.operation == "CreateEndpoint":
            cloud.before = None
            up(wanted)

    cloud.before = other_run
    up(wanted, run=run)
    assert f"endpoint/{NAME}" not in run.created
    assert f"endpoint/{NAME}" in run.serving
    assert len(cloud.everything()) == len(wanted)


# -- what only looks like a deployment's own stays as it is ------------------------------------------------------------


COPIED = [{"Key": TAG_DEPLOYMENT, "Value": NAME}]
ROLE = "arn:aws:iam::123456789012:role/other"


@pytest.mark.parametrize("name", ["llama-2-0000aaaa", "llama-production", "llama", "llama2-0000aaaa"])
def test_a_tag_that_was_copied_by_hand_makes_nothing_ours(cloud: Cloud, name: str) -> None:
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(ModelName=name, ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"}, Tags=COPIED)
    variant = {"VariantName": "a", "ModelName": name, "InstanceType": "ml.g5.xlarge", "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant], Tags=COPIED)
    up(wanted_of(PLAIN), keep=1)
    up(wanted_of(PLAIN, options={"max_tokens": 2}), keep=1)
    down()
    assert set(cloud.everything()) == {f"model/{name}", f"endpoint-config/{name}"}


def test_an_alarm_of_another_name_stays_whatever_its_tag_says(cloud: Cloud) -> None:
    cloud.client("cloudwatch").put_metric_alarm(
        AlarmName="on-call", Namespace="AWS/SageMaker", MetricName="Invocation5XXErrors", Statistic="Sum", Period=60,
        Dimensions=[{"Name": "EndpointName", "Value": NAME}], EvaluationPeriods=1, Threshold=1.0,
        ComparisonOperator="GreaterThanThreshold", Tags=COPIED,
    )  # fmt: skip
    up(wanted_of(PLAIN))
    up(wanted_of(PLAIN))
    down()
    assert set(cloud.everything()) == {"alarm/on-call"}


def test_a_policy_that_was_put_on_our_target_by_hand_is_not_taken_away(cloud: Cloud) -> None:
    wanted = wanted_of(PLAIN)
    up(wanted)
    where = next(one.request for one in wanted if one.kind.value == "scaling-policy")
    cloud.client("application-autoscaling").put_scaling_policy(**{**where, "PolicyName": "nights"})
    assert up(wanted).changing == ()
    assert "nights" in [key[-1] for key in cloud.scaling.policies]
    down()
    assert cloud.everything() == {}


def test_another_s_component_that_goes_while_we_look_is_no_error(cloud: Cloud) -> None:
    """Targets and tags are two questions: what was listed may be gone at the second."""
    up(wanted_of(COMPONENTS))

    def gone(call: Call) -> None:
        if call.operation == "DescribeScalableTargets":
            cloud.after = None
            cloud.refuse("ListTagsForResource", "ResourceNotFoundException", "no such target")

    cloud.after = gone
    down()
    assert cloud.sagemaker.names("endpoint") == []


# -- what AWS is asked again for, what counts as missing, and fields that this boto3 does not have ---------------------


def test_every_kind_is_in_the_table_and_boto3_has_its_calls() -> None:
    assert set(CALLS) == set(Kind)
    aws = Aws("us-east-1")
    for calls in CALLS.values():
        model = aws.client(calls.service).meta.service_model
        operations = aws.client(calls.service).meta.method_to_api_mapping
        made = model.operation_model(operations[calls.create]).input_shape
        assert set(calls.identity) <= set(made.members)
        shown = model.operation_model(operations[calls.describe])
        if calls.list_field is None:
            assert {*calls.identity, calls.arn} <= set(shown.output_shape.members)
        else:
            assert calls.names_argument in shown.input_shape.members
            assert {*calls.identity, calls.arn} <= set(shown.output_shape.members[calls.list_field].member.members)
        assert calls.delete in operations
        assert calls.update is None or calls.update in operations


NOT_SEEN = {
    "a validation error": ("ValidationException", 'Could not find model "arn:aws:sagemaker:us-east-1:1:model/x".'),
    "a missing target": ("ObjectNotFoundException", "No scalable target registered for service namespace: sagemaker"),
    "a missing arn": ("ResourceNotFoundException", "no such resource"),
    "a new role": ("ValidationException", "Could not assume role arn:aws:iam::1:role/x. Please ensure that the role"),
}
MADE = {"one model": PLAIN, "components": COMPONENTS}


@pytest.mark.parametrize("content", MADE.values(), ids=MADE)
def test_what_aws_does_not_see_yet_is_asked_for_again_by_every_call(
    cloud: Cloud, pauses: list[float], content: dict[str, Any]
) -> None:
    wanted = wanted_of(content)
    up(wanted)
    operations = sorted({*cloud.changes()})
    assert len(operations) >= 5
    down()
    for operation in operations:
        for code, message in NOT_SEEN.values():
            cloud.refuse(operation, code, message, times=2)
            pauses.clear()
            up(wanted)
            assert pauses == [1.0, 2.0], (operation, code)
            assert len(cloud.everything()) == len(wanted)
            down()


def test_an_update_and_tags_wait_for_what_is_new_too(cloud: Cloud, pauses: list[float]) -> None:
    up(wanted_of(PLAIN))
    for operation, changes in (
        ("UpdateEndpoint", {"options": {"max_tokens": 1}}),
        ("AddTags", {"options": {"max_tokens": 1}, "tags": {"a": "b"}}),
    ):
        cloud.refuse(operation, *NOT_SEEN["a validation error"], times=2)
        pauses.clear()
        up(wanted_of(PLAIN, **changes))
        assert pauses == [1.0, 2.0], operation


def test_what_never_appears_ends_after_a_minute_and_leaves_nothing(cloud: Cloud, pauses: list[float]) -> None:
    cloud.refuse("CreateEndpoint", *NOT_SEEN["a validation error"], times=100)
    with pytest.raises(DeployError, match="Could not find model"):
        up(wanted_of(PLAIN))
    assert sum(pauses) == CONSISTENCY_SECONDS
    assert cloud.everything() == {}


class Blind:
    """A client of AWS that sees nothing of what a call names."""

    def __init__(self, message: str) -> None:
        self._error = {"Error": {"Code": "ValidationException", "Message": message}}

    def client(self, service: str) -> Any:
        return self

    def __getattr__(self, operation: str) -> Any:
        def fail(**request: Any) -> None:
            raise ClientError(self._error, operation)

        return fail


@pytest.mark.parametrize(
    ("operation", "message", "is_new", "waits"),
    [
        ("create_model", "Could not find model data at s3://a/b/.", False, False),
        ("create_model", "Requested image 1.dkr.ecr.us-east-1.amazonaws.com/a:b not found.", False, False),
        ("describe_model", "Could not find model x.", False, False),
        ("delete_model", "Could not find model x.", False, False),
        ("describe_model", "Could not find model x.", True, True),
        ("create_transform_job", "Could not find model x.", False, True),
    ],
)
def test_files_and_what_is_not_new_are_not_asked_for_again(
    pauses: list[float], operation: str, message: str, is_new: bool, waits: bool
) -> None:
    with pytest.raises(ClientError, match=re.escape(message)):
        call(cast(Aws, Blind(message)), "sagemaker", operation, {}, is_new=is_new)
    assert sum(pauses) == (CONSISTENCY_SECONDS if waits else 0)


@pytest.mark.parametrize("code", ["ThrottlingException", "ConflictException", "ConcurrentUpdateException"])
def test_it_is_asked_again_for_five_minutes(cloud: Cloud, pauses: list[float], code: str) -> None:
    cloud.refuse("ListModels", code, times=100)
    with pytest.raises(ClientError, match=code):
        call(Aws("us-east-1"), "sagemaker", "list_models", {})
    assert 240 < sum(pauses) < 360


def test_what_is_no_use_is_not_asked_again(cloud: Cloud, pauses: list[float]) -> None:
    cloud.refuse("ListModels", "AccessDeniedException", "no")
    with pytest.raises(ClientError):
        call(Aws("us-east-1"), "sagemaker", "list_models", {})
    assert pauses == []


def test_what_is_missing_is_none_of_every_kind(cloud: Cloud) -> None:
    aws = Aws("us-east-1")
    for kind, calls in CALLS.items():
        which = tuple({"ServiceNamespace": "sagemaker"}.get(name, f"endpoint/{name}") for name in calls.identity)
        if "ScalableDimension" in calls.identity:
            which = ("sagemaker", "sagemaker:variant:DesiredInstanceCount", *which[2:])
        if kind in (Kind.MODEL, Kind.ENDPOINT_CONFIG):
            which = (f"{NAME}-0123abcd",)
        if kind in (Kind.ENDPOINT, Kind.COMPONENT):
            which = ({Kind.ENDPOINT: NAME, Kind.COMPONENT: "base"}[kind],)
        if kind is Kind.ALARM:
            which = (f"{NAME}/nobody",)
        assert show(aws, kind, which) is None
        operation, request = removal(kind, which)
        if kind is not Kind.ALARM:  # CloudWatch deletes what is not there without a word
            with pytest.raises(ClientError) as raised:
                call(aws, calls.service, operation, request)
            assert is_missing(raised.value)


def test_a_field_that_boto3_does_not_know_is_said_before_the_call(cloud: Cloud) -> None:
    variant = {"VariantName": "v", "RoutingConfig": {"RoutingStrategy": "RANDOM", "FutureStrategy": {}}}
    request = {"EndpointConfigName": "c", "ProductionVariants": [variant], "Another": 1}
    with pytest.raises(
        DeployError, match=r"Another, ProductionVariants\[0\]\.RoutingConfig\.FutureStrategy$"
    ) as raised:
        call(Aws("us-east-1"), "sagemaker", "create_endpoint_config", request)
    assert "boto3" in raised.value.advice
    assert cloud.calls == []
