"""A deployment's plan, what is rolled back, and what commands say before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ProfileNotFound,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from deploy.aws import as_deploy_error
from deploy.cli.up import first_request
from deploy.cli.views import summary
from deploy.deployer.apply import Run, leftovers, to_the_end
from deploy.deployer.calls import CALLS, identity, unreachable_reason
from deploy.deployer.live import Live, LiveResource
from deploy.deployer.plan import Action, Plan, Verb, plan, removal_of_all
from deploy.deployer.preparation import scaled_by_hand
from deploy.errors import NotAllowed, Refused
from deploy.resources.resource import TAG_DEPLOYMENT, Kind, Ref, Resource
from deploy.spec import Spec
from tests.deploy.doubles.deployments import COMPONENTS, NAME, PLAIN, wanted_of
from tests.one_test import in_one_test

# -- wanted resources held against what there is: pure, on values made by hand -----------------------------------------


def found(resource: Resource, **more: Any) -> LiveResource:
    """As if AWS had it, with defaults of its own."""
    calls = CALLS[resource.kind]
    said = {name: value for name, value in resource.request.items() if name != "Tags"}
    said |= {calls.arn: f"arn:{resource.key}", "CreationTime": 1, "EnableNetworkIsolation": False}
    if calls.status is not None:
        said[calls.status] = "InService"
    if resource.kind is Kind.COMPONENT:
        copies = resource.request.get("RuntimeConfig", {}).get("CopyCount", 1)
        said["RuntimeConfig"] = {"DesiredCopyCount": copies, "CurrentCopyCount": copies}
    tags: Any = resource.request.get("Tags", {TAG_DEPLOYMENT: NAME})
    tags = tags if isinstance(tags, dict) else {tag["Key"]: tag["Value"] for tag in tags}
    return LiveResource(resource.kind, {**said, **more}, tags)


def live(*resources: Resource) -> Live:
    known = {one.key: found(one).description for one in resources}
    things = []
    for one in resources:
        thing = found(one)
        if one.kind is Kind.ALARM and isinstance(one.request.get("AlarmActions", [None])[0], Ref):
            policy = one.request["AlarmActions"][0].key
            thing = replace(thing, description={**thing.description, "AlarmActions": [known[policy]["PolicyARN"]]})
        things.append(thing)
    return Live(NAME, tuple(things))


def verbs(made: Plan) -> dict[str, Verb]:
    return {action.key: action.verb for action in made.actions}


def changes(made: Plan, key: str) -> dict[str, tuple[Any, Any]]:
    action = next(one for one in made.actions if one.key == key)
    return {one.path: (one.before, one.after) for one in action.changes}


def test_where_nothing_is_everything_is_created_in_the_builders_order() -> None:
    wanted = wanted_of(COMPONENTS)
    made = plan(wanted, Live(NAME))
    assert [action.key for action in made.actions] == [one.key for one in wanted]
    assert {action.verb for action in made.actions} == {Verb.CREATE}
    assert [action.request for action in made.actions] == [one.request for one in wanted]


@pytest.mark.parametrize("content", [PLAIN, COMPONENTS], ids=["plain", "components"])
def test_what_aws_adds_is_no_difference(content: dict[str, Any]) -> None:
    wanted = wanted_of(content)
    made = plan(wanted, live(*wanted))
    assert set(verbs(made).values()) == {Verb.UNCHANGED}
    assert made.changing == ()


def test_a_changed_option_is_a_new_model_and_configuration_and_an_update() -> None:
    old, new = wanted_of(PLAIN, options={"max_tokens": 1}), wanted_of(PLAIN, options={"max_tokens": 2})
    made = plan(new, live(*old))
    model, config, *_, endpoint = new[:5]
    assert verbs(made)[model.key] is Verb.REPLACE
    assert changes(made, model.key)["PrimaryContainer.Environment.OPTION_MAX_TOKENS"] == ("1", "2")
    assert changes(made, config.key) == {"ProductionVariants[0].ModelName": (old[0].name, model.name)}
    update = next(action for action in made.actions if action.operation == "update_endpoint")
    assert changes(made, endpoint.key)["EndpointConfigName"] == (old[1].name, config.name)
    assert update.request == endpoint.update
    assert update.request is not None
    assert "DeploymentConfig" in update.request


def test_a_variable_that_is_gone_is_seen() -> None:
    old, new = wanted_of(PLAIN, options={"max_tokens": 1}), wanted_of(PLAIN)
    assert changes(plan(new, live(*old)), new[0].key)["PrimaryContainer.Environment.OPTION_MAX_TOKENS"] == ("1", None)


def test_an_alarm_that_is_no_longer_sent_is_changed() -> None:
    topic = "arn:aws:sns:us-east-1:123456789012:ops"
    old, new = wanted_of(PLAIN, alarms={"notify": topic}), wanted_of(PLAIN, alarms={})
    made = plan(new, live(*old))
    assert changes(made, "alarm/llama/5xx")["AlarmActions"] == ([topic], None)


def test_versions_beyond_those_to_be_kept_go_with_their_models_last() -> None:
    versions = [wanted_of(PLAIN, options={"max_tokens": number}) for number in range(1, 5)]
    there = live(*versions[2])
    for age, old in enumerate(versions[:2]):
        extra = tuple(found(one, CreationTime=age) for one in old[:2])
        there = replace(there, resources=(*there.resources, *extra))
    made = plan(versions[3], there, keep=3)
    gone = [action for action in made.actions if action.verb is Verb.DELETE]
    assert [action.key for action in gone] == [versions[0][1].key, versions[0][0].key]
    assert made.actions[-2:] == tuple(gone)
    only_new = plan(versions[3], there, keep=1)
    assert sum(action.verb is Verb.DELETE for action in only_new.actions) == 6


def test_the_version_that_serves_is_kept_before_newer_ones_that_never_did() -> None:
    served, killed, new = (wanted_of(PLAIN, options={"max_tokens": number}) for number in range(1, 4))
    there = live(*served)
    there = replace(there, resources=(*there.resources, *(found(one, CreationTime=9) for one in killed[:2])))
    gone = [action.key for action in plan(new, there, keep=2).actions if action.verb is Verb.DELETE]
    assert gone == [killed[1].key, killed[0].key]


def test_an_endpoint_of_several_versions_is_updated_and_all_versions_stay() -> None:
    versions = [wanted_of(PLAIN, options={"max_tokens": number}) for number in range(1, 4)]
    there = live(*versions[2])
    extra = tuple(found(one, CreationTime=0) for old in versions[:2] for one in old[:2])
    mixed = tuple(
        replace(one, description={**one.description, "EndpointStatus": "UpdateRollbackFailed"})
        if one.kind is Kind.ENDPOINT
        else one
        for one in there.resources
    )
    made = plan(versions[2], replace(there, resources=(*mixed, *extra)), keep=1)
    assert [(action.verb, action.operation) for action in made.changing] == [(Verb.UPDATE, "update_endpoint")]
    assert changes(made, f"endpoint/{NAME}") == {"EndpointStatus": ("UpdateRollbackFailed", "InService")}
    assert made.changing[0].request == next(one for one in versions[2] if one.kind is Kind.ENDPOINT).update


def test_another_s_things_are_refused_or_taken_over() -> None:
    wanted = wanted_of(PLAIN)
    there = live(*wanted)
    foreign = tuple(replace(one, tags={}) if one.kind is Kind.ALARM else one for one in there.resources)
    with pytest.raises(Refused, match="alarm/llama/5xx exists"):
        plan(wanted, replace(there, resources=foreign))
    made = plan(wanted, replace(there, resources=foreign), adopt=True)
    assert [action.verb for action in made.changing] == [Verb.TAG, Verb.TAG]


def test_a_failed_component_goes_first_with_its_adapters_and_scaling() -> None:
    wanted = wanted_of(COMPONENTS)
    there = live(*wanted)
    things = tuple(
        replace(one, description={**one.description, "InferenceComponentStatus": "Failed"})
        if one.name == "base"
        else one
        for one in there.resources
    )
    made = plan(wanted, replace(there, resources=things))
    gone = [action.key for action in made.actions if action.verb is Verb.DELETE]
    assert gone == [action.key for action in made.actions[: len(gone)]]
    assert gone[-2:] == ["inference-component/french", "inference-component/base"]
    again = [action.key for action in made.actions if action.verb is Verb.CREATE]
    assert set(again) == set(gone)


def test_everything_goes_in_the_order_of_use() -> None:
    wanted = wanted_of(COMPONENTS)
    made = removal_of_all(live(*wanted))
    kinds = [action.kind for action in made.actions]
    assert len(kinds) == len(wanted)
    assert kinds[-3:] == [Kind.ENDPOINT, Kind.ENDPOINT_CONFIG, Kind.MODEL]
    components = [action.key for action in made.actions if action.kind is Kind.COMPONENT]
    assert components[0] == "inference-component/french"
    assert max(kinds.index(Kind.SCALING_POLICY), kinds.index(Kind.SCALABLE_TARGET)) < kinds.index(Kind.COMPONENT)


def test_identities_are_the_same_in_requests_and_answers() -> None:
    for one in wanted_of(COMPONENTS):
        assert identity(one.kind, one.request) == found(one).which


# -- which of the things that a failed run made are to go --------------------------------------------------------------


def keys(resources: tuple[Resource, ...]) -> list[str]:
    return [one.key for one in resources]


def test_without_an_endpoint_everything_that_was_made_goes_last_made_first() -> None:
    wanted = wanted_of(PLAIN)
    made = keys(wanted[:4])
    assert keys(leftovers(wanted, made, (), wanted[4].key, serves=False)) == made[::-1]


def test_what_was_there_before_stays() -> None:
    wanted = wanted_of(PLAIN)
    assert keys(leftovers(wanted, [wanted[1].key], (), wanted[4].key, serves=False)) == [wanted[1].key]


def test_an_update_that_failed_takes_its_new_versions_with_it() -> None:
    model, config, alarm, _, endpoint, *_ = wanted = wanted_of(PLAIN)
    made = [model.key, config.key, alarm.key]
    assert keys(leftovers(wanted, made, (), endpoint.key, serves=True)) == [config.key, model.key]


def test_a_failed_component_goes_and_not_what_another_one_uses() -> None:
    wanted = wanted_of(COMPONENTS)
    made, finished = keys(wanted), ["endpoint/llama", "inference-component/base"]
    gone = keys(leftovers(wanted, made, finished, "inference-component/second", serves=True))
    assert gone == ["inference-component/second"]
    alone = keys(leftovers(wanted, made, finished[:1], "inference-component/base", serves=True))
    assert alone == ["inference-component/base", wanted[0].key]


def test_a_policy_that_was_refused_takes_nothing_with_it() -> None:
    wanted = wanted_of(PLAIN)
    failed = wanted[-1].key
    assert failed.startswith("scaling-policy/")
    assert leftovers(wanted, keys(wanted[:-1]), ["endpoint/llama"], failed, serves=True) == ()


# -- an endpoint that was scaled by hand: the plan says what an update would take back ---------------------------------


def warned(count: int, begun: int = 1, *, status: str = "InService", **changes: Any) -> tuple[str, ...]:
    """Of an endpoint that has so many instances, and had `begun` at first."""
    said = {
        "EndpointName": NAME,
        "EndpointConfigName": "c",
        "EndpointStatus": status,
        "ProductionVariants": [{"VariantName": "main", "DesiredInstanceCount": count}],
    }
    variant = {"VariantName": "main", "InitialInstanceCount": begun}
    config = {"EndpointConfigName": "c", "ProductionVariants": [variant]}
    spec = Spec.model_validate({**PLAIN, "scaling": None, **changes})
    return scaled_by_hand(
        spec, Live(NAME, (LiveResource(Kind.ENDPOINT, said, {}), LiveResource(Kind.ENDPOINT_CONFIG, config, {})))
    )


def test_both_numbers_and_what_keeps_them_are_said() -> None:
    (said,) = warned(5, instance={"count": 2, "type": "ml.g6e.2xlarge"})
    assert "is scaled to 5 instances, but an update would scale it to instance.count, which is 2" in said
    assert "set instance.count: 5, or scaling:" in said


@pytest.mark.parametrize(
    "how",
    [
        {"count": 2, "begun": 2},  # as the file says
        {"count": 1, "begun": 1},  # the file has changed since: the plan shows it
        {"count": 3, "scaling": PLAIN["scaling"]},  # an update keeps them
        {"count": 3, "status": "Failed"},
    ],
)
def test_nothing_is_said_where_nothing_is_taken_back(how: dict[str, Any]) -> None:
    assert warned(**how) == ()


# -- credentials that have expired, or are none: the same answer in every command --------------------------------------


@in_one_test(
    "error",
    [
        TokenRetrievalError(provider="sso", error_msg="expired"),
        SSOTokenLoadError(profile_name="p", error_msg="no token"),
        UnauthorizedSSOTokenError(),
        ProfileNotFound(profile="p"),
        ClientError({"Error": {"Code": "ExpiredToken", "Message": "expired"}}, "ListModels"),
        ClientError({"Error": {"Code": "ExpiredTokenException", "Message": "expired"}}, "ListModels"),
        ClientError({"Error": {"Code": "InvalidClientTokenId", "Message": "not valid"}}, "GetCallerIdentity"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_who_is_not_signed_in_is_to_sign_in_again(error: BotoCoreError | ClientError) -> None:
    ours = as_deploy_error(error)
    assert isinstance(ours, NotAllowed)
    assert "Sign in again" in ours.advice
    assert unreachable_reason(error) is not None


# -- the command that `up` ends with can be run as it stands -----------------------------------------------------------


BASE: dict[str, Any] = {
    "name": "chat",
    "role": "arn:aws:iam::123456789012:role/lmi",
    "image": {"uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi:1"},
    "model": {"id": "org/model"},
    "instance": {"type": "ml.g5.xlarge"},
}


@pytest.mark.parametrize(
    ("more", "command"),
    [
        ({}, "lmi deploy chat chat"),
        ({"async": {"output": "s3://answers/a"}}, "lmi deploy invoke chat --async 'Hello'"),
        ({"components": [{"name": "one"}]}, "lmi deploy chat chat"),
        ({"components": [{"name": "one"}, {"name": "two"}]}, "lmi deploy chat chat --component one"),
        ({"endpoint": "both", "components": [{"name": "rank"}]}, "lmi deploy chat both --component rank"),
    ],
)
def test_it_names_what_the_endpoint_asks_for(more: dict[str, Any], command: str) -> None:
    assert first_request(Spec.model_validate(BASE | more)) == command


@pytest.mark.parametrize(("count", "text"), [(0, ""), (1, ", 1 new version"), (2, ", 2 new versions")])
def test_the_summary_counts_new_versions(count: int, text: str) -> None:
    verbs = [Verb.CREATE, *[Verb.REPLACE] * count]
    actions = tuple(Action(verb, Kind.MODEL, ("", str(number))) for number, verb in enumerate(verbs))
    assert summary(Plan(NAME, actions)) == f"1 to create{text}."


@pytest.mark.parametrize(
    ("verb", "called", "line"),
    [
        (Verb.CREATE, True, "Current step: endpoint/llama. AWS finishes changes that it has started."),
        (Verb.CREATE, False, "Next step, not started: create endpoint/llama."),
        (Verb.UNCHANGED, False, ""),
    ],
)
def test_an_interruption_names_the_step_only_if_it_was_made(
    verb: Verb, called: bool, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(run: Run) -> int:
        run.current, run.called = Action(verb, Kind.ENDPOINT, ("llama",)), called
        raise KeyboardInterrupt

    assert to_the_end(work, "up", "down") == 130
    told = capsys.readouterr().err
    steps = [part for part in told.splitlines() if "step" in part]
    assert steps == ([line] if line else [])
