"""IAM policies with the least privileges that a specification needs. Pure.

Three parties: the execution role (SageMaker and the container), the deployer (runs `lmi deploy`), the invoker (sends
requests). `simulation.py` asks AWS whether they are in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deploy.iam.arns import Arns
from deploy.resolve.decision import Decision
from deploy.s3.uri import bucket_and_key
from deploy.spec import Spec

Policy = dict[str, Any]

_NETWORK = (  # actions of the developer guide's execution role for a VPC
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
)
_PULL = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_PUSH = ("ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart")


def trust(spec: Spec, decision: Decision) -> Policy:
    """Return the role's trust policy: SageMaker, for this account only."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "sagemaker.amazonaws.com"},
                "Action": "sts:AssumeRole",
                "Condition": {"StringEquals": {"aws:SourceAccount": Arns(spec, decision).account}},
            }
        ],
    }


def execution_role(spec: Spec, decision: Decision) -> Policy:
    """Return the policy of the execution role."""
    return _policy(_execution(spec, Arns(spec, decision), decision))


def _execution(spec: Spec, arns: Arns, decision: Decision) -> Iterator[dict[str, Any]]:
    yield _allow("Metrics", ["cloudwatch:PutMetricData"], ["*"])
    yield _allow(
        "Logs",
        ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"],
        arns.logs(),
    )
    yield _allow("ImageLogin", ["ecr:GetAuthorizationToken"], ["*"])
    if (repository := arns.repository(decision.image)) is not None:
        yield _allow("Image", list(_PULL), [repository])
    yield from _reading(spec, arns, decision)
    yield from _answers(spec, arns)
    if spec.network.subnets:
        yield _allow("Network", list(_NETWORK), ["*"])
    if (key := spec.encryption.volume_key) is not None:
        # SageMaker creates a grant on the key for the volumes, and may create no other.
        grant = {"Bool": {"kms:GrantIsForAWSResource": "true"}}
        yield _allow("VolumeKey", ["kms:CreateGrant"], *arns.key(key, grant))
        yield _allow("VolumeKeyShown", ["kms:DescribeKey"], *arns.key(key))
    if spec.alarms is not None:
        yield _allow("Rollback", ["cloudwatch:DescribeAlarms"], arns.alarms())
    if spec.model.token_secret is not None:
        yield _allow("HubToken", ["secretsmanager:GetSecretValue"], [spec.model.token_secret])
    if (key := spec.encryption.output_key) is not None:
        yield _allow("AnswersKey", ["kms:Decrypt", "kms:GenerateDataKey"], *arns.key(key))


def _reading(spec: Spec, arns: Arns, decision: Decision) -> Iterator[dict[str, Any]]:
    """Reading model data and adapters."""
    places = [decision.model_data] if decision.model_data is not None else []
    places += [adapter.artifact for component in spec.components for adapter in component.adapters]
    if places:
        yield _allow("ModelData", ["s3:GetObject"], [arns.objects(place) for place in places])
        yield from _listing(arns, "ModelDataListed", places)


def _answers(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    """Reading and writing of asynchronous inference."""
    asynchronous = spec.asynchronous
    if asynchronous is None:
        return
    places = [asynchronous.output, *([asynchronous.failures] if asynchronous.failures else [])]
    yield _allow("Answers", ["s3:PutObject"], [arns.objects(place) for place in places])
    # Requests are stored beside the answers; for another place the role needs s3:GetObject there too.
    yield _allow("Requests", ["s3:GetObject"], [arns.objects(asynchronous.output)])
    topics = [topic for topic in (asynchronous.notify_success, asynchronous.notify_error) if topic is not None]
    if topics:
        yield _allow("Notices", ["sns:Publish"], topics)


def _listing(arns: Arns, sid: str, places: Sequence[str]) -> Iterator[dict[str, Any]]:
    buckets: dict[str, list[str]] = {}
    for place in places:
        bucket, key = bucket_and_key(place)
        buckets.setdefault(bucket, []).append(f"{key}*")
    for number, (bucket, prefixes) in enumerate(buckets.items()):
        condition = {"StringLike": {"s3:prefix": sorted(set(prefixes))}}
        yield _allow(f"{sid}{number or ''}", ["s3:ListBucket"], [arns.bucket(bucket)], condition)


def deployer(spec: Spec, decision: Decision) -> Policy:
    """Return the policy of the deployer."""
    arns = Arns(spec, decision)
    return _policy([*_making(spec, arns), *_watching(spec, arns), *_bringing(spec, arns, decision)])


def _making(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    kinds = {"Model": arns.models(), "EndpointConfig": arns.configs(), "Endpoint": arns.endpoints()}
    if spec.components:
        kinds["InferenceComponent"] = arns.components()
    actions = [f"sagemaker:{verb}{kind}" for kind in kinds for verb in ("Create", "Delete", "Describe")]
    actions += ["sagemaker:UpdateEndpoint", "sagemaker:UpdateEndpointWeightsAndCapacities"]
    if spec.components:
        actions += ["sagemaker:UpdateInferenceComponent", "sagemaker:UpdateInferenceComponentRuntimeConfig"]
    actions += ["sagemaker:AddTags", "sagemaker:DeleteTags", "sagemaker:ListTags"]
    yield _allow("SageMaker", actions, [arn for kind_arns in kinds.values() for arn in kind_arns])
    yield _allow("SageMakerListed", [f"sagemaker:List{kind}s" for kind in (*kinds,)], ["*"])
    yield _allow(
        "Role", ["iam:PassRole"], [spec.role], {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    )
    yield _allow("RoleChecked", ["iam:GetRole", "iam:SimulatePrincipalPolicy"], [spec.role])
    if spec.network.subnets:
        yield _allow("NetworkChecked", ["ec2:DescribeSecurityGroups", "ec2:DescribeSubnets"], ["*"])
    if spec.model.token_secret is not None:
        yield _allow("SecretChecked", ["secretsmanager:DescribeSecret"], [spec.model.token_secret])


def _watching(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    alarms = ["cloudwatch:DeleteAlarms", "cloudwatch:PutMetricAlarm"]
    tags = ["cloudwatch:ListTagsForResource", "cloudwatch:TagResource", "cloudwatch:UntagResource"]
    own_names = arns.alarms()
    if spec.scaling is not None:
        verbs = (
            "DeleteScalingPolicy DeregisterScalableTarget DescribeScalableTargets DescribeScalingActivities "
            "DescribeScalingPolicies ListTagsForResource PutScalingPolicy RegisterScalableTarget TagResource"
        )
        yield _allow("Scaling", [f"application-autoscaling:{verb}" for verb in verbs.split()], ["*"])
        service = "sagemaker.application-autoscaling.amazonaws.com"
        yield _allow(
            "ScalingRoleOnce",
            ["iam:CreateServiceLinkedRole"],
            [arns.of("iam", f"role/aws-service-role/{service}/*", region="")],
            {"StringLike": {"iam:AWSServiceName": service}},
        )
        # Alarms that target tracking creates.
        own_names = [
            *own_names,
            arns.of("cloudwatch", "alarm:TargetTracking-*"),
        ]
    if spec.alarms is not None or spec.scaling is not None:
        yield _allow("Alarms", [*alarms, *tags], own_names)
    yield _allow("Metrics", ["cloudwatch:DescribeAlarms", "cloudwatch:GetMetricData"], ["*"])
    logs = ["logs:DescribeLogGroups", "logs:DescribeLogStreams", "logs:FilterLogEvents", "logs:GetLogEvents"]
    yield _allow("Logs", logs, arns.logs())
    yield _allow("Quotas", ["servicequotas:ListServiceQuotas"], ["*"])


def _bringing(spec: Spec, arns: Arns, decision: Decision) -> Iterator[dict[str, Any]]:
    """Reading the image, and uploading the model's files."""
    if (repository := arns.repository(decision.image)) is not None:
        own_names = repository.split(":")[4] == arns.account
        yield _allow("Image", ["ecr:DescribeImages", *sorted((*_PULL, *(_PUSH if own_names else ())))], [repository])
        if own_names:
            yield _allow("ImageLogin", ["ecr:GetAuthorizationToken"], ["*"])
    if decision.model_data is not None:
        write = "AbortMultipartUpload DeleteObject ListMultipartUploadParts PutObject" if spec.model.upload else ""
        verbs = ["GetObject", *write.split()]
        yield _allow("ModelData", [f"s3:{verb}" for verb in verbs], [arns.objects(decision.model_data)])
        yield from _listing(arns, "ModelDataListed", [decision.model_data])
        if spec.model.upload is not None:  # parts of an interrupted upload
            bucket, _ = bucket_and_key(spec.model.upload)
            yield _allow("Uploads", ["s3:ListBucketMultipartUploads"], [arns.bucket(bucket)])
            # To check whether another model loads from the prefix.
            yield _allow("OtherModels", ["sagemaker:DescribeModel"], [arns.of("sagemaker", "model/*")])


def invoker(spec: Spec, decision: Decision, *, bearer: bool = True) -> Policy:
    """Return the policy of the invoker. InvokeEndpoint covers streams too.

    Args:
        bearer: allow bearer tokens for the OpenAI route.
    """
    arns = Arns(spec, decision)
    actions = ["sagemaker:InvokeEndpointAsync" if spec.asynchronous else "sagemaker:InvokeEndpoint"]
    statements = [_allow("Invoke", actions, [*arns.endpoints(), *arns.components()])]
    if spec.asynchronous is not None:
        places = [place for place in (spec.asynchronous.output, spec.asynchronous.failures) if place is not None]
        statements.append(_allow("Answers", ["s3:GetObject"], [arns.objects(place) for place in places]))
        statements.append(_allow("Requests", ["s3:PutObject"], [arns.objects(spec.asynchronous.output)]))
    elif bearer:
        statements.append(_allow("OpenAiRoute", ["sagemaker:CallWithBearerToken"], ["*"]))
    return _policy(statements)


def policies(spec: Spec, decision: Decision) -> dict[str, Policy]:
    """Return all policies by party."""
    return {
        "trust": trust(spec, decision),
        "execution-role": execution_role(spec, decision),
        "deployer": deployer(spec, decision),
        "invoker": invoker(spec, decision),
    }


def _policy(statements: Sequence[dict[str, Any]] | Iterator[dict[str, Any]]) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(
    sid: str, actions: Sequence[str], resources: Sequence[str], condition: dict[str, Any] | None = None
) -> dict[str, Any]:
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
    return {**statement, "Condition": condition} if condition else statement
