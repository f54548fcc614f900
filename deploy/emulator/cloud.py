"""Emulated AWS on loopback: moto's server, plus SageMaker, its autoscaling, and the enforcement of IAM policies.

`lmi deploy local --aws` and the tests start it. AWS clients find it through AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from xml.sax.saxutils import escape

import boto3
import moto.backends
from botocore.parsers import RpcV2CBORParser
from moto.iam.models import iam_backends
from moto.kms.models import kms_backends
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from deploy.emulator import autoscaling, sagemaker, transform_jobs
from deploy.emulator.access import TOKEN_PREFIX, check_host
from deploy.emulator.authorization import (
    LINKED_ROLES,
    Permission,
    Unexplained,
    Where,
    allowed,
    needs_of,
    needs_of_invocation,
    needs_of_s3,
)
from deploy.emulator.patch import Replacements, patched
from deploy.emulator.protocol import ApiError
from deploy.emulator.sagemaker import ACCOUNT, SageMakerState
from deploy.service_model import Malformed, wrong_with
from handler.core.numbers import is_digits

log = logging.getLogger("deploy.emulator")

SERVER_KEY = "sagemaker"
"""Access key for the server's own calls, which have all permissions."""
_READS = ("Describe", "List", "Get", "Head", "BatchGet", "Filter", "Simulate", "Test", "Lookup")


@dataclass(frozen=True)
class Call:
    """One API call that the server received.

    Attributes:
        service: name of the service that the call is signed for, e.g. `sagemaker`, `application-autoscaling`, or
            `monitoring` for CloudWatch.
        operation: name of the operation, e.g. `CreateModel`; for S3, the HTTP method and the path.
        parameters: parameters of the operation; empty for S3.
        caller: the caller's access key.
        region: region that the call is signed for.
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
    """The emulated AWS: its server and its state.

    Attributes:
        url: the URL of the server, for AWS_ENDPOINT_URL.
        sagemaker: the state of SageMaker.
        scaling: the state of Application Auto Scaling.
        trusted: access keys that have all permissions.
        keys: the ARNs of the KMS keys that encrypt buckets, by bucket name.
        price_list: products that the Pricing API returns, as JSON strings. If empty, clients use the packaged prices.

    Args:
        port: port on loopback, or 0 for any free port.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int = 0) -> None:
        self.sagemaker = SageMakerState()
        self.scaling = autoscaling.AutoScaling(self.sagemaker)
        self.sagemaker.on_endpoint_gone = self.scaling.endpoint_gone
        self.sagemaker.scaled_of = self.scaling.variants_of
        self._clients: dict[tuple[str, str], Any] = {}
        self.trusted = {SERVER_KEY}
        self.keys: dict[str, str] = {}
        self.price_list: list[str] = []
        self.app = _Application(DomainDispatcherApplication(create_backend_app), self)
        self._running = contextlib.ExitStack()
        listener = self._running.enter_context(socket.create_server(("127.0.0.1", port)))
        self._running.enter_context(patched(self.replacements()))
        server = make_server("127.0.0.1", 0, self.app, True, request_handler=_Quiet, fd=listener.fileno())
        self._running.callback(server.server_close)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self._running.callback(thread.join)
        self._running.callback(server.shutdown)
        self.url = "http://{}:{}".format(*listener.getsockname())

    def stop(self) -> None:
        """Stop the server, and restore moto. Clouds in one process must be stopped in the reverse order of starting."""
        self._running.close()

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """Return a boto3 client with all permissions, cached because creating a client takes longer than a call."""
        if (service, region) not in self._clients:
            session = boto3.session.Session(SERVER_KEY, SERVER_KEY, region_name=region)
            self._clients[service, region] = session.client(service, endpoint_url=self.url)
        return self._clients[service, region]

    # Methods for subclasses to override

    def replacements(self) -> Replacements:
        """Return the parts of moto to replace while the server runs."""
        modules = tuple(moto.backends.list_of_moto_modules())  # moto would list its directory at every request
        return [
            *sagemaker.replacements(self.sagemaker),
            *transform_jobs.replacements(self),
            *autoscaling.replacements(self.scaling),
            (moto.backends, {"list_of_moto_modules": lambda: modules}),
        ]

    def policies_of(self, caller: str) -> Iterable[Mapping[str, Any]]:
        """Return the identity policies of a caller, which is an access key or a role ARN."""
        return ()

    def arn_of(self, caller: str) -> str | None:
        """Return the ARN of the owner of an access key, or None if the key is unknown."""
        return f"arn:aws:iam::{ACCOUNT}:user/{caller}"

    def on_denial(self, need: Permission) -> None:
        """Record a denied permission."""

    def on_call(self, call: Call) -> None:
        """Record a call before it is checked or executed."""

    def on_response(self, call: Call) -> None:
        """Record a call after moto has executed it."""

    def refusal(self, call: Call) -> tuple[str, str] | None:
        """Return the error code and message with which to reject a call, or None to execute the call."""
        return None

    def invoked(self, call: Call, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Respond to a request to SageMaker Runtime."""
        raise NotImplementedError

    # Permissions

    def transform(self, payload: bytes, content_type: str) -> bytes:
        """Return the container's response to a transform job's payload.

        Raises:
            ValueError: the container failed, or the cloud does not run transform jobs, which is the default.
        """
        raise ValueError("transform jobs do not run here")

    def denial(self, call: Call, environ: dict[str, Any]) -> Permission | None:
        """Return the first permission that the call needs but its caller does not have, or None.

        The denied permission is recorded with `on_denial`. A call whose permissions are not known is denied.
        """
        if call.caller in self.trusted:
            return None
        try:
            return self.missing(call.caller, self._needs(call, environ))
        except Unexplained as error:
            self.on_denial(need := Permission(f"{call.service}:{call.operation}", str(error)))
            return need

    def missing(self, caller: str, needs: Iterable[Permission]) -> Permission | None:
        """Return the first of `needs` that the caller's policies do not allow, or None.

        The denied permission is recorded with `on_denial`.

        Args:
            caller: an access key or a role ARN.
        """
        for need in map(_with_aliases, needs):
            if not allowed(self.policies_of(caller), need):
                self.on_denial(need)
                return need
        return None

    def hides(self, call: Call, environ: dict[str, Any]) -> bool:
        """Return whether S3 hides a missing object, by responding with 403 instead of 404.

        S3 does so if the caller is not allowed to list the bucket without a prefix.
        """
        bucket, key = _bucket_and_key(environ)
        if call.service != "s3" or not key or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return False
        listing = Permission("s3:ListBucket", f"arn:{Where(call.region, ACCOUNT).partition}:s3:::{bucket}")
        return call.caller not in self.trusted and not allowed(self.policies_of(call.caller), listing)

    def _needs(self, call: Call, environ: dict[str, Any]) -> Iterator[Permission]:
        """Return the permissions that a call needs, by its protocol: S3, SageMaker Runtime, or any other."""
        where = Where(call.region, ACCOUNT)
        if call.service == "s3":
            bucket, key = _bucket_and_key(environ)
            query = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
            encrypted = self.keys.get(bucket)
            return needs_of_s3(environ["REQUEST_METHOD"], bucket, key, query, body_of(environ), where, encrypted)
        if _is_invocation(environ):
            component = environ.get("HTTP_X_AMZN_SAGEMAKER_INFERENCE_COMPONENT")
            return needs_of_invocation(environ["PATH_INFO"], component, where, bearer=_is_bearer(environ))
        needs = needs_of(call.service, call.operation, {**call.parameters, **self._resource_names(call, where)}, where)
        return (self._tagged(need) for need in needs if not self._is_linked(need))

    def _is_linked(self, need: Permission) -> bool:
        """Return whether the need is to create a service-linked role that an earlier call has created."""
        roles = {LINKED_ROLES[dimension] for dimension in self.scaling.registered}
        return need.action == "iam:CreateServiceLinkedRole" and need.resource.rpartition("_")[2] in roles

    def _resource_names(self, call: Call, where: Where) -> dict[str, Any]:
        """Return what policies compare beside the call's parameters: a volume's key, a role's or key's full name."""
        parameters = call.parameters
        if call.operation in ("CreateEndpoint", "UpdateEndpoint"):
            return {"KmsKeyId": self._volume_key(parameters)}
        if call.service == "iam" and "RoleName" in parameters:  # a role's ARN contains its path
            roles = iam_backends[ACCOUNT][where.partition].roles.values()
            arn = next((role.arn for role in roles if role.name == parameters["RoleName"]), None)
            return {} if arn is None else {"RoleName": arn.partition(":role/")[2]}
        if call.service == "kms" and "KeyId" in parameters:
            return {"KeyId": _key_arn(parameters["KeyId"], where)}
        return {}

    def _volume_key(self, values: Mapping[str, Any]) -> str | None:
        config = self.sagemaker.things.get(("endpoint-config", values["EndpointConfigName"]))
        return None if config is None else config.request.get("KmsKeyId")

    def _tagged(self, need: Permission) -> Permission:
        """Return `need` with the tags of its resource as condition keys."""
        things = (thing for thing in self.sagemaker.things.values() if thing.arn.lower() == need.resource.lower())
        tags = next((thing.tags for thing in things), {})
        return replace(need, context={**need.context, **{f"aws:ResourceTag/{key}": tags[key] for key in tags}})


class _Quiet(MotoRequestHandler):
    """A request handler for moto's server that writes no access log."""

    def log_request(self, *args: object) -> None:
        pass


class _Application:
    """A WSGI application that checks each call, and passes calls that are not emulated here to moto."""

    def __init__(self, app: Any, cloud: Cloud) -> None:
        self._app = app
        self._cloud = cloud

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        start = _with_request_id(start_response)
        origin, site = environ.get("HTTP_ORIGIN"), environ.get("HTTP_SEC_FETCH_SITE")
        try:  # any web page could sign requests, as the access keys are public
            check_host(environ.get("HTTP_HOST", ""), origin, "127.0.0.1", site)
            call = _call(environ)
        except ApiError as error:
            return refuse(error.code, str(error), start, "403 Forbidden")
        except Malformed as error:
            return refuse("SerializationException", str(error), start)
        try:
            return self._respond(environ, call, start)
        except Exception:  # moto does not validate requests thoroughly
            log.exception("%s %s failed", call.service, call.operation)
            text = "The request is malformed, or the emulator has a bug."
            return _error(environ, call, "500 Internal Server Error", "InternalFailure", text, start)

    def _respond(self, environ: dict[str, Any], call: Call, start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"].lstrip("/").startswith("moto-api"):  # moto's own API can write files
            return refuse("UnknownOperationException", "The emulator supports AWS's operations only.", start)
        if not call.caller and _in_json_or_cbor(environ) and not _is_invocation(environ):
            code, text = "MissingAuthenticationTokenException", "Missing Authentication Token"
            return _error(environ, call, "400 Bad Request", code, text, start)
        self._cloud.on_call(call)
        if call.caller and call.caller not in self._cloud.trusted and self._cloud.arn_of(call.caller) is None:
            return self._denied(environ, call, "", start)
        if (violation := _violation(call)) is not None:
            return _error(environ, call, "400 Bad Request", *violation, start)
        if (need := self._cloud.denial(call, environ)) is not None:
            return self._denied(environ, call, str(need), start)
        if (refusal := self._cloud.refusal(call)) is not None:
            return refuse(*refusal, start)
        if call.service == "pricing":  # moto does not support it
            body = json.dumps({"FormatVersion": "aws_v1", "PriceList": self._cloud.price_list}).encode()
            start("200 OK", [("Content-Type", "application/x-amz-json-1.1")])
            return [body]
        if _is_invocation(environ):
            return self._cloud.invoked(call, environ, start)
        response: list[Any] = []
        try:
            body_parts = list(self._app(environ, lambda *head: response.append(head)))
        except NotImplementedError:
            text = f"{call.operation} is not emulated, as moto does not support it."
            return _error(environ, call, "400 Bad Request", "UnknownOperationException", text, start)
        self._cloud.on_response(call)
        if response[0][0].startswith("404") and self._cloud.hides(call, environ):
            return self._denied(environ, call, "", start)
        if call.service == "s3" and (region := _bucket_region(environ)) is not None:
            response[0][1].append(("x-amz-bucket-region", region))  # AWS adds this header to every response
        start(*response[0])
        return body_parts

    def _denied(self, environ: dict[str, Any], call: Call, need: str, start_response: Any) -> list[bytes]:
        """Reject a call with AWS's error for a missing permission, or for an unknown access key."""
        arn = self._cloud.arn_of(call.caller)
        text = f"User: {arn} is not authorized to perform: {need}" if arn else _INVALID_KEY
        codes = {"s3": ("AccessDenied", "InvalidAccessKeyId"), "ec2": ("UnauthorizedOperation", "AuthFailure")}
        status = "400 Bad Request" if _in_json_or_cbor(environ) else "403 Forbidden"
        default_codes = _DENIED_IN_JSON if _in_json_or_cbor(environ) else _DENIED_IN_XML
        return _error(
            environ, call, status, codes.get(call.service, default_codes)[0 if arn else 1], text, start_response
        )


_INVALID_KEY = "The security token included in the request is invalid."
_DENIED_IN_JSON = "AccessDeniedException", "UnrecognizedClientException"
_DENIED_IN_XML = "AccessDenied", "InvalidClientTokenId"
"""AWS's error codes for a missing permission and for an unknown access key."""


_INVALID = {"ecr": "InvalidParameterException", "logs": "InvalidParameterException", "monitoring": "ValidationError"}
"""Error codes of services that do not use ValidationException."""


def _violation(call: Call) -> tuple[str, str] | None:
    """Return AWS's error code and message for a request that violates the API model, or None if it is valid.

    S3 and services with form-encoded requests, whose parameters are strings that moto checks, are not checked here.
    """
    if call.service in ("", "s3", "ec2", "iam", "sts"):
        return None
    try:
        text = wrong_with(call.service, call.operation, call.parameters)
    except Malformed as error:
        return "SerializationException", str(error)
    return (_INVALID.get(call.service, "ValidationException"), text) if text else None


def _in_json_or_cbor(environ: dict[str, Any]) -> bool:
    return "HTTP_X_AMZ_TARGET" in environ or _is_invocation(environ) or "/operation/" in environ["PATH_INFO"]


def _error(environ: dict[str, Any], call: Call, status: str, code: str, text: str, start_response: Any) -> list[bytes]:
    """Respond with an error in the protocol of the call."""
    number, kind = str(uuid.uuid4()), "text/xml"
    head = [("x-amzn-RequestId", number), ("x-amz-bucket-region", call.region)]
    if call.service == "s3":
        xml = f"<Error><Code>{code}</Code><Message>{escape(text)}</Message></Error>"
        body = "" if environ["REQUEST_METHOD"] == "HEAD" else xml
    elif "/operation/" in environ["PATH_INFO"]:
        start_response(status, [*head, ("Content-Type", "application/cbor"), ("smithy-protocol", "rpc-v2-cbor")])
        return [b"\xa2" + b"".join(map(_cbor, ("__type", code, "message", text)))]
    elif _in_json_or_cbor(environ):
        kind, body = "application/x-amz-json-1.1", json.dumps({"__type": code, "message": text})
    else:
        error = f"<Code>{code}</Code><Message>{escape(text)}</Message>"
        if call.service == "ec2":
            body = f"<Response><Errors><Error>{error}</Error></Errors><RequestID>{number}</RequestID></Response>"
        else:
            error = f"<Error><Type>Sender</Type>{error}</Error>"
            body = f"<ErrorResponse>{error}<RequestId>{number}</RequestId></ErrorResponse>"
    start_response(status, [*head, ("Content-Type", kind)])
    return [body.encode()]


def _with_request_id(start_response: Any) -> Any:
    """Return a `start_response` that adds a request ID, which all of AWS's responses have."""

    def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
        if all(name.lower() != "x-amzn-requestid" for name, _ in headers):
            headers = [*headers, ("x-amzn-RequestId", str(uuid.uuid4()))]
        return start_response(status, headers, *more)

    return start


def refuse(code: str, message: str, start_response: Any, status: str = "400 Bad Request") -> list[bytes]:
    """Respond to a call to a JSON service with a client error."""
    start_response(status, [("Content-Type", "application/x-amz-json-1.1"), ("x-amzn-ErrorType", code)])
    return [json.dumps({"__type": code, "message": message}).encode()]


def _is_invocation(environ: dict[str, Any]) -> bool:
    return bool(environ["PATH_INFO"].startswith("/endpoints/"))


def _bucket_region(environ: dict[str, Any]) -> str | None:
    buckets = (backend.buckets.get(_bucket_and_key(environ)[0]) for backend in s3_backends[ACCOUNT].values())
    return next((str(bucket.region_name) for bucket in buckets if bucket is not None), None)


def _cbor(text: str) -> bytes:
    content = text.encode()
    return b"\x79" + len(content).to_bytes(2, "big") + content


def _key_arn(name: str, where: Where) -> str:
    """Return the ARN of the KMS key with this ARN, ID, alias or alias ARN."""
    if ":key/" in name:
        return name
    key_id = kms_backends[ACCOUNT][where.region].any_id_to_key_id(name)
    return f"arn:{where.partition}:kms:{where.region}:{ACCOUNT}:key/{key_id}"


def _with_aliases(need: Permission) -> Permission:
    """Return `need` with the aliases of its KMS key as a condition key."""
    if not need.action.startswith("kms:"):
        return need
    _, _, _, region, account, key_resource = need.resource.split(":", 5)
    key = kms_backends[account][region].keys.get(key_resource.removeprefix("key/"))
    return need if key is None else replace(need, context={**need.context, "kms:ResourceAliases": list(key.aliases)})


def _bucket_and_key(environ: dict[str, Any]) -> tuple[str, str]:
    """Return the bucket and the key of a path-style request to S3."""
    bucket, _, key = environ["PATH_INFO"].lstrip("/").encode("latin-1").decode().partition("/")
    return bucket, key


def _call(environ: dict[str, Any]) -> Call:
    scope = _credential(environ).split("/")
    key, _, region, service = scope[:4] if len(scope) > 3 else ("", "", "", "")
    operation, parameters = _operation(environ, service)
    return Call(service, operation, parameters, key, region)


def _credential(environ: dict[str, Any]) -> str:
    """Return the credential scope from the Authorization header, the presigned URL, or the bearer token."""
    header = environ.get("HTTP_AUTHORIZATION", "")
    query = environ.get("QUERY_STRING", "")
    if _is_bearer(environ):
        token = header.partition(" ")[2].removeprefix(TOKEN_PREFIX)
        with contextlib.suppress(ValueError):  # the endpoint's emulator will reject the token
            query = base64.b64decode(token).decode().partition("?")[2]
    signed = urllib.parse.parse_qs(query).get("X-Amz-Credential", [""])[0]
    return str(header.partition("Credential=")[2] or signed)


def _is_bearer(environ: dict[str, Any]) -> bool:
    return bool(environ.get("HTTP_AUTHORIZATION", "").startswith("Bearer "))


def _operation(environ: dict[str, Any], service: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a request's operation.

    Raises:
        Malformed: the request body cannot be decoded.
    """
    path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        try:
            values = json.loads(body_of(environ) or b"{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise Malformed("The body is not a JSON object.")
        return target.rpartition(".")[2], values
    if "/operation/" in path:  # Smithy RPC v2 with CBOR bodies
        parser = RpcV2CBORParser()
        try:
            content = parser.parse_data_item(parser.get_peekable_stream_from_bytes(body_of(environ)))
        except Exception:  # the parser has no specific exceptions
            content = None
        if not isinstance(content, dict):
            raise Malformed("The body is not a CBOR object.")
        return path.rpartition("/")[2], content
    if service in ("s3", ""):
        return f"{method} {path}", {}
    form = {
        name: values[0] for name, values in urllib.parse.parse_qs(body_of(environ).decode("utf-8", "replace")).items()
    }
    return form.get("Action", f"{method} {path}"), form


def body_of(environ: dict[str, Any]) -> bytes:
    """Return the body of a request in such a way that later code can read it again."""
    length = environ.get("CONTENT_LENGTH")
    content = b""
    if length and is_digits(length):
        content = environ["wsgi.input"].read(int(length))
    elif "wsgi.input_terminated" in environ:  # the body is chunked, and its reader knows its end
        content = environ["wsgi.input"].read()
    environ["wsgi.input"] = io.BytesIO(content)
    return content
