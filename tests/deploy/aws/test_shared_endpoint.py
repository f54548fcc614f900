"""Two deployments on one endpoint, each by somebody with its own printed policy: neither touches the other's."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.main import main as run
from tests.deploy.aws.test_permissions import prepared
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import PLAIN, Deployer

pytestmark = pytest.mark.usefixtures("only_aws")

FOUR = {"type": "ml.g6e.12xlarge"}
SCALING = {"min": 1, "max": 1, "concurrency": 8}


class Two:
    """The owner's file, the guest's, and what is done with them."""

    def __init__(self, cloud: Cloud, directory: Path) -> None:
        self.cloud, self._directory, self._main = cloud, directory, Deployer(cloud, run)
        whole = prepared(cloud, "us-east-1", {**PLAIN, "instance": FOUR, "scaling": SCALING})
        self.owner = {**whole, "name": "shared", "components": [{"name": "chat", "accelerators": 2}]}
        self.guest = {**whole, "name": "team-b", "endpoint": "shared"}
        self.guest["components"] = [
            {"name": "embed", "adapters": [{"name": "embed-fr", "artifact": "s3://models/fr.tar.gz"}]},
            {"name": "rank", "options": {"max_rolling_batch_size": 4}},
        ]

    def __call__(self, command: str, content: dict[str, Any], *more: str) -> int:
        path = self._directory / f"{content['name']}.yaml"
        path.write_text(yaml.safe_dump(content))
        return self._main([command, str(path), *(["--yes"] if command in ("up", "down") else []), *more])

    def names(self, kind: str) -> list[str]:
        return self.cloud.sagemaker.names(kind)

    def of(self, deployment: str) -> dict[str, Any]:
        """All that bears the tag of a deployment, as it is."""
        things = self.cloud.sagemaker.things.values()
        return {
            f"{one.kind}/{one.name}": copy.deepcopy(one.request)
            for one in things
            if one.tags.get("lmi:deployment") == deployment
        }

    def targets(self) -> list[str]:
        scaling = self.cloud.client("application-autoscaling")
        found = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
        return sorted(one["ResourceId"] for one in found)

    def alarms(self) -> list[str]:
        found = self.cloud.client("cloudwatch").describe_alarms()["MetricAlarms"]
        return sorted(one["AlarmName"] for one in found)


@pytest.fixture
def two(cloud: Cloud, tmp_path: Path) -> Two:
    return Two(cloud, tmp_path)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


def test_the_life_of_both(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    assert two("up", two.owner) == 0
    owner = two.of("shared")
    assert two("doctor", two.guest) == 0
    assert "endpoint: shared is InService" in said(capsys)
    assert two("plan", two.guest) == 0
    told = said(capsys)
    assert "The components' first copies on 1 x ml.g6e.12xlarge: 4 of 4 GPUs" in told
    assert "chat" in told, "the other deployment's component takes GPUs too"
    assert "create_endpoint " not in told
    assert two("up", two.guest) == 0
    assert "no instances of its own: the components run on the endpoint shared" in said(capsys)
    assert two.names("endpoint") == ["shared"]
    assert two.names("inference-component") == ["chat", "embed", "embed-fr", "rank"]
    assert two.of("shared") == owner
    assert two.targets() == [f"inference-component/{name}" for name in ("chat", "embed", "rank")]
    assert two("up", two.guest) == 0
    assert "nothing to do" in said(capsys)
    assert two("up", two.owner) == 0
    assert "nothing to do" in said(capsys)
    assert run(["status", "shared", "--region", "us-east-1"]) == 0
    told = said(capsys)
    assert "copies of shared-" in told
    assert "copies of team-b-" in told
    assert "2 GPUs each" in told

    guest = two.of("team-b@shared")
    changed = {**two.owner, "options": {"max_rolling_batch_size": 8}}
    assert two("up", changed) == 0
    assert "changes to the endpoint's instances also affect components of other deployments" in said(capsys)
    assert two.of("team-b@shared") == guest

    assert two("down", two.guest) == 0
    assert two.names("inference-component") == ["chat"]
    assert two.targets() == ["inference-component/chat"]
    assert all(name.startswith("shared/") for name in two.alarms())
    assert not two.of("team-b@shared")
    assert two("down", two.owner) == 0
    assert not two.cloud.sagemaker.things
    assert not two.targets()
    assert not two.alarms()


def test_down_of_the_owner_keeps_the_endpoint_for_the_guest(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    assert two("up", two.owner) == 0
    assert two("up", two.guest) == 0
    guest = two.of("team-b@shared")
    capsys.readouterr()
    assert two("down", two.owner) == 0
    told = said(capsys)
    assert "The endpoint is kept, as it runs components of other deployments: embed, embed-fr, rank" in told
    assert "shared is deleted, except for its endpoint." in told
    assert two.of("team-b@shared") == guest
    assert {one.partition("/")[0] for one in two.of("shared")} == {"endpoint", "endpoint-config"}
    assert two.targets() == ["inference-component/embed", "inference-component/rank"]
    assert [name for name in two.alarms() if name.startswith("shared/")] == ["shared/5xx", "shared/model-errors"]
    assert two("down", two.guest) == 0
    assert two("down", two.owner) == 0
    assert not two.cloud.sagemaker.things
    assert not two.alarms()


def test_down_by_name_needs_the_endpoint_too(two: Two) -> None:
    assert two("up", two.owner) == 0
    assert two("up", two.guest) == 0
    assert run(["down", "--name", "team-b", "--endpoint", "shared", "--region", "us-east-1", "--yes"]) == 0
    assert two.names("inference-component") == ["chat"]


@pytest.mark.parametrize("command", ["up", "update", "down"])
def test_an_interrupted_guest_is_told_how_it_is_deleted(
    two: Two, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Also from a terminal of another region: the printed command names what `down` needs without the file."""
    assert two("up", two.owner) == two("up", two.guest) == 0

    def interrupted(call: Call) -> None:
        two.cloud.before = None
        raise KeyboardInterrupt

    two.cloud.before = interrupted
    assert two(command, two.guest) == 130
    (printed,) = re.findall("`lmi deploy (down --[^`]*)`", said(capsys))
    assert printed == "down --name team-b --endpoint shared --region us-east-1"
    assert run([*printed.split(), "--yes"]) == 0
    assert two.of("team-b@shared") == {}


def test_a_deployment_with_the_guests_name_is_another(two: Two) -> None:
    """Its own endpoint, models and alarms begin with the same name: tags keep them apart."""
    assert two("up", two.owner) == 0
    assert two("up", two.guest) == 0
    guest = two.of("team-b@shared")
    namesake = {**two.owner, "name": "team-b", "components": [{"name": "mine"}]}
    assert two("up", namesake) == 0
    assert two.of("team-b@shared") == guest
    own = two.of("team-b")
    assert two("up", two.guest) == 0
    assert two.of("team-b") == own
    assert two("down", two.guest) == 0
    assert two.of("team-b") == own
    assert two("down", namesake) == 0
    assert two.names("inference-component") == ["chat"]


def test_a_name_that_the_other_has_is_refused(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    assert two("up", two.owner) == 0
    owner = two.of("shared")
    taken = {**two.guest, "components": [{"name": "chat"}]}
    assert two("up", taken) == 2
    assert "inference-component/chat exists and was not created by this deployment" in said(capsys)
    assert two.of("shared") == owner
    assert not two.of("team-b@shared")


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"endpoint": "nowhere"}, 4, "there is no endpoint nowhere for the components of team-b"),
        (
            {"instance": {"type": "ml.g6e.4xlarge"}, "components": [{"name": "embed"}]},
            2,
            "instance.type: ml.g6e.4xlarge, but the endpoint shared has ml.g6e.12xlarge",
        ),
        (
            {"components": [{"name": "embed", "accelerators": 1, "copies": 3}]},
            2,
            "need 5 GPUs, but 1 x ml.g6e.12xlarge with other deployments' components (chat) have 4",
        ),
    ],
)
def test_a_guest_that_has_no_place_is_refused_before_anything_is_made(
    two: Two, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], status: int, message: str
) -> None:
    assert two("up", two.owner) == 0
    assert two("up", {**two.guest, **changes}) == status
    assert message in said(capsys)
    assert not [one for one in two.cloud.sagemaker.things.values() if "team-b" in one.tags.get("lmi:deployment", "")]


def test_an_endpoint_with_a_model_of_its_own_takes_no_guests(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {name: value for name, value in two.owner.items() if name != "components"}
    assert two("up", alone) == 0
    assert two("up", two.guest) == 2
    assert "endpoint: shared has its own model, so components cannot be added" in said(capsys)
    assert two("up", two.owner) == 0
    assert two("up", two.guest) == 0
    assert two("up", alone) == 2
    assert "the endpoint would have its own model, but it runs components of other deployments" in said(capsys)


def test_a_failed_guest_leaves_nothing(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    assert two("up", two.owner) == 0
    owner = two.of("shared")
    two.cloud.sagemaker.fate("embed", "Failed", "The primary container did not pass the ping health check.")
    assert two("up", two.guest) == 5
    assert two.of("shared") == owner
    assert not two.of("team-b@shared"), "its models, also that of the component which was not reached, are gone"
    assert two("up", two.guest) == 0


def test_components_do_not_move_between_endpoints(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    assert two("up", two.owner) == 0
    assert two("up", two.guest) == 0
    other = {**two.owner, "name": "other", "components": [{"name": "elsewhere"}]}
    assert two("up", other) == 0
    for adopt in ([], ["--adopt"]):
        assert two("up", {**two.guest, "endpoint": "other"}, *adopt) == 2
    assert (
        "inference-component/embed is on the endpoint shared, but AWS cannot move components between endpoints"
        in said(capsys)
    )
