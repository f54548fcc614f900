"""AWS on loopback: moto's server, with doubles of SageMaker and its autoscaling, and a record of every call.

Tests take it as the fixture `cloud`; boto3 finds it by AWS_ENDPOINT_URL, in this process and in processes of it.
"""

from __future__ import annotations

import io
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import moto.backends
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from moto.moto_api._internal import moto_api_backend
from moto.server import DomainDispatcherApplication, MotoRequestHandler, ThreadedMotoServer, create_backend_app
from werkzeug.serving import make_server
from werkzeug.test import EnvironBuilder, run_wsgi_app

from tests.deploy.doubles import autoscaling_calls, sagemaker_calls
from tests.deploy.doubles.sagemaker_double import ACCOUNT, SageMaker

__all__ = ["ACCOUNT", "Call", "Cloud"]

_READS = ("Describe", "List", "Get", "Head", "BatchGet", "Filter", "Simulate", "Test", "Lookup")


@dataclass(frozen=True)
class Call:
    """One call as it reached the server.

    Attributes:
        service: the name that it is signed for, e.g. `sagemaker`, `application-autoscaling`, `monitoring` (CloudWatch).
        operation: AWS's name, e.g. `CreateModel`; of S3 the method and the path.
        parameters: of services that speak JSON; {} of the others.
    """

    service: str
    operation: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        if self.service == "s3":
            return not self.operation.startswith(("GET", "HEAD"))
        return not self.operation.startswith(_READS)


class Cloud:
    """The server, what it holds, and what was asked of it.

    Attributes:
        url: what AWS_ENDPOINT_URL is set to.
        sagemaker: its state: `fate(name, status, reason)` says how an endpoint or component ends.
        scaling: scalable targets and policies.
        calls: every call since the reset, in order.
        before, after: called around each call with it; may raise nothing, but may kill who asks.
    """

    def __init__(self) -> None:
        self.sagemaker = SageMaker()
        self.scaling = autoscaling_calls.Scaling(self.sagemaker)
        self.sagemaker.on_endpoint_gone = self.scaling.endpoint_gone
        sagemaker_calls.install(self.sagemaker)
        autoscaling_calls.install(self.scaling)
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._refusals: list[tuple[str, str, str]] = []
        self.calls: list[Call] = []
        self.before: Callable[[Call], None] | None = None
        self.after: Callable[[Call], None] | None = None
        modules = tuple(moto.backends.list_of_moto_modules())  # which moto reads of the disk at every request
        moto.backends.list_of_moto_modules = lambda: modules
        self.app = _Recorder(DomainDispatcherApplication(create_backend_app), self)
        self._server = _Server(self)
        self._server.start()
        self.url = "http://{}:{}".format(*self._server.get_host_and_port())

    def stop(self) -> None:
        self._server.stop()

    def reset(self) -> None:
        """As new: nothing is there, nothing was asked."""
        moto_api_backend.reset()
        self.sagemaker.reset()
        self.scaling.reset()
        self.calls.clear()
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
        body, status, headers = run_wsgi_app(self.app, builder.get_environ())
        return AWSResponse(request.url, int(status.split()[0]), dict(headers), _Raw(b"".join(body)))

    def client(self, service: str) -> Any:
        """One of the test's own, kept: making one costs more than a call."""
        if service not in self._clients:
            session = boto3.session.Session("testing", "testing", region_name="us-east-1")
            self._clients[service] = session.client(service, endpoint_url=self.url)
        return self._clients[service]

    def push(self, repository: str, tag: str) -> str:
        """An image in ECR, made up; its digest."""
        ecr = self.client("ecr")
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


class _Server(ThreadedMotoServer):
    """Moto's, on a free port of loopback, with every call going past `Cloud`."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(ip_address="127.0.0.1", port=0, verbose=False)
        self._cloud = cloud

    def _server_entry(self) -> None:
        self._server = make_server(self._ip_address, self._port, self._cloud.app, True, request_handler=_Quiet)
        self._server_ready_event.set()
        self._server.serve_forever()


class _Quiet(MotoRequestHandler):
    """Requests are in `Cloud.calls`, not in the log."""

    def log_request(self, *args: object) -> None:
        pass


class _Recorder:
    """A WSGI application around moto's."""

    def __init__(self, app: Any, cloud: Cloud) -> None:
        self._app = app
        self._cloud = cloud

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        call = _call(environ)
        self._cloud.calls.append(call)
        if self._cloud.before is not None:
            self._cloud.before(call)
        refusal = self._cloud.refusal(call)
        if refusal is not None:
            body = json.dumps({"__type": refusal[0], "message": refusal[1]}).encode()
            start_response("400 Bad Request", [("Content-Type", "application/x-amz-json-1.1")])
            return [body]
        answer = list(self._app(environ, start_response))
        if self._cloud.after is not None:
            self._cloud.after(call)
        return answer


def _call(environ: dict[str, Any]) -> Call:
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split("/")
    service = scope[3] if len(scope) > 3 else ""
    path = environ["PATH_INFO"]
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return Call(service, target.rpartition(".")[2], json.loads(_body(environ) or b"{}"))
    if "/operation/" in path:  # Smithy RPC v2, whose bodies are CBOR
        return Call(service, path.rpartition("/")[2])
    if service in ("s3", ""):
        return Call(service, f"{environ['REQUEST_METHOD']} {path}")
    form = urllib.parse.parse_qs(_body(environ).decode("utf-8", "replace"))
    return Call(service, form.get("Action", [f"{environ['REQUEST_METHOD']} {path}"])[0])


def _body(environ: dict[str, Any]) -> bytes:
    content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(content)
    return bytes(content)
