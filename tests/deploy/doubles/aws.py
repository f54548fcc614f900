"""AWS on loopback: moto's server, with doubles of SageMaker and its autoscaling, and a record of every call.

Tests take it as the fixture `cloud`; boto3 finds it by AWS_ENDPOINT_URL, in this process and in processes of it. Who
asks may do what their policies allow (`Cloud.policies`) and nothing else; only the tests' own clients may do anything.
"""

from __future__ import annotations

import io
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import boto3
import moto.backends
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.parsers import RpcV2CBORParser
from moto.iam.models import iam_backends
from moto.kms.models import kms_backends
from moto.moto_api._internal import moto_api_backend
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, MotoRequestHandler, ThreadedMotoServer, create_backend_app
from werkzeug.serving import make_server
from werkzeug.test import EnvironBuilder, run_wsgi_app

from tests.deploy.doubles import asynchronous, autoscaling_calls, sagemaker_calls, transform_jobs
from tests.deploy.doubles.authorization import Where, needs_of, needs_of_invocation, needs_of_s3
from tests.deploy.doubles.identity_policy import Need, allowed
from tests.deploy.doubles.sagemaker_double import ACCOUNT, SageMaker

__all__ = ["ACCOUNT", "Call", "Cloud"]

CALLER = "testing"
"""The access key of the commands under test."""

_OWNER = "owner"  # the tests' own, who may do everything
_READS = ("Describe", "List", "Get", "Head", "BatchGet", "Filter", "Simulate", "Test", "Lookup")


@dataclass(frozen=True)
class Call:
    """One call as it reached the server.

    Attributes:
        service: the name that it is signed for, e.g. `sagemaker`, `application-autoscaling`, `monitoring` (CloudWatch).
        operation: AWS's name, e.g. `CreateModel`; of S3 the method and the path.
        parameters: of all but S3.
        caller: the access key.
    """

    service: str
    operation: str
    parameters: dict[str, Any] = field(default_factory=dict)
    caller: str = ""
    region: str = ""

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
        policies: by access key, what its owner may do; of a role by its ARN. Who has none here may do nothing.
        trusted: access keys whose owners may do everything.
        denied: what was not allowed, in order.
        keys: ARN of the KMS key that encrypts a bucket, by the bucket's name.
        before, after: called around each call with it; may raise nothing, but may kill who asks.
    """

    def __init__(self) -> None:
        self.sagemaker = SageMaker()
        self.scaling = autoscaling_calls.Scaling(self.sagemaker)
        self.sagemaker.on_endpoint_gone = self.scaling.endpoint_gone
        sagemaker_calls.install(self.sagemaker)
        transform_jobs.install(self)
        autoscaling_calls.install(self.scaling)
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}
        self._refusals: list[tuple[str, str, str]] = []
        self.calls: list[Call] = []
        self.policies: dict[str, Sequence[Mapping[str, Any]]] = {}
        self.trusted = {_OWNER}
        self.denied: list[Need] = []
        self.keys: dict[str, str] = {}
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
        """As new: nothing is there, nothing was asked. Only who may do what stays, and what was denied."""
        moto_api_backend.reset()
        self.sagemaker.reset()
        self.scaling.reset()
        self.calls.clear()
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

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """One of the test's own, kept: making one costs more than a call."""
        if (service, region) not in self._clients:
            session = boto3.session.Session(_OWNER, _OWNER, region_name=region)
            self._clients[service, region] = session.client(service, endpoint_url=self.url)
        return self._clients[service, region]

    def client_of_caller(self, service: str) -> Any:
        """One with the permissions of the commands under test."""
        return boto3.session.Session(CALLER, CALLER, region_name="us-east-1").client(service, endpoint_url=self.url)

    def push(self, repository: str, tag: str, region: str = "us-east-1") -> str:
        """An image in ECR, made up; its digest."""
        ecr = self.client("ecr", region)
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

    def denial(self, call: Call, environ: dict[str, Any]) -> Need | None:
        """Return the first thing that the call needs and its caller may not do; remember it."""
        if call.caller in self.trusted:
            return None
        return self.missing(call.caller, self._needs(call, environ))

    def missing(self, caller: str, needs: Iterable[Need]) -> Need | None:
        """Return the first thing that somebody (an access key, a role's ARN) may not do; remember it."""
        for need in map(_with_aliases, needs):
            if not allowed(self.policies.get(caller, ()), need):
                self.denied.append(need)
                return need
        return None

    def hides(self, call: Call, environ: dict[str, Any]) -> bool:
        """Whether S3 says 403 for 404, as to somebody who may not list the bucket. HEAD and GET have no prefix."""
        bucket, key = _place(environ)
        if call.service != "s3" or not key or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return False
        listing = Need("s3:ListBucket", f"arn:{Where(call.region, ACCOUNT).partition}:s3:::{bucket}")
        return call.caller not in self.trusted and not allowed(self.policies.get(call.caller, ()), listing)

    def _needs(self, call: Call, environ: dict[str, Any]) -> Iterator[Need]:
        where = Where(call.region, ACCOUNT)
        if call.service == "s3":
            bucket, key = _place(environ)
            query = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
            encrypted = self.keys.get(bucket)
            return needs_of_s3(environ["REQUEST_METHOD"], bucket, key, query, _body(environ), where, encrypted)
        if _is_invocation(environ):
            return needs_of_invocation(environ["PATH_INFO"], None, where)
        values = call.parameters
        if call.service == "iam" and "RoleName" in values:  # a role's ARN has its path
            roles = iam_backends[ACCOUNT][where.partition].roles.values()
            arns = [role.arn for role in roles if role.name == values["RoleName"]]
            values = {**values, "RoleName": arns[0].partition(":role/")[2]} if arns else values
        if call.service == "kms":  # a key may be named by its id or alias
            values = {**values, "KeyId": _key_arn(values["KeyId"], where)}
        if call.operation in ("CreateEndpoint", "UpdateEndpoint"):
            values = {**values, "KmsKeyId": self._volume_key(values)}
        return (self._tagged(need) for need in needs_of(call.service, call.operation, values, where))

    def _volume_key(self, values: Mapping[str, Any]) -> str | None:
        config = self.sagemaker.things.get(("endpoint-config", values["EndpointConfigName"]))
        return None if config is None else config.request.get("KmsKeyId")

    def _tagged(self, need: Need) -> Need:
        """The need, with the tags of its resource as condition keys."""
        things = (thing for thing in self.sagemaker.things.values() if thing.arn.lower() == need.resource.lower())
        tags = next((thing.tags for thing in things), {})
        return replace(need, context={**need.context, **{f"aws:ResourceTag/{key}": tags[key] for key in tags}})

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
        if (need := self._cloud.denial(call, environ)) is not None:
            return _denied(environ, call, str(need), start_response)
        refusal = self._cloud.refusal(call)
        if refusal is not None:
            body = json.dumps({"__type": refusal[0], "message": refusal[1]}).encode()
            start_response("400 Bad Request", [("Content-Type", "application/x-amz-json-1.1")])
            return [body]
        if _is_invocation(environ):
            return self._invoked(call, environ, start_response)
        said: list[Any] = []
        answer = list(self._app(environ, lambda *head: said.append(head)))
        if self._cloud.after is not None:
            self._cloud.after(call)
        if said[0][0].startswith("404") and self._cloud.hides(call, environ):
            return _denied(environ, call, "", start_response)
        if call.service == "s3" and (region := _bucket_region(environ)) is not None:
            said[0][1].append(("x-amz-bucket-region", region))  # of every answer, as of AWS's
        start_response(*said[0])
        return answer

    def _invoked(self, call: Call, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        _, _, endpoint, route = environ["PATH_INFO"].split("/", 3)
        assert route == "async-invocations", "the emulator answers other requests"
        location = environ.get("HTTP_X_AMZN_SAGEMAKER_INPUTLOCATION")
        headers, body = asynchronous.submit(self._cloud, endpoint, call.region, _body(environ), location)
        start_response("202 Accepted", [("Content-Type", "application/json"), *headers.items()])
        return [body]


def _denied(environ: dict[str, Any], call: Call, need: str, start_response: Any) -> list[bytes]:
    """AWS's refusal in the protocol of the call."""
    text = f"User: arn:aws:iam::{ACCOUNT}:user/deployer is not authorized to perform: {need}"
    status, kind = "403 Forbidden", "text/xml"
    if call.service == "s3":
        body = "" if environ["REQUEST_METHOD"] == "HEAD" else "<Error><Code>AccessDenied</Code></Error>"
    elif "HTTP_X_AMZ_TARGET" in environ or _is_invocation(environ):
        status, kind = "400 Bad Request", "application/x-amz-json-1.1"
        body = json.dumps({"__type": "AccessDeniedException", "message": text})
    elif "/operation/" in environ["PATH_INFO"]:
        head = [("Content-Type", "application/cbor"), ("smithy-protocol", "rpc-v2-cbor")]
        start_response("400 Bad Request", head)
        return [b"\xa2" + b"".join(map(_cbor, ("__type", "AccessDeniedException", "message", text)))]
    elif call.service == "ec2":
        error = f"<Error><Code>UnauthorizedOperation</Code><Message>{text}</Message></Error>"
        body = f"<Response><Errors>{error}</Errors><RequestID>0</RequestID></Response>"
    else:
        error = f"<Error><Type>Sender</Type><Code>AccessDenied</Code><Message>{text}</Message></Error>"
        body = f"<ErrorResponse>{error}<RequestId>0</RequestId></ErrorResponse>"
    start_response(status, [("Content-Type", kind), ("x-amz-bucket-region", call.region)])
    return [body.encode()]


def _is_invocation(environ: dict[str, Any]) -> bool:
    return bool(environ["PATH_INFO"].startswith("/endpoints/"))


def _bucket_region(environ: dict[str, Any]) -> str | None:
    buckets = (backend.buckets.get(_place(environ)[0]) for backend in s3_backends[ACCOUNT].values())
    return next((str(bucket.region_name) for bucket in buckets if bucket is not None), None)


def _cbor(text: str) -> bytes:
    content = text.encode()
    return b"\x79" + len(content).to_bytes(2, "big") + content


def _key_arn(name: str, where: Where) -> str:
    """The ARN of a key that is named by ARN, id, alias, or the alias' ARN."""
    if ":key/" in name:
        return name
    found = kms_backends[ACCOUNT][where.region].any_id_to_key_id(name)
    return f"arn:{where.partition}:kms:{where.region}:{ACCOUNT}:key/{found}"


def _with_aliases(need: Need) -> Need:
    """The need, with the aliases of its key as a condition key."""
    if not need.action.startswith("kms:"):
        return need
    _, _, _, region, account, rest = need.resource.split(":", 5)
    key = kms_backends[account][region].keys.get(rest.removeprefix("key/"))
    return need if key is None else replace(need, context={**need.context, "kms:ResourceAliases": list(key.aliases)})


def _place(environ: dict[str, Any]) -> tuple[str, str]:
    """Bucket and key of a request to S3, whose host is no bucket's here."""
    bucket, _, key = environ["PATH_INFO"].lstrip("/").encode("latin-1").decode().partition("/")
    return bucket, key


def _call(environ: dict[str, Any]) -> Call:
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split("/")
    key, _, region, service = scope[:4] if len(scope) > 3 else ("", "", "", "")
    operation, parameters = _operation(environ, service)
    return Call(service, operation, parameters, key, region)


def _operation(environ: dict[str, Any], service: str) -> tuple[str, dict[str, Any]]:
    """The operation's name and parameters."""
    path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return target.rpartition(".")[2], json.loads(_body(environ) or b"{}")
    if "/operation/" in path:  # Smithy RPC v2, whose bodies are CBOR
        parser = RpcV2CBORParser()
        content = parser.parse_data_item(parser.get_peekable_stream_from_bytes(_body(environ)))
        return path.rpartition("/")[2], content
    if service in ("s3", ""):
        return f"{method} {path}", {}
    form = {
        name: values[0] for name, values in urllib.parse.parse_qs(_body(environ).decode("utf-8", "replace")).items()
    }
    return form.get("Action", f"{method} {path}"), form


def _body(environ: dict[str, Any]) -> bytes:
    content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(content)
    return bytes(content)
