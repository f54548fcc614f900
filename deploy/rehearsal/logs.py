"""The container's log in CloudWatch: in the log group of each endpoint and component, as SageMaker writes it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from deploy.operations.logs import component_group, endpoint_group
from deploy.rehearsal.sagemaker import Thing

if TYPE_CHECKING:
    from deploy.rehearsal.cloud import Call, Cloud

_LINES = 10_000  # to keep for endpoints that are created later
_READS = ("FilterLogEvents", "GetLogEvents", "DescribeLogStreams", "DescribeLogGroups", "StartQuery")
_INSTANCE = "i-0123456789abcdef0"
_AT_A_TIME = 500  # lines of one call


class ContainerLog:
    """One container's lines, copied into CloudWatch when somebody reads there."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_LINES)
        self._count = 0
        self._written: dict[str, int] = {}  # by ARN, how many

    def add(self, line: str) -> None:
        self._lines.append((self._count, {"timestamp": int(time.time() * 1000), "message": line}))
        self._count += 1

    def on_call(self, cloud: Cloud, call: Call) -> None:
        """Bring the log groups up to date before they are read."""
        if call.operation in _READS and call.service == "logs":
            for (kind, _), thing in list(cloud.sagemaker.things.items()):
                if kind in ("endpoint", "inference-component") and call.region == thing.arn.split(":")[3]:
                    self._copy(cloud, thing)

    def _copy(self, cloud: Cloud, thing: Thing) -> None:
        group = endpoint_group(thing.name) if thing.kind == "endpoint" else component_group(thing.name)
        stream, logs = f"AllTraffic/{_INSTANCE}", cloud.client("logs", thing.arn.split(":")[3])
        key = f"{thing.arn} {thing.created}"
        if key not in self._written:
            if not logs.describe_log_groups(logGroupNamePrefix=group)["logGroups"]:
                logs.create_log_group(logGroupName=group)
            if not logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=stream)["logStreams"]:
                logs.create_log_stream(logGroupName=group, logStreamName=stream)
        events = [event for number, event in list(self._lines) if number >= self._written.get(key, 0)]
        self._written[key] = self._count
        for first in range(0, len(events), _AT_A_TIME):
            part = events[first : first + _AT_A_TIME]
            logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=part)
