"""Images by digest, with a double of ECR."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.aws import Aws
from deploy.errors import NotThere
from deploy.resolve.images import resolve_image
from deploy.spec.sections import Image
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployer import permit
from tests.deploy.doubles.deployments import PLAIN

ACCOUNT = "123456789012"  # moto's


HERE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com"


SPEC = {**PLAIN, "image": {"repository": "lmi", "tag": "1"}, "model": {"id": "demo"}}


@pytest.fixture
def aws(cloud: Cloud) -> Aws:
    """Whoever has the printed policy asks for images of two repositories."""
    permit(cloud, SPEC, {**SPEC, "image": {"repository": "other"}})
    return Aws("us-east-1")


@pytest.mark.parametrize("given", [{"repository": "lmi", "tag": "1-cu130"}, {"uri": f"{HERE}/lmi:1-cu130"}])
def test_a_tag_becomes_its_digest(cloud: Cloud, aws: Aws, given: dict[str, Any]) -> None:
    digest = cloud.push("lmi", "1-cu130")
    found = resolve_image(Image(**given), "us-east-1", ACCOUNT, aws)
    assert found.uri == f"{HERE}/lmi@{digest}"
    assert (found.cuda, found.warnings) == ((13, 0), ())


def test_a_list_of_images_is_warned_of(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    detail = {"imageDigest": "sha256:" + "2" * 64, "imageManifestMediaType": "application/vnd.oci.image.index.v1+json"}
    monkeypatch.setattr(aws.client("ecr"), "describe_images", lambda **asked: {"imageDetails": [detail]}, raising=False)
    found = resolve_image(Image(repository="lmi", tag="1"), "us-east-1", ACCOUNT, aws)
    assert found.uri == f"{HERE}/lmi@sha256:{'2' * 64}"
    assert "--provenance=false" in found.warnings[0]


def test_an_image_that_is_not_there_comes_with_the_way_to_put_it(cloud: Cloud, aws: Aws) -> None:
    cloud.push("lmi", "1")
    with pytest.raises(NotThere, match=r"there is no image lmi:2 in 123456789012's ECR of us-east-1") as caught:
        resolve_image(Image(repository="lmi", tag="2"), "us-east-1", ACCOUNT, aws)
    assert f"docker push {HERE}/lmi:2" in caught.value.advice
    with pytest.raises(NotThere, match="there is no repository other:2"):
        resolve_image(Image(repository="other", tag="2"), "us-east-1", ACCOUNT, aws)


def test_others_images_are_not_asked_for(aws: Aws) -> None:
    uri = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.38.0-lmi29.0.0-cu130"
    assert resolve_image(Image(aws="djl-lmi"), "us-east-1", ACCOUNT, aws).uri == uri
