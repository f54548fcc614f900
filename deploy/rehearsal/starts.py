"""How an endpoint or a component starts: with an image and model data that are there, by what its role may do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from deploy.rehearsal.authorization import Where, needs_of_action, needs_of_s3
from deploy.rehearsal.identity_policy import Need
from deploy.rehearsal.sagemaker import ACCOUNT, Fate, Thing
from deploy.s3.uri import bucket_and_key

if TYPE_CHECKING:
    from deploy.rehearsal.cloud import Cloud

_OWN_IMAGE = re.compile(rf"{ACCOUNT}\.dkr\.ecr\.([a-z0-9-]+)\.[a-z.]+/([^:@]+)(?::([^@]+))?(?:@(.+))?")
_PULLS = ("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability")


class Starts:
    """Decides how creations and updates end (`SageMaker.fate_of`), in the words by which AWS tells it."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def __call__(self, thing: Thing, wanted: Mapping[str, Any]) -> Fate:
        where = Where(thing.arn.split(":")[3], ACCOUNT)
        reason = next((why for model in self._models(thing, wanted) if (why := self._fault(model, where))), None)
        if reason is None:
            return Fate("InService")
        return Fate("RolledBack" if thing.before is not None else "Failed", reason)

    def _models(self, thing: Thing, wanted: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the models that it is to serve."""
        things = self._cloud.sagemaker.things
        if thing.kind == "inference-component":
            every = [wanted.get("Specification", {}), *wanted.get("Specifications", ())]
        else:
            config = things.get(("endpoint-config", wanted.get("EndpointConfigName", "")))
            request = config.request if config else {}
            fields = ("ProductionVariants", "ShadowProductionVariants")
            every = [variant for field in fields for variant in request.get(field, ())]
        names = [one.get("ModelName") for one in every]
        names += [pool.get("ModelNameOverride") for one in every for pool in one.get("InstancePools", ())]
        yield from (things["model", name].request for name in names if ("model", name) in things)

    def _fault(self, model: Mapping[str, Any], where: Where) -> str | None:
        container, role = model.get("PrimaryContainer", {}), model["ExecutionRoleArn"]
        return self._image(container.get("Image", ""), role, where) or self._data(container, role, where)

    def _image(self, image: str, role: str, where: Where) -> str | None:
        own = _OWN_IMAGE.fullmatch(image)
        if own is None:  # of another account, e.g. AWS's
            return None
        region, repository, tag, digest = own.groups()
        named = {"imageDigest": digest} if digest else {"imageTag": tag or "latest"}
        try:
            self._cloud.client("ecr", region).describe_images(repositoryName=repository, imageIds=[named])
        except ClientError:
            return f"The requested image '{image}' could not be found."
        pulls = (need for action in _PULLS for need in needs_of_action(action, {"repositoryName": repository}, where))
        if self._cloud.missing(role, [Need("ecr:GetAuthorizationToken", "*"), *pulls]) is not None:
            return f"The role '{role}' does not have BatchGetImage permission for the image: '{image}'."
        return None

    def _data(self, container: Mapping[str, Any], role: str, where: Where) -> str | None:
        uri = container.get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri") or container.get("ModelDataUrl")
        if uri is None:
            return None
        bucket, prefix = bucket_and_key(uri)
        try:
            found = self._cloud.client("s3", where.region).list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        except ClientError:
            found = {}
        if not (keys := [item["Key"] for item in found.get("Contents", ())]):
            return f"Could not find model data at {uri}."
        encrypted = self._cloud.keys.get(bucket)
        lists = needs_of_s3("GET", bucket, "", {"list-type": "2", "prefix": prefix}, b"", where, encrypted)
        reads = needs_of_s3("GET", bucket, keys[0], {}, b"", where, encrypted)
        if (missing := self._cloud.missing(role, [*lists, *reads])) is not None:
            return f"Could not access model data at {uri}: the role {role} is not authorized to perform: {missing}."
        return None
