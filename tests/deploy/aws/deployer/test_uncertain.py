"""AWS's answers late, old or missing: what serves, or is about to, is not taken down for that."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.deployer import wait
from deploy.deployer.calls import show
from deploy.errors import DeployError, Failed
from deploy.resources.resource import Kind, Resource
from tests.deploy.aws.deployer.test_wait import CHAT, UPDATED
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import COMPONENTS, NAME, PLAIN, up, wanted_of
from tests.deploy.doubles.endpoints import Clock, aws, make_endpoint, settle

CHANGED = {"options": {"max_tokens": 2}}


def first_answers(monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any] | None]) -> None:
    """What the first looks of a waiting see, before the truth."""
    monkeypatch.setattr(wait, "show", lambda aws, *which: answers.pop(0) if answers else show(aws, *which))


def test_a_new_endpoint_may_not_be_found_at_first(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    make_endpoint(cloud)
    first_answers(monkeypatch, [None, None])
    found = wait.wait_for(aws(), CHAT, lambda progress: None, consistency=60, clock=Clock())
    assert found["EndpointStatus"] == "InService"


def test_up_does_not_take_away_what_cannot_be_seen_yet(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = wanted_of(PLAIN)
    first_answers(monkeypatch, [None, None])
    up(wanted)
    assert len(cloud.everything()) == len(wanted)


def test_the_old_version_at_the_first_look_is_no_rollback(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    sagemaker = make_endpoint(cloud)
    settle(sagemaker)
    old = sagemaker.describe_endpoint(EndpointName="chat")
    sagemaker.update_endpoint(EndpointName="chat", EndpointConfigName="chat-2")
    first_answers(monkeypatch, [old, old])
    assert wait.wait_for(aws(), UPDATED, lambda progress: None, consistency=60, clock=Clock())[
        "EndpointConfigName"
    ] == ("chat-2")


def test_the_old_version_after_a_minute_is_one(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    sagemaker = make_endpoint(cloud)
    settle(sagemaker)
    clock = Clock()
    with pytest.raises(Failed, match="rolled back to chat-1"):
        wait.wait_for(aws(), UPDATED, lambda progress: None, consistency=60, clock=clock)
    assert clock.now == 60


def test_a_component_s_update_that_was_rolled_back_is_a_failure_and_its_model_stays(cloud: Cloud) -> None:
    up(wanted_of(COMPONENTS), keep=1)
    before = cloud.sagemaker.things["inference-component", "base"].request["Specification"]["ModelName"]
    cloud.sagemaker.fate("base", "RolledBack", "llama/base/5xx went off")
    with pytest.raises(Failed, match=f"rolled back to {before}"):
        up(wanted_of(COMPONENTS, **CHANGED), keep=1)
    assert cloud.sagemaker.things["inference-component", "base"].request["Specification"]["ModelName"] == before
    assert before in cloud.sagemaker.names("model")


@pytest.mark.parametrize("code", ["ThrottlingException", "InternalFailure", "ServiceUnavailable"])
def test_an_aws_that_is_busy_ends_no_waiting(cloud: Cloud, code: str) -> None:
    cloud.sagemaker.fate(NAME, "InService", polls=4)

    def busy(call: Call) -> None:
        if call.operation == "CreateEndpoint":
            cloud.refuse("DescribeEndpoint", code, "come again", times=12)

    cloud.after = busy
    up(wanted_of(PLAIN))
    assert len(cloud.everything()) == len(wanted_of(PLAIN))


def test_an_update_that_cannot_be_seen_any_more_keeps_what_it_goes_to(cloud: Cloud) -> None:
    """Credentials that end in the middle, or a right that is taken away."""
    up(wanted_of(PLAIN))
    before = set(cloud.everything())

    def denied(call: Call) -> None:
        if call.operation == "UpdateEndpoint":
            cloud.refuse("DescribeEndpoint", "AccessDeniedException", "not any more")

    cloud.after = denied
    with pytest.raises(DeployError, match="not any more") as raised:
        up(wanted_of(PLAIN, **CHANGED))
    assert "Run `lmi deploy up` again" in raised.value.advice
    assert len(set(cloud.everything()) - before) == 2
    cloud.after = None
    up(wanted_of(PLAIN, **CHANGED), keep=1)
    assert len(cloud.everything()) == len(before)


def test_an_update_that_takes_too_long_keeps_what_it_goes_to(cloud: Cloud) -> None:
    up(wanted_of(PLAIN))
    cloud.sagemaker.fate(NAME, "InService", polls=1000)
    with pytest.raises(Failed, match="Updating"):
        up(wanted_of(PLAIN, **CHANGED), limit=0.0)
    assert len(cloud.sagemaker.names("endpoint-config")) == 2
    assert len(cloud.sagemaker.names("model")) == 2


def test_a_refused_update_still_takes_its_new_version_with_it(cloud: Cloud) -> None:
    up(wanted_of(PLAIN))
    before = cloud.everything()
    cloud.refuse("UpdateEndpoint", "ResourceLimitExceeded", "quota")
    with pytest.raises(DeployError, match="quota"):
        up(wanted_of(PLAIN, **CHANGED))
    assert set(cloud.everything()) == set(before)


def test_what_is_not_there_after_a_minute_is_not_there(cloud: Cloud) -> None:
    clock = Clock()
    with pytest.raises(DeployError, match="does not exist"):
        wait.wait_for(aws(), Resource(Kind.ENDPOINT, "chat", {}), lambda progress: None, consistency=60, clock=clock)
    assert clock.now == 60
