"""IAM policies with the least privileges that a specification needs. Pure.

Three parties: the execution role (SageMaker and the container), the deployer (runs `lmi deploy`), the invoker (sends
requests). `simulation.py` asks AWS whether they are in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deploy.iam import adoption, batch, passthrough
from deploy.iam.arns import Arns
from deploy.iam.statements import Policy
from deploy.iam.statements import allow as _allow
from deploy.iam.statements import key_via as _key_via
from deploy.iam.statements import listing as _listing
from deploy.resolve.decision import Decision
from deploy.resources.names import TAG_DEPLOYMENT
from deploy.s3.uri import bucket_and_key
from deploy.spec import Spec
from deploy.spec.components import servers, uploads
from deploy.spec.sections import Async
from deploy.spec.shadow import shadow_of

__all__ = ["Policy", "deployer", "execution_role", "invoker", "policies", "trust"]

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
    if repositories := _repositories(arns, _images(spec, decision)):
        yield _allow("Image", list(_PULL), repositories)
    yield from _reading(spec, arns, decision)
    yield from _answers(spec, arns)
    yield from passthrough.execution_role(spec, arns)
    yield from batch.role(spec, arns)
    if spec.network.subnets:
        yield _allow("Network", list(_NETWORK), ["*"])
    yield from _volume_key(spec, arns)
    if (key := spec.encryption.volume_key) is not None:
        yield _allow("VolumeKeyShown", ["kms:DescribeKey"], *arns.key(key))
    if spec.alarms is not None:
        yield _allow("Rollback", ["cloudwatch:DescribeAlarms"], arns.alarms())
    if secrets := _secrets(spec):
        yield _allow("HubToken", ["secretsmanager:GetSecretValue"], secrets)
        yield from _key_via(arns, "secretsmanager", "HubTokenKey", spec.encryption.secret_key, ["kms:Decrypt"])
    if (key := spec.encryption.output_key) is not None:
        yield _allow("AnswersKey", ["kms:Decrypt", "kms:GenerateDataKey"], *arns.key(key))


def _reading(spec: Spec, arns: Arns, decision: Decision) -> Iterator[dict[str, Any]]:
    """Reading model data and adapters."""
    if places := _places(spec, decision):
        yield _allow("ModelData", ["s3:GetObject"], [arns.objects(place) for place in places])
        yield from _listing(arns, "ModelDataListed", places)
        yield from _key_via(arns, "s3", "ModelKey", spec.encryption.model_key, ["kms:Decrypt"])


def _places(spec: Spec, decision: Decision) -> list[str]:
    """Return the S3 URIs of model data and adapters."""
    places = _data(spec, decision)
    return places + [adapter.artifact for component in spec.components for adapter in component.adapters]


def _served(spec: Spec, decision: Decision) -> list[tuple[Spec, Decision]]:
    """Return the servers and the shadow, each with its decision."""
    found = [(server, decision.of(server)) for server in servers(spec)]
    return found if decision.shadow is None else [*found, (shadow_of(spec), decision.shadow)]


def _data(spec: Spec, decision: Decision) -> list[str]:
    """Return the S3 URIs of the models, each once."""
    data = [decided.model_data for _, decided in _served(spec, decision)]
    return list(dict.fromkeys(uri for uri in data if uri is not None))


def _images(spec: Spec, decision: Decision) -> list[str]:
    """Return the images, each once."""
    return list(dict.fromkeys(decided.image for _, decided in _served(spec, decision)))


def _repositories(arns: Arns, images: Sequence[str]) -> list[str]:
    """Return the ARNs of the images' ECR repositories, each once; images elsewhere have none."""
    found = [arns.repository(image) for image in images]
    return list(dict.fromkeys(arn for arn in found if arn is not None))


def _secrets(spec: Spec) -> list[str]:
    """Return the secrets of the models' tokens, each once."""
    models = [server.model for server in servers(spec)]
    if spec.shadow is not None and spec.shadow.model is not None:
        models.append(spec.shadow.model)
    return list(dict.fromkeys(model.token_secret for model in models if model.token_secret is not None))


def _answers(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    """Reading and writing of asynchronous inference."""
    asynchronous = spec.asynchronous
    if asynchronous is None:
        return
    places = _answer_places(asynchronous)
    yield _allow("Answers", ["s3:PutObject"], [arns.objects(place) for place in places])
    # Requests are stored beside the answers; for another place the role needs s3:GetObject there too.
    yield _allow("Requests", ["s3:GetObject"], [arns.objects(asynchronous.output)])
    if topics := asynchronous.topics:
        yield _allow("Notices", ["sns:Publish"], topics)
        actions = ["kms:Decrypt", "kms:GenerateDataKey"]
        yield from _key_via(arns, "sns", "NoticesKey", spec.encryption.topic_key, actions)


def _answer_places(asynchronous: Async) -> list[str]:
    return [place for place in (asynchronous.output, asynchronous.failures) if place is not None]


def deployer(spec: Spec, decision: Decision, *, adopt: bool = False) -> Policy:
    """Return the policy of the deployer.

    Args:
        adopt: with what taking over an endpoint of another owner needs, or a shadow beside it.
    """
    arns = Arns(spec, decision)
    own_image = any(arns.is_own(image) for image in _images(spec, decision))
    statements = [
        *_making(spec, arns),
        _in_general(spec, own_image),
        *_watching(spec, arns),
        *_bringing(spec, arns, decision),
        *_checking_keys(spec, arns, decision),
        *passthrough.deployer(spec, arns),
        *batch.deployer(spec, arns),
        *(adoption.deployer(arns) if adopt else ()),
    ]
    return _policy(statements)


def _in_general(spec: Spec, own_image: bool) -> dict[str, Any]:
    """Allow what takes no resource, or whose resources have no names of ours."""
    # Every command looks for components: the endpoint may have some that the specification does not name (any more).
    kinds = ("Models", "EndpointConfigs", "Endpoints", "InferenceComponents")
    actions = [f"sagemaker:List{kind}" for kind in kinds]
    # Scaling, not only as the specification has it: an update removes what it has no longer.
    reads = "DescribeScalableTargets DescribeScalingActivities DescribeScalingPolicies ListTagsForResource"
    changes = "DeleteScalingPolicy DeregisterScalableTarget PutScalingPolicy RegisterScalableTarget TagResource"
    actions += [f"application-autoscaling:{verb}" for verb in (*reads.split(), *changes.split())]
    actions += ["cloudwatch:DescribeAlarms", "cloudwatch:GetMetricData"]
    actions += ["logs:DescribeLogGroups"]  # IAM knows no group by its prefix, only all of them
    actions += ["servicequotas:ListServiceQuotas", "pricing:GetProducts"]
    if spec.network.subnets:
        actions += ["ec2:DescribeSecurityGroups", "ec2:DescribeSubnets"]
    if own_image:
        actions += ["ecr:GetAuthorizationToken"]
    return _allow("General", actions, ["*"])


def _making(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    kinds = {"Model": arns.models()}
    if spec.endpoint is None:
        kinds |= {"EndpointConfig": arns.configs(), "Endpoint": arns.endpoints()}
    if spec.components:
        kinds["InferenceComponent"] = arns.components()
    actions = [f"sagemaker:{verb}{kind}" for kind in kinds for verb in ("Create", "Delete", "Describe")]
    if spec.endpoint is None:
        actions += ["sagemaker:UpdateEndpoint", "sagemaker:UpdateEndpointWeightsAndCapacities"]
    if spec.components:
        actions += ["sagemaker:UpdateInferenceComponent", "sagemaker:UpdateInferenceComponentRuntimeConfig"]
    actions += ["sagemaker:AddTags", "sagemaker:DeleteTags", "sagemaker:ListTags"]
    yield _allow("SageMaker", actions, [arn for kind_arns in kinds.values() for arn in kind_arns])
    if spec.endpoint is not None:  # of another deployment: it is looked at, and gets components
        theirs = [*arns.endpoints(), arns.of("sagemaker", "endpoint-config/*")]
        verbs = ["CreateInferenceComponent", "DescribeEndpoint", "DescribeEndpointConfig", "ListTags"]
        yield _allow("SharedEndpoint", [f"sagemaker:{verb}" for verb in verbs], theirs)
    others = [arns.of("sagemaker", "inference-component/*")]
    yield _allow("OtherComponents", ["sagemaker:DescribeInferenceComponent", "sagemaker:ListTags"], others)
    own = {"StringEquals": {f"aws:ResourceTag/{TAG_DEPLOYMENT}": spec.deployment}}
    yield _allow("FormerComponents", ["sagemaker:DeleteInferenceComponent"], others, own)
    yield _allow(
        "Role", ["iam:PassRole"], [spec.role], {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    )
    yield _allow("RoleChecked", ["iam:GetRole", "iam:SimulatePrincipalPolicy"], [spec.role])
    if secrets := _secrets(spec):
        yield _allow("SecretChecked", ["secretsmanager:DescribeSecret"], secrets)
    yield from _volume_key(spec, arns)  # CreateEndpoint's caller needs it as the role does


def _volume_key(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    """The key of the volumes: SageMaker creates a grant on it, and may create no other."""
    if (key := spec.encryption.volume_key) is not None:
        grant = {"Bool": {"kms:GrantIsForAWSResource": "true"}}
        yield _allow("VolumeKey", ["kms:CreateGrant"], *arns.key(key, grant))


def _watching(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    """Alarms and logs. Not only as the specification has them: an update removes what it has no longer."""
    own_names = arns.alarms()
    if spec.scaling is not None:
        service = "sagemaker.application-autoscaling.amazonaws.com"
        yield _allow(
            "ScalingRoleOnce",
            ["iam:CreateServiceLinkedRole"],
            [arns.of("iam", f"role/aws-service-role/{service}/*", region="")],
            {"StringLike": {"iam:AWSServiceName": service}},
        )
        # Alarms that target tracking creates.
        own_names = [*own_names, arns.of("cloudwatch", "alarm:TargetTracking-*")]
    alarms = ["DeleteAlarms", "ListTagsForResource", "PutMetricAlarm", "TagResource", "UntagResource"]
    yield _allow("Alarms", [f"cloudwatch:{verb}" for verb in alarms], own_names)
    verbs = ["DeleteLogGroup", "DescribeLogStreams", "FilterLogEvents", "GetLogEvents"]
    yield _allow("Logs", [f"logs:{verb}" for verb in verbs], arns.logs())


def _bringing(spec: Spec, arns: Arns, decision: Decision) -> Iterator[dict[str, Any]]:
    """Reading the images, and uploading the models' files."""
    yield from _reading_images(arns, _images(spec, decision))
    data = _data(spec, decision)
    if not data:
        return
    written = uploads(spec)
    write = ["AbortMultipartUpload", "DeleteObject", "ListMultipartUploadParts", "PutObject"]
    read_only = [uri for uri in data if uri not in written]
    for sid, uris, verbs in (("ModelData", written, ["GetObject", *write]), ("ModelData", read_only, ["GetObject"])):
        if uris:
            sid += "Read" * bool(written and uris is read_only)
            yield _allow(sid, [f"s3:{verb}" for verb in verbs], [arns.objects(uri) for uri in uris])
    yield from _listing(arns, "ModelDataListed", data)
    # S3 reads the parts of a multipart upload again.
    actions = ["kms:Decrypt", *["kms:GenerateDataKey"] * bool(written)]
    yield from _key_via(arns, "s3", "ModelKey", spec.encryption.model_key, actions)
    if written:  # parts of an interrupted upload
        buckets = dict.fromkeys(bucket_and_key(uri)[0] for uri in written)
        yield _allow("Uploads", ["s3:ListBucketMultipartUploads"], [arns.bucket(name) for name in buckets])
        # To check whether another model loads from the prefix.
        yield _allow("OtherModels", ["sagemaker:DescribeModel"], [arns.of("sagemaker", "model/*")])


def _reading_images(arns: Arns, images: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Reading the images; pushing those of the account."""
    own = _repositories(arns, [image for image in images if arns.is_own(image)])
    others = [one for one in _repositories(arns, images) if one not in own]
    for sid, repositories, actions in (("Image", own, (*_PULL, *_PUSH)), ("Image", others, _PULL)):
        if repositories:
            sid += "Read" * bool(own and repositories is others)
            yield _allow(sid, ["ecr:DescribeImages", *sorted(actions)], repositories)


def _checking_keys(spec: Spec, arns: Arns, decision: Decision) -> Iterator[dict[str, Any]]:
    """Finding which key encrypts the model, the answers, the secret and the topics, and whether it is AWS's."""
    places, topics = _places(spec, decision), spec.topics
    if spec.asynchronous is not None:
        places += _answer_places(spec.asynchronous)
    if spec.capture is not None:
        places.append(spec.capture.output)
    if spec.batch is not None:
        places += [spec.batch.input, spec.batch.output]
    if places:
        buckets = dict.fromkeys(bucket_and_key(place)[0] for place in places)
        yield _allow("EncryptionChecked", ["s3:GetEncryptionConfiguration"], [arns.bucket(name) for name in buckets])
    if topics:
        yield _allow("TopicsChecked", ["sns:GetTopicAttributes"], topics)
    volume_key = spec.encryption.volume_key  # which CreateEndpoint's caller describes
    if places or topics or _secrets(spec) or volume_key is not None:
        elsewhere = [] if volume_key is None else [arn for arn in arns.key(volume_key)[0] if not arns.is_own_key(arn)]
        yield _allow("KeysChecked", ["kms:DescribeKey"], [*arns.keys(), *elsewhere])


def invoker(spec: Spec, decision: Decision, *, bearer: bool = True) -> Policy:
    """Return the policy of the invoker.

    Args:
        bearer: allow bearer tokens for the OpenAI route.
    """
    arns = Arns(spec, decision)
    return _policy(_invoking(spec, arns, bearer) if spec.asynchronous is None else _submitting(spec, arns))


def _invoking(spec: Spec, arns: Arns, bearer: bool) -> Iterator[dict[str, Any]]:
    # A stream is an action of its own, though the API's description says that InvokeEndpoint is what it needs.
    actions = ["sagemaker:InvokeEndpoint", "sagemaker:InvokeEndpointWithResponseStream"]
    yield _allow("Invoke", actions, [*arns.endpoints(), *arns.components()])
    if spec.components:  # the client finds the only component by itself
        yield _allow("ComponentsListed", ["sagemaker:ListInferenceComponents"], ["*"])
        yield _allow("ComponentsShown", ["sagemaker:DescribeInferenceComponent"], arns.components())
    if bearer:
        yield _allow("OpenAiRoute", ["sagemaker:CallWithBearerToken"], ["*"])


def _submitting(spec: Spec, arns: Arns) -> Iterator[dict[str, Any]]:
    """Asynchronous inference: requests go to S3, and answers come from there."""
    assert spec.asynchronous is not None
    yield _allow("Invoke", ["sagemaker:InvokeEndpointAsync"], arns.endpoints())
    places = _answer_places(spec.asynchronous)
    yield _allow("Answers", ["s3:GetObject"], [arns.objects(place) for place in places])
    yield from _listing(arns, "AnswersListed", places)  # else an answer that is not there yet looks forbidden
    yield _allow("Requests", ["s3:PutObject"], [arns.objects(spec.asynchronous.output)])
    if (key := spec.encryption.output_key) is not None:
        # Requests are stored beside the answers, where the bucket may encrypt with the same key.
        yield _allow("AnswersKey", ["kms:Decrypt", "kms:GenerateDataKey"], *arns.key(key))


def policies(spec: Spec, decision: Decision, *, adopt: bool = False) -> dict[str, Policy]:
    """Return all policies by party; `adopt` as in `deployer`."""
    return {
        "trust": trust(spec, decision),
        "execution-role": execution_role(spec, decision),
        "deployer": deployer(spec, decision, adopt=adopt),
        "invoker": invoker(spec, decision),
    }


def _policy(statements: Sequence[dict[str, Any]] | Iterator[dict[str, Any]]) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}
