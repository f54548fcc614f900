"""Read container logs from CloudWatch: the last lines, the lines of a period, or new lines as they arrive.

The log group of an endpoint is /aws/sagemaker/Endpoints/NAME. The log group of a component is
/aws/sagemaker/InferenceComponents/NAME.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code, pages
from deploy.errors import DeployError

_MISSING = "ResourceNotFoundException"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        at: time in milliseconds since 1970.
        stream: name of the log stream, which belongs to one instance.
        text: the line without its newline.
    """

    at: int
    stream: str
    text: str


def endpoint_group(name: str) -> str:
    return f"/aws/sagemaker/Endpoints/{name}"


def component_group(name: str) -> str:
    return f"/aws/sagemaker/InferenceComponents/{name}"


def period(text: str) -> timedelta:
    """Parse a period such as `90s`, `15m`, `2h` or `1d`.

    Raises:
        DeployError: the text is not a number followed by s, m, h or d.
    """
    match = re.fullmatch(r"([0-9]+)([smhd])", text)
    if match is None:
        raise DeployError(f"{text!r} is not a period", "Use a number followed by s, m, h or d: 90s, 15m, 2h, 1d.")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def tail(aws: Aws, group: str, count: int = 20, prefix: str = "") -> list[LogLine] | None:
    """Return the last lines of a log group's newest stream, or None if there is no stream yet.

    Args:
        count: maximum number of lines.
        prefix: if not empty, only streams whose names start with this prefix are read.
    """
    logs = aws.client("logs")
    which = {"logStreamNamePrefix": prefix} if prefix else {"orderBy": "LastEventTime", "descending": True, "limit": 1}
    try:
        streams = logs.describe_log_streams(logGroupName=group, **which)["logStreams"]
        if not streams:
            return None
        stream = max(streams, key=lambda item: item.get("lastEventTimestamp", 0))["logStreamName"]
        response = logs.get_log_events(logGroupName=group, logStreamName=stream, limit=count, startFromHead=False)
    except ClientError as error:
        if error_code(error) == _MISSING:
            return None
        raise
    return [_line(event, stream) for event in response["events"]]


def exists(aws: Aws, group: str) -> bool:
    events = aws.client("logs").describe_log_groups(logGroupNamePrefix=group)["logGroups"]
    return any(item["logGroupName"] == group for item in events)


def lines(aws: Aws, group: str, *, since: int, pattern: str | None = None) -> Iterator[LogLine]:
    """Yield all lines of a log group since a time, oldest first. Yield nothing if the group does not exist.

    Args:
        since: time in milliseconds since 1970.
        pattern: text that lines must contain (case-sensitive), or None for all lines.
    """
    begin: dict[str, object] = {"logGroupName": group, "startTime": since}
    if pattern:
        begin["filterPattern"] = '"' + pattern.replace("\\", "\\\\").replace('"', '\\"') + '"'
    try:
        for event in pages(aws, "logs", "filter_log_events", "events", **begin):
            yield _line(event, event.get("logStreamName", ""))
    except ClientError as error:
        if error_code(error) != _MISSING:
            raise


def follow(
    aws: Aws,
    groups: Sequence[str],
    *,
    since: int,
    pattern: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine]:
    """Yield the lines of log groups since a time, and then new lines as they arrive, without end.

    CloudWatch may add lines out of order, so each poll reads the last `_LATE` milliseconds again and skips known lines.

    Args:
        since: time in milliseconds since 1970.
        pattern: text that lines must contain (case-sensitive), or None for all lines.
    """
    seen: dict[tuple[int, str, str], None] = {}
    newest = since
    while True:
        start = max(since, newest - _LATE)
        events = [line for group in groups for line in lines(aws, group, since=start, pattern=pattern)]
        for line in sorted(events, key=lambda line: line.at):
            key = (line.at, line.stream, line.text)
            if key not in seen:
                seen[key] = None
                newest = max(newest, line.at)
                yield line
        seen = {key: None for key in seen if key[0] >= newest - _LATE}
        sleep(_EVERY)


_LATE = 30_000  # milliseconds
_EVERY = 2.0  # seconds between two polls


def _line(event: dict[str, object], stream: str) -> LogLine:
    return LogLine(int(str(event["timestamp"])), stream, str(event["message"]).rstrip("\r\n"))
