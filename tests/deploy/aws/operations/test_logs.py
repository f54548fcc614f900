"""What containers wrote, out of moto's CloudWatch."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from deploy.cli import main as cli
from deploy.errors import DeployError
from deploy.operations import logs
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.endpoints import aws

GROUP = "/aws/sagemaker/Endpoints/chat"


def write(
    cloud: Cloud, texts: list[str], *, group: str = GROUP, stream: str = "main/i-1", at: int | None = None
) -> int:
    """One event each, a millisecond apart; returns the first one's time."""
    client = cloud.client("logs")
    for make, name in ((client.create_log_group, {"logGroupName": group}),
                       (client.create_log_stream, {"logGroupName": group, "logStreamName": stream})):  # fmt: skip
        with contextlib.suppress(client.exceptions.ResourceAlreadyExistsException):
            make(**name)
    at = int(time.time() * 1000) - 60_000 if at is None else at
    events = [{"timestamp": at + n, "message": text} for n, text in enumerate(texts)]
    client.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
    return at


def test_the_tail_is_of_the_newest_stream(cloud: Cloud) -> None:
    now = int(time.time() * 1000)
    write(cloud, ["old"], stream="main/i-0", at=now - 600_000)
    write(cloud, ["one", "two\n", "three"], stream="main/i-1", at=now)
    assert [line.text for line in logs.tail(aws(), GROUP, 2) or []] == ["two", "three"]


def test_no_group_and_no_stream_are_no_log(cloud: Cloud) -> None:
    assert logs.tail(aws(), GROUP) is None
    cloud.client("logs").create_log_group(logGroupName=GROUP)
    assert logs.tail(aws(), GROUP) is None
    assert list(logs.lines(aws(), "/aws/sagemaker/Endpoints/none", since=0)) == []


def test_a_stretch_of_time_and_a_text(cloud: Cloud) -> None:
    at = write(cloud, ["INFO up", 'ERROR "quoted"', "INFO served"])
    assert [line.text for line in logs.lines(aws(), GROUP, since=at + 1)] == ['ERROR "quoted"', "INFO served"]
    assert [line.text for line in logs.lines(aws(), GROUP, since=0, pattern="INFO")] == ["INFO up", "INFO served"]


def test_following_gives_each_line_once_and_late_ones_too(cloud: Cloud) -> None:
    at = write(cloud, ["one", "one again"])
    late: Iterator[Callable[[], int]] = iter(
        [lambda: write(cloud, ["three"], at=at + 50), lambda: write(cloud, ["two"], stream="b", at=at + 20)]
    )
    coming = logs.follow(aws(), [GROUP], since=at, sleep=lambda seconds: next(late)())  # type: ignore[arg-type]
    assert [line.text for line in itertools.islice(coming, 4)] == ["one", "one again", "three", "two"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400)])
def test_periods(text: str, seconds: int) -> None:
    assert logs.period(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "15", "m", "-1m", "1w"])
def test_no_periods(text: str) -> None:
    with pytest.raises(DeployError, match="is not a period"):
        logs.period(text)


def test_the_command_shows_endpoint_and_components_in_order(cloud: Cloud, capsys: Any) -> None:
    at = write(cloud, ["INFO up", "ERROR down"])
    write(cloud, ["from a component"], group="/aws/sagemaker/InferenceComponents/chat-a", at=at - 1)
    assert cli.main(["logs", "chat", "--component", "chat-a"]) == 0
    assert capsys.readouterr().out.endswith("i-1 from a component\n")
    assert cli.main(["logs", "chat", "--filter", "ERROR"]) == 0
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["i-1 ERROR down"]
    assert cli.main(["logs", "chat", "--since", "10s"]) == 0
    assert capsys.readouterr().err == "nothing was written in the last 10s\n"
    assert cli.main(["logs", "chat", "--since", "soon"]) == 1


def test_no_log_group_is_said_by_its_name(cloud: Cloud, capsys: Any) -> None:
    assert cli.main(["logs", "nope"]) == 4
    assert "there is no log group /aws/sagemaker/Endpoints/nope in us-east-1" in capsys.readouterr().err
    cloud.refuse("DescribeLogGroups", "AccessDeniedException", "not allowed", times=1)
    assert cli.main(["logs", "nope"]) == 0
