"""All preflight checks. They only read, and report a missing read permission as a warning."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, as_deploy_error, error_code, pages, unless_missing, variants_of
from deploy.errors import DeployError, NotAllowed, Refused
from deploy.iam.policies import policies
from deploy.iam.simulation import denials
from deploy.preflight.bidirectional import bidirectional as bidirectional_streams
from deploy.preflight.check import Check, Context, Fetch, Verdict, error, ok, warning
from deploy.preflight.key import key, topics
from deploy.preflight.model import image, model, never_pulled, secret
from deploy.resolve.decision import Decision
from deploy.resolve.model.files import OPENER
from deploy.resources.resource import TAG_DEPLOYMENT, tag_map
from deploy.s3.prefix import Prefix, bucket_and_key, check_region
from deploy.spec import Spec
from deploy.spec.components import servers, shadow_of
from deploy.spec.options import locations

_ENDED = ("Expired", "Failed")


def places(context: Context) -> list[Check]:
    """Check that each bucket, except the buckets of `model` and adapters, exists and is in the endpoint's region."""
    return [_location(context, uri, field) for uri, field in locations(context.spec).items()]


def _location(context: Context, uri: str, field: str) -> Check:
    bucket, key = bucket_and_key(uri)
    try:
        check_region(context.aws, Prefix(bucket, key), field)
    except DeployError as failure:
        return error("places", f"{field}: {failure}", failure.advice)
    return ok("places", f"{field}: {uri}")


def reservation(context: Context) -> list[Check]:
    """Check that the reservation exists, is for endpoints, and has enough free instances of the endpoint's type."""
    arn = context.spec.reservation
    return [] if arn is None else [*_reservation(context, arn)]


def _reservation(context: Context, arn: str) -> Iterator[Check]:
    region, name = arn.split(":")[3], arn.rpartition("/")[2]
    if region != context.aws.region:
        advice = f"Use a reservation in {context.aws.region}, or set region: {region}."
        yield error("reservation", f"{name} is in {region}, but the endpoint is in {context.aws.region}", advice)
        return
    sagemaker = context.aws.client("sagemaker")
    try:
        plan = sagemaker.describe_training_plan(TrainingPlanName=name)
    except sagemaker.exceptions.ResourceNotFound:
        yield error("reservation", f"{arn} does not exist", "Correct `reservation`.")
        return
    yield _plan_check(context, name, plan)


def _plan_check(context: Context, name: str, plan: Mapping[str, Any]) -> Check:
    instance_type = context.decision.instance_type
    types = sorted({capacity["InstanceType"] for capacity in plan.get("ReservedCapacitySummaries", ())})
    available, needed = plan.get("AvailableInstanceCount", 0), context.spec.instance.count
    if plan["Status"] in _ENDED:
        return error("reservation", f"{name} is {plan['Status']}", "Use another reservation, or omit `reservation`.")
    if "endpoint" not in plan.get("TargetResources", ()):
        targets = ", ".join(plan.get("TargetResources", ())) or "nothing"
        return error("reservation", f"{name} is for {targets}, not for endpoints", "Reserve capacity for endpoints.")
    if types and instance_type not in types:
        advice = f"Set instance.type: {types[0]}, or use another reservation."
        return error("reservation", f"{name} is for {', '.join(types)}, but the endpoint uses {instance_type}", advice)
    if plan["Status"] != "Active":
        start = plan.get("StartTime", "a later time")
        advice = "No instance starts before then. Wait, or omit `reservation`."
        return warning("reservation", f"{name} is {plan['Status']} and starts at {start}", advice)
    if available < needed:
        advice = "Instances that already serve this endpoint do not count as free. No additional instance would start."
        return warning("reservation", f"{name} has {available} free instances, but {needed} are needed", advice)
    return ok("reservation", f"{name}: {available} free instances of {instance_type}")


_SECONDS = 5.0  # timeout of one request


def preflight(
    aws: Aws,
    spec: Spec,
    decision: Decision,
    *,
    fetch: Fetch | None = None,
    without: Collection[str] = (),
    bidirectional: bool = False,
) -> list[Check]:
    """Run all checks, in the order in which a deployment would encounter the problems.

    Args:
        fetch: function that sends HTTP requests to the hub and to the image registry, such as `over_the_network`, or
            None to call only AWS's API.
        without: names of checks to skip.
        bidirectional: whether callers will open bidirectional streams.

    Raises:
        BotoCoreError: there is no connection to AWS.
    """
    context = Context(aws, spec, decision, fetch, bidirectional)
    of_servers = [replace(context, spec=server, decision=decision.of(server)) for server in servers(spec)]
    checks: dict[Check, None] = {}  # an image or a secret that several servers share is reported once
    for name, check in _CHECKS.items():
        if name not in without:
            for server_context in of_servers if name in _OF_A_SERVER else [context]:
                checks.update(dict.fromkeys(run(name, partial(check, server_context))))
    return list(checks)


def refuse_errors(checks: Sequence[Check]) -> None:
    """Raise `Refused` if a check found an error.

    Raises:
        Refused: a check found an error. The advice lists the errors of other checks.
    """
    wrong = [check for check in checks if check.verdict is Verdict.ERROR]
    if wrong:
        first, *further = wrong
        lines = [f"{check.name}: {check.says}\n  {check.advice}".rstrip() for check in further]
        advice = f"  {first.advice}" if further else first.advice
        raise Refused(f"{first.name}: {first.says}", "\n".join([advice.rstrip(), *lines]))


def over_the_network(method: str, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Send an HTTP request, follow redirects, and return the status and body. An error has an empty body.

    The Authorization header is not forwarded on a redirect to another host.
    """
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    try:
        with OPENER.open(request, timeout=_SECONDS) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as failure:
        with failure:
            return failure.code, b""


def lines(checks: Sequence[Check]) -> list[str]:
    """Return the lines to print: one line for each check, followed by a line with its advice."""
    marks = {Verdict.OK: "ok     ", Verdict.WARNING: "warning", Verdict.ERROR: "error  "}
    failure = []
    for check in checks:
        failure.append(f"{marks[check.verdict]} {check.name}: {check.says}")
        if check.advice:
            failure.append(f"        {check.advice}")
    return failure


def run(name: str, check: Callable[[], Check | Iterable[Check] | None]) -> list[Check]:
    """Run one check, and return its results. An error from AWS, such as a denied call, is reported as a warning.

    Raises:
        BotoCoreError: there is no connection to AWS.
    """
    checks: list[Check] = []
    try:
        result = check()
        for item in (result,) if isinstance(result, Check) else result or ():
            checks.append(item)
    except ClientError as failure:
        deploy_error = as_deploy_error(failure)
        is_denied = isinstance(deploy_error, NotAllowed)
        says = f"{failure.operation_name} is not allowed" if is_denied else str(deploy_error)
        checks.append(warning(name, f"not checked: {says}", deploy_error.advice))
    except DeployError as failure:
        checks.append(error(name, str(failure), failure.advice))
    return checks


_ATTACH = "Attach the policy that `lmi deploy iam --who execution-role` prints."


def _role(context: Context) -> Check:
    """Check that the role exists, trusts SageMaker, and may do what the container needs, such as pulling the image."""
    arn = context.spec.role
    account = context.decision.account or context.aws.account()
    if arn.split(":")[4] != account:
        return error("role", f"{arn} does not belong to the account {account}", "Set role to a role in this account.")
    iam = context.aws.client("iam")
    try:
        result = iam.get_role(RoleName=arn.rpartition("/")[2])["Role"]
    except iam.exceptions.NoSuchEntityException:
        return error("role", f"{arn} does not exist", "Create the role with the policies that `lmi deploy iam` prints.")
    if not _trusts_sagemaker(result["AssumeRolePolicyDocument"]):
        return error(
            "role",
            f"{arn} does not trust sagemaker.amazonaws.com",
            "Use the trust policy that `lmi deploy iam` prints.",
        )
    try:
        denied = denials(context.aws, arn, policies(context.spec, context.decision)["execution-role"])
    except DeployError as failure:
        advice = "Allow iam:SimulatePrincipalPolicy on the role, as in the policy of `lmi deploy iam --who deployer`."
        return warning("role", f"{arn}: permissions not checked: {failure}", advice)
    return _denied(context, dict.fromkeys(need.action for need in denied)) if denied else ok("role", arn)


def _denied(context: Context, actions: Mapping[str, object]) -> Check:
    """Return the check of a role that is not allowed these actions."""
    says = f"{context.spec.role} is not allowed {', '.join(actions)}"
    if reason := never_pulled(context, actions):
        return error("role", f"{says}, {reason}", _ATTACH)
    advice = (
        f"{_ATTACH} Policies of buckets, keys and repositories, which are not checked, may also allow these actions."
    )
    return warning("role", says, advice)


def _trusts_sagemaker(document: Any) -> bool:
    policy = json.loads(document) if isinstance(document, str) else document
    statements = policy.get("Statement", [])
    for statement in statements if isinstance(statements, list) else [statements]:
        principal = statement.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, Mapping) else []
        services = [services] if isinstance(services, str) else services
        if statement.get("Effect") == "Allow" and "sagemaker.amazonaws.com" in services:
            return True
    return False


def _quota(context: Context) -> list[Check]:
    """Check the endpoint quota of each instance type, with the instances that other endpoints use.

    A pool without quota is reported as a warning if another pool has quota, because AWS then accepts the endpoint.
    """
    if context.spec.endpoint is not None:  # another deployment owns the instances
        return []
    types = [pool.instance_type for pool in context.decision.pools] or [context.decision.instance_type]
    quotas = [_quota_of(context, instance) for instance in types]
    if all(check.verdict is Verdict.ERROR for check in quotas):
        return quotas
    return [replace(check, verdict=min(check.verdict, Verdict.WARNING, key=list(Verdict).index)) for check in quotas]


def _quota_of(context: Context, instance: str) -> Check:
    managed = context.spec.instance.managed
    needed = context.spec.instance.count if managed is None else max(managed.max, context.spec.instance.count)
    if context.spec.scaling is not None and not context.spec.components:
        needed = max(needed, context.spec.scaling.max)
    shadow = context.decision.shadow
    beside = context.spec.shadow.count if context.spec.shadow and shadow and shadow.instance_type == instance else 0
    at_first = context.spec.instance.count + beside
    current = _current_instances(context, instance)
    return quota(context.aws, f"{instance} for endpoint usage", needed + beside, at_first, "instance.type", current)


def _current_instances(context: Context, instance: str) -> int:
    """Return the number of instances of a type that the deployment's endpoint has now, or 0 if that is unknown."""
    sagemaker = context.aws.client("sagemaker")
    endpoint = unless_missing(lambda: sagemaker.describe_endpoint(EndpointName=context.spec.name)) or {}
    if not (name := endpoint.get("EndpointConfigName")):
        return 0
    config = unless_missing(lambda: sagemaker.describe_endpoint_config(EndpointConfigName=name)) or {}
    of_type = {item["VariantName"] for item in variants_of(config) if item.get("InstanceType") == instance}
    serving = variants_of(endpoint)
    counted = [item for item in serving if item["VariantName"] in of_type]
    counted += (pool for item in serving for pool in item.get("InstancePools", ()) if pool["InstanceType"] == instance)
    return sum(int(item.get("CurrentInstanceCount", 0)) for item in counted)


def quota(aws: Aws, name: str, needed: int, at_first: int, setting: str, current: int = 0) -> Check:
    """Check one of SageMaker's quotas.

    Args:
        name: name of the quota.
        needed: maximum number of instances that the deployment may use.
        at_first: number of instances with which the deployment starts.
        setting: field of the specification that chooses the instance type, for the advice.
        current: number of instances that the deployment has now, which are part of the usage that AWS reports.
    """
    quotas = pages(aws, "service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker")
    entry = next((entry for entry in quotas if entry["QuotaName"] == name), None)
    if entry is None:
        return warning(
            "quota", f"there is no quota named {name!r}", "See the type's quotas in Service Quotas, Amazon SageMaker."
        )
    value, used = entry["Value"], max(0, _used(aws, entry) - current)
    says = f"{name}: {value:g}" + (f", of which other endpoints use {used}" if used else "")
    advice = (
        f"Request a quota of {needed + used} for `{name}` in Service Quotas (Amazon SageMaker), or change {setting}."
    )
    if value < at_first + used:
        return error("quota", f"{says}, but {at_first} are needed", advice)
    if value < needed + used:
        return warning("quota", f"{says}, but scaling may need {needed}", advice)
    return ok("quota", says)


_USAGE_PERIOD = 300
_USAGE_AGE = timedelta(hours=3)
"""AWS publishes the usage of a quota every few minutes."""


def _used(aws: Aws, entry: Mapping[str, Any]) -> int:
    """Return how much of a quota is in use by CloudWatch's metric of its usage, or 0 if that is unknown."""
    metric = entry.get("UsageMetric", {})
    if "MetricName" not in metric:
        return 0
    dimensions = [{"Name": name, "Value": value} for name, value in metric.get("MetricDimensions", {}).items()]
    stat = {
        "Metric": {
            "Namespace": metric["MetricNamespace"],
            "MetricName": metric["MetricName"],
            "Dimensions": dimensions,
        },
        "Period": _USAGE_PERIOD,
        "Stat": metric.get("MetricStatisticRecommendation", "Maximum"),
    }
    now = datetime.now(timezone.utc)
    request = {
        "MetricDataQueries": [{"Id": "used", "MetricStat": stat}],
        "StartTime": now - _USAGE_AGE,
        "EndTime": now,
        "ScanBy": "TimestampDescending",
    }
    (result,) = aws.client("cloudwatch").get_metric_data(**request)["MetricDataResults"]
    return int(next(iter(result["Values"]), 0))


def _network(context: Context) -> Check | None:
    network = context.spec.network
    if not network.subnets:
        return None
    ec2 = context.aws.client("ec2")
    try:
        subnets = ec2.describe_subnets(SubnetIds=list(network.subnets))["Subnets"]
        groups = ec2.describe_security_groups(GroupIds=list(network.security_groups))["SecurityGroups"]
    except ClientError as failure:
        if error_code(failure).endswith((".NotFound", ".Malformed")):
            advice = "Correct network.subnets and network.security_groups."
            return error("network", failure.response["Error"]["Message"], advice)
        raise
    return _placement(subnets, groups)


def _placement(subnets: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> Check:
    """Check that subnets and security groups are in one VPC, and in several zones."""
    vpcs = sorted({item["VpcId"] for item in (*subnets, *groups)})
    if len(vpcs) > 1:
        says = f"subnets and security groups belong to several VPCs: {', '.join(vpcs)}"
        return error("network", says, "Use network.subnets and network.security_groups of one VPC.")
    zones = {item["AvailabilityZone"] for item in subnets}
    if len(zones) < 2:
        advice = "Use subnets in several zones (network.subnets), for more capacity and in case a zone fails."
        return warning("network", f"all subnets are in {', '.join(zones)}", advice)
    return ok("network", f"{vpcs[0]}, {len(zones)} zones")


def _endpoint(context: Context) -> Check | None:
    """Check that another deployment's endpoint exists. The plan shows whether it accepts the components."""
    name = context.spec.endpoint
    if name is None:
        return None
    endpoint = unless_missing(lambda: context.aws.client("sagemaker").describe_endpoint(EndpointName=name))
    if endpoint is None:
        return error("endpoint", f"there is no endpoint {name}", "Deploy the endpoint first, or correct `endpoint`.")
    return ok("endpoint", f"{name} is {endpoint['EndpointStatus']}")


def _name(context: Context) -> Check | None:
    if context.spec.endpoint is not None:
        return None
    sagemaker = context.aws.client("sagemaker")
    result = unless_missing(lambda: sagemaker.describe_endpoint(EndpointName=context.spec.name))
    if result is None:
        return ok("name", f"{context.spec.name} is not used by an existing endpoint")
    tags = tag_map(sagemaker.list_tags(ResourceArn=result["EndpointArn"])["Tags"])
    if tags.get(TAG_DEPLOYMENT) != context.spec.name:
        return error(
            "name",
            f"the endpoint {context.spec.name} exists, but it was not created from a specification",
            "Use another name, or delete that endpoint.",
        )
    return ok("name", f"{context.spec.name} exists and belongs to this deployment ({result['EndpointStatus']})")


_OF_A_SERVER = ("image", "model", "key", "secret")
"""Checks that run for each server, because components may have their own settings."""


def _shadow(context: Context) -> list[Check]:
    """Check the shadow variant's image, model, secret and quota if they differ from those of the serving variant."""
    shadow, decision = context.spec.shadow, context.decision.shadow
    if shadow is None or decision is None:
        return []
    shadow_context = Context(context.aws, shadow_of(context.spec), decision, context.fetch)
    checks: list[Check] = []
    for name, check, other in (
        ("image", image, decision.image != context.decision.image),
        ("model", model, shadow.model is not None),
        ("secret", secret, shadow.model is not None),
        ("quota", _quota, decision.instance_type != context.decision.instance_type),
    ):
        if other:
            checks += run(name, partial(check, shadow_context))
    return [replace(check, says=f"shadow: {check.says}") for check in checks]


_CHECKS: dict[str, Callable[[Context], Check | list[Check] | None]] = {
    "account": lambda context: ok("account", f"{context.aws.account()} in {context.aws.region}"),
    "name": _name,
    "endpoint": _endpoint,
    "role": _role,
    "image": image,
    "model": model,
    "key": key,
    "secret": secret,
    "topics": topics,
    "quota": _quota,
    "shadow": _shadow,
    "places": places,
    "reservation": reservation,
    "network": _network,
    "bidirectional": lambda context: [*bidirectional_streams(context)],
}
