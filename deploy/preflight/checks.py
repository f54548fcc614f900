"""What can be looked at before anything is made: read-only, and where looking is not allowed, a warning says so."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, as_ours, error_code, is_missing
from deploy.errors import DeployError, NotAllowed, Refused
from deploy.preflight.check import Check, Fetch, Given, Verdict, error, ok, warning
from deploy.preflight.image import image
from deploy.preflight.model import model, secret
from deploy.resolve.decision import Decision
from deploy.resources.names import TAG_DEPLOYMENT
from deploy.spec import Spec

_SECONDS = 5.0  # for one question to the hub


def preflight(
    aws: Aws, spec: Spec, decision: Decision, *, fetch: Fetch | None = None, without: Collection[str] = ()
) -> list[Check]:
    """Every check, in the order of what would fail first.

    Args:
        fetch: `over_the_network`, to ask the hub and the image's registry; None: only AWS's API is asked.
        without: the names of checks that are left out.

    Raises:
        BotoCoreError: AWS cannot be asked at all.
    """
    given = Given(aws, spec, decision, fetch)
    checks: list[Check] = []
    for name, check in _CHECKS.items():
        if name not in without:
            checks += _run(name, check, given)
    return checks


def refuse_errors(checks: Sequence[Check]) -> None:
    """Go on only without errors.

    Raises:
        Refused: there is one; all are said.
    """
    wrong = [check for check in checks if check.verdict is Verdict.ERROR]
    if wrong:
        lines = [f"  {check.name}: {check.says}\n    {check.advice}".rstrip() for check in wrong]
        raise Refused(f"{wrong[0].name}: {wrong[0].says}", "\n".join(lines))


def over_the_network(method: str, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """A `Fetch` of the standard library's; redirects are followed."""
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as said:
        with said:
            return said.code, b""


def lines(checks: Sequence[Check]) -> list[str]:
    """As they are printed: a line each, the advice below it."""
    marks = {Verdict.OK: "ok     ", Verdict.WARNING: "warning", Verdict.ERROR: "error  "}
    said = []
    for check in checks:
        said.append(f"{marks[check.verdict]} {check.name}: {check.says}")
        if check.advice:
            said.append(f"        {check.advice}")
    return said


def _run(name: str, check: Callable[[Given], Check | list[Check] | None], given: Given) -> list[Check]:
    try:
        found = check(given)
    except ClientError as said:
        ours = as_ours(said)
        if isinstance(ours, NotAllowed):
            return [warning(name, f"not looked at: {said.operation_name} is not allowed", ours.advice)]
        return [warning(name, f"not looked at: {ours}")]
    except DeployError as said:
        return [error(name, str(said), said.advice)]
    if found is None:
        return []
    return found if isinstance(found, list) else [found]


def _account(given: Given) -> Check:
    return ok("account", f"{given.aws.account()} in {given.aws.region}")


def _role(given: Given) -> Check:
    arn = given.spec.role
    account = given.decision.account or given.aws.account()
    if arn.split(":")[4] != account:
        return error("role", f"{arn} is of another account than {account}", "Give a role of this account in role.")
    iam = given.aws.client("iam")
    try:
        found = iam.get_role(RoleName=arn.rpartition("/")[2])["Role"]
    except iam.exceptions.NoSuchEntityException:
        return error("role", f"{arn} does not exist", "`lmi deploy iam` prints what to make it of.")
    if not _trusts_sagemaker(found["AssumeRolePolicyDocument"]):
        return error("role", f"{arn} does not trust sagemaker.amazonaws.com",
                     "Add it to the role's trust policy; `lmi deploy iam` prints one.")  # fmt: skip
    return ok("role", arn)


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


def _quota(given: Given) -> Check:
    """How many of the type the account may have in endpoints; what others use of it cannot be asked here."""
    instance = given.decision.instance_type
    managed = given.spec.instance.managed
    wanted = given.spec.instance.count if managed is None else max(managed.max, given.spec.instance.count)
    if given.spec.scaling is not None and not given.spec.components:
        wanted = max(wanted, given.spec.scaling.max)
    name = f"{instance} for endpoint usage"
    pages = given.aws.client("service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    for page in pages:
        for quota in page["Quotas"]:
            if quota["QuotaName"] == name:
                return _enough(name, quota["Value"], wanted, given.spec.instance.count)
    return warning("quota", f"none named {name!r} was found", "See Service Quotas, Amazon SageMaker.")


def _enough(name: str, value: float, wanted: int, at_first: int) -> Check:
    advice = f"Ask for {wanted} of `{name}` in Service Quotas (Amazon SageMaker), or take another instance.type."
    if value < at_first:
        return error("quota", f"{name}: {value:g}, and {at_first} are needed", advice)
    if value < wanted:
        return warning("quota", f"{name}: {value:g}, and scaling may want {wanted}", advice)
    return ok("quota", f"{name}: {value:g}")


def _network(given: Given) -> Check | None:
    network = given.spec.network
    if not network.subnets:
        return None
    ec2 = given.aws.client("ec2")
    try:
        subnets = ec2.describe_subnets(SubnetIds=list(network.subnets))["Subnets"]
        groups = ec2.describe_security_groups(GroupIds=list(network.security_groups))["SecurityGroups"]
    except ClientError as said:
        if error_code(said).endswith((".NotFound", ".Malformed")):
            message = said.response["Error"]["Message"]
            return error("network", message, "Correct network.subnets and network.security_groups.")
        raise
    vpcs = {one["VpcId"] for one in (*subnets, *groups)}
    if len(vpcs) > 1:
        return error("network", f"subnets and security groups are of several VPCs: {', '.join(sorted(vpcs))}",
                     "Take network.subnets and network.security_groups of one VPC.")  # fmt: skip
    zones = {subnet["AvailabilityZone"] for subnet in subnets}
    if len(zones) < 2:
        return warning("network", f"all subnets are in {next(iter(zones))}",
                       "Give network.subnets in several zones: more capacity, and one may fail.")  # fmt: skip
    return ok("network", f"{next(iter(vpcs))}, {len(zones)} zones")


def _name(given: Given) -> Check:
    sagemaker = given.aws.client("sagemaker")
    try:
        found = sagemaker.describe_endpoint(EndpointName=given.spec.name)
    except ClientError as said:
        if is_missing(said):
            return ok("name", f"{given.spec.name} is free")
        raise
    tags = {tag["Key"]: tag["Value"] for tag in sagemaker.list_tags(ResourceArn=found["EndpointArn"])["Tags"]}
    if tags.get(TAG_DEPLOYMENT) != given.spec.name:
        return error("name", f"an endpoint {given.spec.name} exists that was not made from a specification",
                     "Take another name, or delete that endpoint.")  # fmt: skip
    return ok("name", f"{given.spec.name} exists and is this deployment's ({found['EndpointStatus']})")


_CHECKS: dict[str, Callable[[Given], Check | list[Check] | None]] = {
    "account": _account,
    "name": _name,
    "role": _role,
    "image": image,
    "model": model,
    "secret": secret,
    "quota": _quota,
    "network": _network,
}
