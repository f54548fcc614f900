"""Data capture of a rehearsal: into its S3, in the name of the model's role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.local.capture import Capture, Shadow
from deploy.rehearsal.authorization import Where, needs_of_s3
from deploy.rehearsal.sagemaker import ACCOUNT, Thing
from deploy.s3.uri import bucket_and_key

if TYPE_CHECKING:
    from deploy.rehearsal.cloud import Cloud


@dataclass(frozen=True)
class _Writer:
    """Writes objects as the role may."""

    cloud: Cloud
    role: str
    region: str
    key: str | None

    def __call__(self, uri: str, content: bytes) -> None:
        """Write an object.

        Raises:
            PermissionError: the role may not.
            botocore.exceptions.ClientError: S3 refuses.
        """
        bucket, key = bucket_and_key(uri)
        where, encrypted = Where(self.region, ACCOUNT), self.key or self.cloud.keys.get(bucket)
        missing = self.cloud.missing(self.role, needs_of_s3("PUT", bucket, key, {}, b"", where, encrypted))
        if missing is not None:
            raise PermissionError(f"the role may not {missing}")
        self.cloud.client("s3", self.region).put_object(Bucket=bucket, Key=key, Body=content)


def configured(cloud: Cloud, config: Thing, region: str) -> Capture | None:
    """Return what is captured of an endpoint, by its configuration."""
    request = config.request
    capture = request.get("DataCaptureConfig")
    if capture is None or not capture.get("EnableCapture", True):
        return None
    variant = request["ProductionVariants"][0]
    role = request.get("ExecutionRoleArn")
    if role is None and "ModelName" in variant:
        role = cloud.sagemaker.get("model", variant["ModelName"]).request["ExecutionRoleArn"]
    shadow = None
    for one in request.get("ShadowProductionVariants", ()):
        shadow = Shadow(one["VariantName"], one.get("InitialVariantWeight", 1) / variant.get("InitialVariantWeight", 1))
    return Capture.of(capture, _Writer(cloud, role or "", region, capture.get("KmsKeyId")), shadow)
