"""Waiting: what is said meanwhile, how it ends, and answers of AWS's that are late, old or missing."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError
from rich.console import Console

from deploy.cli.views import live_progress, progress_table
from deploy.deployer import wait
from deploy.deployer.calls import show
from deploy.deployer.wait import Progress, time_limit, wait_for
from deploy.errors import DeployError, Failed, NotThere
from deploy.resolve.decision import Decision
from deploy.resources.resource import Kind, Resource
from tests.deploy.aws.operations.test_operations import write
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import COMPONENTS, NAME, PLAIN, up, wanted_of
from tests.deploy.doubles.endpoints import Clock, aws, make_endpoint, settle

# -- waiting: what is said meanwhile, how it ends, and what a failure says ---------------------------------------------


def now() -> int:
    return int(time.time() * 1000)


CHAT = Resource(Kind.ENDPOINT, "chat", {"EndpointName": "chat", "EndpointConfigName": "chat-1"})
UPDATED = Resource(Kind.ENDPOINT, "chat", {"EndpointName": "chat", "EndpointConfigName": "chat-2"})


def test_an_endpoint_comes_up_phase_by_phase(cloud: Cloud) -> None:
    cloud.sagemaker.fate("chat", "InService", polls=8)
    make_endpoint(cloud)
    seen: list[Progress] = []

    def report(progress: Progress) -> None:
        seen.append(progress)
        if progress.elapsed == 300:
            write(cloud, ["INFO 2 of 4 shards"], at=now())

    assert wait_for(aws(), CHAT, report, every=60, clock=Clock())["EndpointStatus"] == "InService"
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert phases == ["finding an instance", "pulling the image", "loading the model", "serving"]
    assert [progress.elapsed for progress in seen] == [60.0 * n for n in range(9)]
    assert [progress.log for progress in seen if progress.log] == ["INFO 2 of 4 shards"] * 2
    assert not any(progress.hint for progress in seen)


def test_no_log_after_ten_minutes_hints_at_the_host(cloud: Cloud) -> None:
    cloud.sagemaker.fate("chat", "InService", polls=12)
    make_endpoint(cloud)
    seen: list[Progress] = []
    wait_for(aws(), CHAT, seen.append, every=60, clock=Clock())
    assert [bool(progress.hint) for progress in seen] == [False] * 10 + [True, True, False]
    assert "instance.ami" in seen[10].hint


def test_aws_that_wants_to_be_asked_less_ends_no_waiting(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.sagemaker.fate("chat", "InService", polls=2)
    make_endpoint(cloud)
    client, asked = aws().client("sagemaker"), 0
    describe = client.describe_endpoint

    def throttled(**request: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise ClientError(
                {"Error": {"Code": "ThrottlingException", "Message": "Rate exceeded"}}, "DescribeEndpoint"
            )
        return describe(**request)

    monkeypatch.setattr(client, "describe_endpoint", throttled)
    monkeypatch.setattr("deploy.deployer.calls.pause", lambda seconds: None)
    assert wait_for(aws(), CHAT, lambda progress: None, clock=Clock())["EndpointStatus"] == "InService"


def test_a_failure_says_the_reason_the_log_and_what_to_change(cloud: Cloud) -> None:
    cloud.sagemaker.fate("chat", "Failed", "The primary container did not pass the ping health check.")
    make_endpoint(cloud)
    write(cloud, ["INFO loading", "torch.OutOfMemoryError: CUDA out of memory."], at=now())
    with pytest.raises(Failed, match=r"^endpoint/chat: The primary container did not pass") as failed:
        wait_for(aws(), CHAT, lambda progress: None, clock=Clock())
    assert "model.context" in failed.value.advice
    assert failed.value.advice.endswith(
        "Last lines of the log:\n  INFO loading\n  torch.OutOfMemoryError: CUDA out of memory."
    )


def test_the_log_of_an_earlier_endpoint_explains_nothing(cloud: Cloud) -> None:
    cloud.sagemaker.fate("chat", "Failed", "Unable to provision requested ML compute capacity.")
    write(cloud, ["torch.OutOfMemoryError: CUDA out of memory."])
    make_endpoint(cloud)
    with pytest.raises(Failed) as failed:
        wait_for(aws(), CHAT, lambda progress: None, clock=Clock())
    assert "OutOfMemoryError" not in failed.value.advice
    assert "model.context" not in failed.value.advice


def test_it_is_given_up_at_the_limit(cloud: Cloud) -> None:
    cloud.sagemaker.fate("chat", "InService", polls=1000)
    make_endpoint(cloud)
    clock = Clock()
    with pytest.raises(Failed, match=r"Creating \(pulling the image\) after 17 min") as failed:
        wait_for(aws(), CHAT, lambda progress: None, limit=1000, every=300, clock=clock)
    assert clock.now == 1000
    assert "instance.ami" in failed.value.advice


def test_an_update_that_was_rolled_back_is_a_failure(cloud: Cloud) -> None:
    sagemaker = make_endpoint(cloud)
    settle(sagemaker)
    cloud.sagemaker.fate("chat", "RolledBack", "alarm chat-5xx")
    sagemaker.update_endpoint(EndpointName="chat", EndpointConfigName="chat-2")
    polls: list[Progress] = []
    with pytest.raises(Failed, match="rolled back to chat-1: alarm chat-5xx"):
        wait_for(aws(), UPDATED, polls.append, clock=Clock())
    assert [progress.phase for progress in polls] == ["replacing instances", "serving the previous version"]
    sagemaker.update_endpoint(EndpointName="chat", EndpointConfigName="chat-2")
    seen: list[Progress] = []
    wait_for(aws(), UPDATED, seen.append, clock=Clock())
    assert [progress.phase for progress in seen] == ["replacing instances", "serving"]


def test_a_component_is_waited_for(cloud: Cloud) -> None:
    make_endpoint(cloud, components=("chat-a",))
    component = Resource(Kind.COMPONENT, "chat-a", {})
    seen: list[Progress] = []
    assert wait_for(aws(), component, seen.append, clock=Clock())["InferenceComponentStatus"] == "InService"
    assert [progress.key for progress in seen] == ["inference-component/chat-a"]


def test_a_component_is_waited_for_until_all_copies_are_up(cloud: Cloud) -> None:
    make_endpoint(cloud, components=("chat-a",))
    request = cloud.sagemaker.get("inference-component", "chat-a").request
    request["RuntimeConfig"] = {"DesiredCopyCount": 3, "CurrentCopyCount": 1}
    seen: list[Progress] = []

    def report(progress: Progress) -> None:
        seen.append(progress)
        request["RuntimeConfig"]["CurrentCopyCount"] += 1

    wait_for(aws(), Resource(Kind.COMPONENT, "chat-a", {}), report, clock=Clock())
    assert [progress.phase for progress in seen] == [
        "1 of 3 copies are running",
        "2 of 3 copies are running",
        "serving",
    ]


def test_until_it_is_gone(cloud: Cloud) -> None:
    sagemaker = make_endpoint(cloud)
    settle(sagemaker)
    cloud.sagemaker.polls = 3
    sagemaker.delete_endpoint(EndpointName="chat")
    seen: list[Progress] = []
    wait_for(aws(), CHAT, seen.append, gone=True, clock=Clock())
    assert [progress.phase for progress in seen] == ["deleting"] * 3 + ["deleted"]
    with pytest.raises(NotThere, match="endpoint/chat does not exist"):
        wait_for(aws(), CHAT, seen.append, clock=Clock())


def test_deleted_while_it_is_waited_for(cloud: Cloud) -> None:
    sagemaker = make_endpoint(cloud)
    settle(sagemaker)
    sagemaker.delete_endpoint(EndpointName="chat")
    with pytest.raises(NotThere, match="does not exist anymore"):
        wait_for(aws(), CHAT, lambda progress: None, clock=Clock())


def test_the_limit_is_what_aws_itself_allows() -> None:
    decision = Decision("us-east-1", None, "i", "ml.g5.xlarge", 1, None, None, download=600, startup=900)
    assert time_limit(decision) == 3600 + 600 + 900 + 900
    assert time_limit(decision, batches=2, between=120) == 2 * (3600 + 600 + 900 + 120) + 900


def steps() -> list[Progress]:
    return [
        Progress("endpoint/chat", "Creating", "finding an instance", 0, 900),
        Progress("endpoint/chat", "Creating", "finding an instance", 15, 900),
        Progress("endpoint/chat", "Creating", "loading the model", 75, 900, "[INFO] shard 1"),
        Progress("endpoint/chat", "InService", "serving", 90, 900),
    ]


def test_without_a_terminal_only_changes_are_said() -> None:
    out = io.StringIO()
    with live_progress(Console(file=out)) as report:
        for progress in steps():
            report(progress)
    assert out.getvalue().splitlines() == [
        "  0:00 endpoint/chat: finding an instance (Creating)",
        "  1:15 endpoint/chat: loading the model (Creating)",
        "        [INFO] shard 1",
        "  1:30 endpoint/chat: serving (InService)",
    ]


def test_on_a_terminal_the_last_state_stays() -> None:
    out = io.StringIO()
    with live_progress(Console(file=out, force_terminal=True, width=80)) as report:
        for progress in steps():
            report(progress)
    assert "serving (InService)" in out.getvalue()
    plain = io.StringIO()
    Console(file=plain, width=80).print(progress_table(steps()[2:3]))
    assert "[INFO] shard 1" in plain.getvalue()


# -- AWS's answers late, old or missing: what serves, or is about to, is not taken down for that -----------------------


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


def test_a_rolled_back_component_update_is_a_failure_and_the_model_stays(cloud: Cloud) -> None:
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
