"""IAM policies with the least privileges that a specification needs.

There are policies for the execution role (used by SageMaker and the container), the deployer (who runs `lmi deploy`),
the invoker (who sends requests) and the checker (who checks with `simulation.py` whether the other policies are in
force).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from deploy.iam.arns import Arns, Condition, Scope
from deploy.resolve.decision import Decision
from deploy.resources.resource import TAG_DEPLOYMENT
from deploy.spec import Spec
from deploy.spec.options import locations

Statement = dict[str, Any]
Policy = dict[str, Any]


class Row(NamedTuple):
    """Actions, and the resources for which they are needed.

    Attributes:
        sid: statement ID. Rows with the same ID and the same condition are merged into one statement.
        actions: actions after the service prefix, such as "sagemaker:CreateModel DeleteModel".
        on: function that returns the resources, or [] if the actions are not needed.
    """

    sid: str
    actions: str
    on: Callable[[Arns], Sequence[str] | Sequence[Scope]]

    @property
    def names(self) -> list[str]:
        """Return the actions, each with the service prefix."""
        service, _, names = self.actions.partition(":")
        return [f"{service}:{name}" for name in names.split()]


def statements(rows: Iterable[Row], arns: Arns) -> list[Statement]:
    """Return statements with unique IDs that allow the actions of all rows."""
    by_sid: dict[str, list[Statement]] = {}
    for row in rows:
        for resources, condition in _scopes(row.on(arns)):
            same = by_sid.setdefault(row.sid, [])
            statement = next((statement for statement in same if statement.get("Condition") == condition), None)
            if statement is None:
                same.append(statement := allow(f"{row.sid}{len(same) or ''}", [], [], condition))
            _add(statement["Action"], row.names)
            _add(statement["Resource"], resources)
    return [statement for same in by_sid.values() for statement in same]


def _add(values: list[str], others: Iterable[str]) -> None:
    """Append the values that are not in a list yet."""
    values += [value for value in others if value not in values]


def _scopes(resources: Sequence[str] | Sequence[Scope]) -> list[Scope]:
    """Return the scopes that contain resources. Resources without a condition are merged into one scope."""
    plain = Scope([item for item in resources if isinstance(item, str)])
    return [scope for scope in (plain, *resources) if isinstance(scope, Scope) and scope.resources]


def allow(sid: str, actions: Sequence[str], resources: Sequence[str], condition: Condition | None = None) -> Statement:
    """Return a statement that allows actions on resources."""
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement


def policy(statement_list: list[Statement]) -> Policy:
    """Return a policy that consists of the statements."""
    return {"Version": "2012-10-17", "Statement": statement_list}


# -- the permissions that each party needs -----------------------------------------------------------------------------
# The tests in `tests/deploy/aws/` run the commands with the printed policies, so they fail if an action is missing.
# `tests/deploy/unit/test_iam_policies.py` fails if no call needs an action. The tests know the needs of a call from
# AWS's service authorization reference (`deploy/emulator/authorization.py`), not from this table.

_PULL = "BatchCheckLayerAvailability BatchGetImage GetDownloadUrlForLayer"
_LOG = "logs:CreateLogGroup CreateLogStream DescribeLogStreams PutLogEvents"
_AUTOSCALING = "sagemaker.application-autoscaling.amazonaws.com"


def _any(arns: Arns) -> list[str]:
    """Return `*`, for actions that do not support resources, or for resources whose names are unknown."""
    return ["*"]


_VOLUME_KEY = Row(  # only SageMaker may create a grant on it; the caller of CreateEndpoint needs it, too
    "VolumeKey", "kms:CreateGrant",
    lambda a: a.key(a.encryption.volume_key, {"Bool": {"kms:GrantIsForAWSResource": "true"}}),
)  # fmt: skip


def _written(sid: str) -> tuple[Row, Row]:
    """Return the rows for objects that SageMaker writes. S3 must decrypt a multipart upload's parts to join them."""
    return (
        Row(sid, "s3:PutObject", lambda a: a.objects([item.uri for item in a.written if item.sid == sid])),
        Row(
            f"{sid}Key", "kms:Decrypt Encrypt GenerateDataKey",
            lambda a: [scope for item in a.written if item.sid == sid for scope in a.key(item.key)],
        ),
    )  # fmt: skip


TABLE: Mapping[str, tuple[Row, ...]] = {
    "execution-role": (
        Row("Metrics", "cloudwatch:PutMetricData", _any),
        Row("Logs", _LOG, Arns.logs),
        Row("ImageLogin", "ecr:GetAuthorizationToken", _any),
        Row("Image", f"ecr:{_PULL}", Arns.repositories),
        # Model data and adapters
        Row("ModelData", "s3:GetObject", lambda a: a.objects(a.artifacts)),
        Row("ModelDataListed", "s3:ListBucket", lambda a: a.listed(a.artifacts)),
        Row("ModelKey", "kms:Decrypt", lambda a: a.key_via("s3", a.encryption.model_key)),
        # Asynchronous inference. For requests that are stored elsewhere, the role needs s3:GetObject there, too.
        Row("Answers", "s3:PutObject", lambda a: a.objects(a.responses)),
        Row("Requests", "s3:GetObject", lambda a: a.objects(a.requests)),
        Row("Notices", "sns:Publish", lambda a: a.spec.asynchronous.topics if a.spec.asynchronous else []),
        Row("NoticesKey", "kms:Decrypt GenerateDataKey", lambda a: a.key_via("sns", a.encryption.topic_key)),
        # Capture and fields of `sagemaker:`
        *_written("Capture"),
        *_written("CoreDumps"),
        *_written("ShadowCoreDumps"),
        Row("FurtherData", "s3:GetObject", lambda a: a.objects(a.read)),
        Row("FurtherDataListed", "s3:ListBucket", lambda a: a.listed(a.read)),
        Row("Shell", "ssmmessages:CreateControlChannel CreateDataChannel OpenControlChannel OpenDataChannel",
            Arns.shells),
        Row("RegistryLogin", "lambda:InvokeFunction", Arns.registry_logins),
        # Batch transform. Its responses are encrypted with the key for asynchronous responses.
        Row("BatchInput", "s3:GetObject", lambda a: a.objects(a.batch_input)),
        Row("BatchInputListed", "s3:ListBucket", lambda a: a.listed(a.batch_input)),
        Row("BatchAnswers", "s3:PutObject", lambda a: a.objects(a.batch_output)),
        Row("BatchInputKey", "kms:Decrypt", lambda a: a.key_via("s3", a.encryption.input_key)),
        Row("BatchLogs", _LOG, Arns.batch_logs),
        # From the developer guide's execution role for a VPC
        Row("Network", "ec2:CreateNetworkInterface CreateNetworkInterfacePermission DeleteNetworkInterface"
            " DeleteNetworkInterfacePermission DescribeDhcpOptions DescribeNetworkInterfaces DescribeSecurityGroups"
            " DescribeSubnets DescribeVpcs", Arns.network),
        _VOLUME_KEY,
        Row("VolumeKeyShown", "kms:DescribeKey", lambda a: a.key(a.encryption.volume_key)),
        Row("Rollback", "cloudwatch:DescribeAlarms", lambda a: a.alarms() if a.spec.alarms is not None else []),
        Row("HubToken", "secretsmanager:GetSecretValue", Arns.secrets),
        Row("HubTokenKey", "kms:Decrypt", lambda a: a.key_via("secretsmanager", a.encryption.secret_key)),
        Row("AnswersKey", "kms:Decrypt GenerateDataKey", lambda a: a.key(a.encryption.output_key)),
    ),
    "deployer": (
        Row("SageMaker", "sagemaker:CreateModel DeleteModel DescribeModel", Arns.models),
        Row("SageMaker", "sagemaker:CreateEndpointConfig DeleteEndpointConfig DescribeEndpointConfig", Arns.configs),
        Row("SageMaker", "sagemaker:CreateEndpoint DeleteEndpoint DescribeEndpoint", Arns.deployment_endpoint),
        Row("SageMaker", "sagemaker:CreateInferenceComponent DeleteInferenceComponent DescribeInferenceComponent",
            Arns.components),
        Row("SageMaker", "sagemaker:UpdateEndpoint UpdateEndpointWeightsAndCapacities", Arns.deployment_endpoint),
        Row("SageMaker", "sagemaker:UpdateInferenceComponent UpdateInferenceComponentRuntimeConfig", Arns.components),
        Row("SageMaker", "sagemaker:AddTags ListTags",
            lambda a: [*a.models(), *a.configs(), *a.deployment_endpoint(), *a.components()]),
        # Another deployment's endpoint is read, and components are created on it.
        Row("SharedEndpoint", "sagemaker:CreateInferenceComponent DescribeEndpoint DescribeEndpointConfig ListTags",
            Arns.shared_endpoint),
        # The endpoint may have components that the specification does not name, or no longer names.
        Row("OtherComponents", "sagemaker:DescribeInferenceComponent ListTags",
            lambda a: a.every("inference-component")),
        Row("FormerComponents", "sagemaker:DeleteInferenceComponent", lambda a: [Scope(
            a.every("inference-component"), {"StringEquals": {f"aws:ResourceTag/{TAG_DEPLOYMENT}": a.spec.deployment}}
        )]),
        Row("Role", "iam:PassRole",
            lambda a: [Scope([a.spec.role], {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}})]),
        Row("RoleChecked", "iam:GetRole SimulatePrincipalPolicy", lambda a: [a.spec.role]),
        Row("SecretChecked", "secretsmanager:DescribeSecret", Arns.secrets),
        _VOLUME_KEY,
        Row("General", "sagemaker:ListModels ListEndpointConfigs ListInferenceComponents", _any),
        # Not restricted to the scaling that the specification has, as an update removes scaling that it no longer has.
        Row("General", "application-autoscaling:DescribeScalableTargets DescribeScalingActivities"
            " DescribeScalingPolicies ListTagsForResource DeleteScalingPolicy DeregisterScalableTarget"
            " PutScalingPolicy RegisterScalableTarget TagResource", _any),
        Row("General", "cloudwatch:DescribeAlarms GetMetricData", _any),
        Row("General", "logs:DescribeLogGroups", _any),  # IAM does not support prefixes of log groups here
        Row("General", "servicequotas:ListServiceQuotas", _any),
        Row("General", "pricing:GetProducts", _any),
        Row("General", "ec2:DescribeSecurityGroups DescribeSubnets", Arns.network),
        Row("General", "ecr:GetAuthorizationToken", lambda a: ["*"] if a.account_repositories() else []),
        Row("ScalingRoleOnce", "iam:CreateServiceLinkedRole", lambda a: [Scope(
            a.scaling_role(_AUTOSCALING), {"StringLike": {"iam:AWSServiceName": _AUTOSCALING}}
        )]),
        Row("Alarms", "cloudwatch:DeleteAlarms ListTagsForResource PutMetricAlarm TagResource",
            lambda a: [*a.alarms(), *a.tracking_alarms()]),
        Row("Logs", "logs:DeleteLogGroup DescribeLogStreams FilterLogEvents GetLogEvents", Arns.logs),
        # Reading the images, and `docker push` to the account's repositories
        Row("Image", "ecr:DescribeImages BatchCheckLayerAvailability BatchGetImage CompleteLayerUpload"
            " GetDownloadUrlForLayer GetRepositoryPolicy InitiateLayerUpload PutImage UploadLayerPart",
            Arns.account_repositories),
        Row("Image", f"ecr:DescribeImages {_PULL}",
            lambda a: [] if a.account_repositories() else a.repositories()),
        Row("ImageRead", f"ecr:DescribeImages {_PULL}", lambda a: [
            item for item in a.repositories() if a.account_repositories() and item not in a.account_repositories()
        ]),
        # The models' files
        Row("ModelData", "s3:GetObject AbortMultipartUpload DeleteObject ListMultipartUploadParts PutObject",
            lambda a: a.objects(a.uploads)),
        Row("ModelData", "s3:GetObject", lambda a: [] if a.uploads else a.objects(a.data)),
        Row("ModelDataRead", "s3:GetObject",
            lambda a: a.objects([uri for uri in a.data if a.uploads and uri not in a.uploads])),
        Row("ModelDataListed", "s3:ListBucket", lambda a: a.listed(a.data)),
        Row("ModelKey", "kms:Decrypt", lambda a: a.key_via("s3", a.encryption.model_key if a.data else None)),
        Row("ModelKey", "kms:GenerateDataKey",
            lambda a: a.key_via("s3", a.encryption.model_key if a.uploads else None)),
        Row("Uploads", "s3:ListBucketMultipartUploads", lambda a: a.buckets(a.uploads)),
        Row("OtherModels", "sagemaker:DescribeModel", lambda a: a.every("model") if a.uploads else []),
        # Checks of the keys with which buckets and topics are encrypted
        Row("EncryptionChecked", "s3:GetEncryptionConfiguration", lambda a: a.buckets(a.checked)),
        Row("TopicsChecked", "sns:GetTopicAttributes", lambda a: a.spec.topics),
        Row("KeysChecked", "kms:DescribeKey", Arns.keys),
        # Checks of the region of buckets and of a reservation
        Row("PlacesChecked", "s3:ListBucket", lambda a: a.listed([*locations(a.spec)])),
        Row("ReservationChecked", "sagemaker:DescribeTrainingPlan",
            lambda a: [a.spec.reservation] if a.spec.reservation else []),
        # Batch transform
        Row("BatchJobs", "sagemaker:AddTags CreateTransformJob DescribeTransformJob ListTags StopTransformJob",
            Arns.transform_jobs),
        Row("BatchJobsListed", "sagemaker:ListTransformJobs", lambda a: ["*"] if a.spec.batch else []),
        Row("BatchModels", "sagemaker:AddTags CreateModel DeleteModel DescribeModel ListTags", Arns.batch_models),
        Row("BatchInput", "s3:GetObject", lambda a: a.objects(a.batch_input)),
        Row("BatchFilesListed", "s3:ListBucket", lambda a: a.listed([*a.batch_input, *a.batch_output])),
        Row("BatchInputKey", "kms:Decrypt", lambda a: a.key_via("s3", a.encryption.input_key)),
        Row("BatchLogs", "logs:DescribeLogStreams GetLogEvents", Arns.batch_logs),
    ),
    "invoker": (
        # Streaming is an action of its own, although the API's description says that InvokeEndpoint allows it.
        Row("Invoke", "sagemaker:InvokeEndpoint InvokeEndpointWithResponseStream",
            lambda a: [] if a.spec.asynchronous else [*a.endpoint(), *a.components()]),
        # This operation cannot name a component.
        Row("InvokeBothWays", "sagemaker:InvokeEndpointWithBidirectionalStream",
            lambda a: [] if a.spec.asynchronous or a.spec.components else a.endpoint()),
        # The client looks up the endpoint's only component.
        Row("ComponentsListed", "sagemaker:ListInferenceComponents", lambda a: ["*"] if a.spec.components else []),
        Row("ComponentsShown", "sagemaker:DescribeInferenceComponent", Arns.components),
        Row("OpenAiRoute", "sagemaker:CallWithBearerToken", lambda a: [] if a.spec.asynchronous else ["*"]),
        # Asynchronous inference: the client writes requests to S3, and reads responses from there.
        Row("Invoke", "sagemaker:InvokeEndpointAsync", lambda a: a.endpoint() if a.spec.asynchronous else []),
        Row("Answers", "s3:GetObject", lambda a: a.objects(a.responses)),
        # Without ListBucket, S3 reports a missing object as forbidden.
        Row("AnswersListed", "s3:ListBucket", lambda a: a.listed(a.responses)),
        Row("Requests", "s3:PutObject", lambda a: a.objects(a.requests)),
        # Requests are stored next to the responses, in a bucket that may encrypt both with the same key.
        Row("AnswersKey", "kms:Decrypt GenerateDataKey",
            lambda a: a.key(a.encryption.output_key) if a.spec.asynchronous else []),
    ),
    "checker": (
        # `iam --check` may check any role or user, whose names the specification does not have.
        Row("Checked", "iam:GetRole", lambda a: a.principals("role")),
        Row("Checked", "iam:SimulatePrincipalPolicy", lambda a: a.principals("role", "user")),
    ),
}  # fmt: skip

ADOPTING = (  # names of configurations and models are known only from the endpoint
    # The end of a shadow updates the endpoint to its owner's configuration.
    Row("AdoptedConfig", "sagemaker:DescribeEndpointConfig UpdateEndpoint", lambda a: a.every("endpoint-config")),
    Row("AdoptedModel", "sagemaker:DescribeModel", lambda a: a.every("model")),
    # Target tracking of the owner is registered again after a change of the instance type.
    Row("AdoptedScaling", "cloudwatch:PutMetricAlarm", Arns.adopted_alarms),
)
"""Additional permissions that the deployer needs to take over another owner's endpoint or to add a shadow to it."""


def policies(spec: Spec, decision: Decision, *, adopt: bool = False) -> dict[str, Policy]:
    """Return the policies of all parties by name, and the role's trust policy for SageMaker under the name `trust`.

    Args:
        adopt: whether the deployer takes over another owner's endpoint, or adds a shadow to it.
    """
    arns = Arns(spec, decision)
    trusted = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
        "Condition": {"StringEquals": {"aws:SourceAccount": arns.account}},
    }
    rows = {**TABLE, "deployer": (*TABLE["deployer"], *ADOPTING)} if adopt else TABLE
    return {"trust": policy([trusted]), **{who: policy(statements(some, arns)) for who, some in rows.items()}}


# -- split policies into parts that AWS accepts ------------------------------------------------------------------------


MOST = 6144
"""Maximum number of characters in a managed policy (quota "Managed policy length"), not counting whitespace."""


def length(policy: Policy) -> int:
    """Return a policy's length in characters as AWS counts it, excluding whitespace."""
    return len(json.dumps(policy, separators=(",", ":")))


def parts(policy: Policy, maximum: int = MOST) -> list[Policy]:
    """Split a policy into policies of at most `maximum` characters, which together allow the same actions."""
    policies: list[Policy] = []
    for statement in policy["Statement"]:
        remaining: Statement | None = statement
        while remaining is not None:
            last = policies[-1]["Statement"] if policies else []
            taken, left = _split(policy, last, remaining, maximum)
            if taken is not None:
                policies[-1:] = [{**policy, "Statement": [*last, taken]}]
            else:
                policies.append({**policy, "Statement": []})
            remaining = left
    return policies


def _split(
    policy: Policy, before: list[Statement], statement: Statement, maximum: int
) -> tuple[Statement | None, Statement | None]:
    """Return the part of a statement that fits after the statements in `before`, and the rest.

    Only a statement that does not fit into a policy by itself is divided, by its resources or by the values of a
    condition. Each resource or value is sufficient for a match, so they can be in separate statements.
    """

    def fits(preceding: list[Statement], statement: Statement) -> bool:
        return length({**policy, "Statement": [*preceding, statement]}) <= maximum

    if fits(before, statement):
        return statement, None
    if fits([], statement):
        return None, statement
    values, with_values = _list_of(statement)
    count = bisect_left(
        range(len(values)), True, key=lambda number: not fits(before, with_values(values[: number + 1]))
    )
    if count:
        return with_values(values[:count]), with_values(values[count:])
    assert before, f"{statement['Sid']}: a single value is too long"
    return None, statement


def _list_of(statement: Statement) -> tuple[list[str], Callable[[list[str]], Statement]]:
    """Return a statement's longest list of alternatives, and a function that replaces it in the statement."""
    lists: list[tuple[list[str], Callable[[list[str]], Statement]]] = [
        (statement["Resource"], lambda some: {**statement, "Resource": some})
    ]
    for operator, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            if isinstance(values, list):
                lists.append((values, _put(statement, operator, key)))
    return max(lists, key=lambda chunk: len(chunk[0]))


def _put(statement: Statement, operator: str, key: str) -> Callable[[list[str]], Statement]:
    conditions = statement["Condition"]
    return lambda some: {**statement, "Condition": {**conditions, operator: {**conditions[operator], key: some}}}
