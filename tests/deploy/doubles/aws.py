"""AWS on loopback for tests: the emulator's, with a record of every call.

Tests take it as the fixture `cloud`; boto3 finds it by AWS_ENDPOINT_URL, in this process and in processes of it. Who
asks may do what their policies allow (`Cloud.policies`) and nothing else; only the tests' own clients may do anything.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import boto3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from moto.moto_api._internal import moto_api_backend
from multidict import CIMultiDict
from werkzeug.datastructures import EnvironHeaders
from werkzeug.test import EnvironBuilder, run_wsgi_app

from deploy.emulator import cloud, runtimes
from deploy.emulator.authorization import Permission
from deploy.emulator.cloud import Call
from deploy.emulator.endpoint import Limits
from deploy.emulator.sagemaker import ACCOUNT

__all__ = ["ACCOUNT", "Call", "Cloud"]

CALLER = "testing"
"""The access key of the commands under test."""


class Cloud(cloud.Cloud):
    """The server, what it holds, and what was asked of it.

    Attributes:
        sagemaker: its state: `fate(name, status, reason)` says how an endpoint or component ends.
        calls: every call since the reset, in order.
        policies: by access key, what its owner may do; of a role by its ARN. Who has none here may do nothing.
        asked: what calls needed, in order, with who made them.
        denied: what was not allowed, in order.
        before, after: called around each call with it; may raise nothing, but may kill who asks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusals: list[tuple[str, str, str]] = []
        self.calls: list[Call] = []
        self.policies: dict[str, Sequence[Mapping[str, Any]]] = {}
        self.asked: list[tuple[str, Permission]] = []
        self.denied: list[Permission] = []
        self.before: Callable[[Call], None] | None = None
        self.after: Callable[[Call], None] | None = None
        super().__init__()

    def policies_of(self, caller: str) -> Sequence[Mapping[str, Any]]:
        return self.policies.get(caller, ())

    def missing(self, caller: str, needs: Iterable[Permission]) -> Permission | None:
        def noted() -> Iterator[Permission]:
            for need in needs:
                self.asked.append((caller, need))
                yield need

        return super().missing(caller, noted())

    def on_denial(self, need: Permission) -> None:
        self.denied.append(need)

    def on_call(self, call: Call) -> None:
        self.calls.append(call)
        if self.before is not None:
            self.before(call)

    def on_response(self, call: Call) -> None:
        if self.after is not None:
            self.after(call)

    def invoked(self, call: Call, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Answer an asynchronous request at once; the emulator answers others."""
        _, _, endpoint, route = environ["PATH_INFO"].split("/", 3)
        assert route == "async-invocations"
        headers = CIMultiDict(EnvironHeaders(environ).items())
        accepted = runtimes.accept(self, endpoint, call.region, cloud.body_of(environ), headers, Limits())
        accepted.work(lambda body: json.dumps({"generated_text": json.loads(body)["inputs"]}).encode())
        return accepted.respond(start_response)

    def transform(self, line: bytes, content_type: str) -> bytes:
        """As the embedded server answers in a job; `<die>` is what no container survives."""
        if b"<die>" in line:
            raise ValueError("Bad HTTP status received from algorithm: 503")
        try:
            return json.dumps({"generated_text": json.loads(line)["inputs"]}).encode()
        except (ValueError, KeyError):
            return b'{"error": "refused", "code": 400}'

    def reset(self) -> None:
        """As new: nothing is there, nothing was asked. Only who may do what stays, and what was denied."""
        moto_api_backend.reset()
        self.sagemaker.polls = 1
        scaling = self.scaling
        for held in (self.sagemaker.things, self.sagemaker.fates, scaling.targets, scaling.policies, scaling.tags):
            held.clear()
        scaling.activities.clear()
        scaling.registered.clear()
        self.calls.clear()
        self.asked.clear()
        self.keys.clear()
        self._refusals.clear()
        self.before = self.after = None

    def refuse(
        self, operation: str, code: str = "ThrottlingException", message: str = "Rate exceeded", times: int = 1
    ) -> None:
        """Answer the next `times` calls of a JSON service's operation with an error, instead of doing them."""
        self._refusals += [(operation, code, message)] * times

    def changes(self) -> list[str]:
        """The operations that changed something, or were to, in order."""
        return [call.operation for call in self.calls if call.changes]

    def count(self, operation: str) -> int:
        return sum(call.operation == operation for call in self.calls)

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """In the place of botocore's HTTP session's: the answer without a socket, for tests of thousands of calls."""
        headers = [
            (name, value.decode() if isinstance(value, bytes) else value) for name, value in request.headers.items()
        ]
        builder = EnvironBuilder(path=request.url, method=request.method, headers=headers, data=request.body)
        body, status, answered = run_wsgi_app(self.app, builder.get_environ())
        return AWSResponse(request.url, int(status.split()[0]), dict(answered), _Raw(b"".join(body)))

    def client_of_caller(self, service: str) -> Any:
        """One with the permissions of the commands under test."""
        return boto3.session.Session(CALLER, CALLER, region_name="us-east-1").client(service, endpoint_url=self.url)

    def push(self, repository: str, tag: str, region: str = "us-east-1") -> str:
        """An image in ECR, made up; its digest."""
        ecr = self.client("ecr", region)
        with contextlib.suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        manifest = {"schemaVersion": 2, "config": {"digest": "sha256:0", "size": 1}, "layers": []}
        media = "application/vnd.docker.distribution.manifest.v2+json"
        made = ecr.put_image(
            repositoryName=repository,
            imageManifest=json.dumps({**manifest, "mediaType": media}),
            imageManifestMediaType=media,
            imageTag=tag,
        )
        return str(made["image"]["imageId"]["imageDigest"])

    def everything(self) -> dict[str, Any]:
        """What there is of a deployment's kinds, to be held against another state: names, content, states.

        Without what differs from run to run (times, random parts of ARNs).
        """
        alarms = self.client("cloudwatch").describe_alarms()["MetricAlarms"]
        return {
            **{
                f"{kind}/{name}": {"status": thing.status, "tags": thing.tags, **thing.request}
                for (kind, name), thing in sorted(self.sagemaker.things.items())
            },
            **{"/".join(key): _lasting(target) for key, target in sorted(self.scaling.targets.items())},
            **{"/".join(key): _lasting(policy) for key, policy in sorted(self.scaling.policies.items())},
            **{f"alarm/{alarm['AlarmName']}": _lasting(alarm) for alarm in alarms},
        }

    def refusal(self, call: Call) -> tuple[str, str] | None:
        with self._lock:
            for place, (operation, code, message) in enumerate(self._refusals):
                if operation == call.operation:
                    del self._refusals[place]
                    return code, message
        return None


def _lasting(value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: one
        for name, one in value.items()
        if not name.endswith(("ARN", "Arn", "Time", "Timestamp", "Actions")) and not name.startswith("State")
    }


class _Raw(io.BytesIO):
    """As urllib3's response is read."""

    def stream(self, **how: object) -> Iterator[bytes]:
        yield self.read()
