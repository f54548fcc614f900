"""Thirty public endpoints: adopted, planned, and nothing else changed than what comes with another image."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.aws.adopt.conftest import by_hand
from tests.deploy.doubles.aws import Cloud
from tests.deploy.public_endpoints import OTHERS, PUBLIC

_TIMEOUT = r"(ModelDataDownload|ContainerStartupHealthCheck)TimeoutInSeconds"
_WITH_THE_IMAGE = {
    "model": r"PrimaryContainer\.(Image|Environment(\..*)?)",
    "endpoint-config": rf"ProductionVariants\[0\]\.(ModelName|InferenceAmiVersion|{_TIMEOUT})",
    "endpoint": "EndpointConfigName|lmi:.*",
    "inference-component": rf"Specification\.(ModelName|StartupParameters(\.{_TIMEOUT})?)|lmi:.*",
}
"""Fields that change with the image. The host's AMI follows its CUDA; timeouts that nobody set, the model's size."""

_NOT_AS_IT_WAS = {"DeepSeek-R1-Distill, TensorRT-LLM": {"PrimaryContainer.ModelDataSource"}}
"""LMI downloads a prefix of S3 itself; with model.s3 SageMaker lays it there."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_endpoint_is_adopted_and_only_image_and_variables_would_change(
    name: str,
    cloud: Cloud,
    tmp_path: Path,
    adopt: Callable[..., int],
    planned: Callable[[Path], dict[str, dict[str, Any]]],
) -> None:
    by_hand(cloud, PUBLIC[name])
    before = cloud.everything()
    path = tmp_path / "chat.yaml"
    assert adopt("--output", str(path)) == 0
    assert "hf_0123" not in path.read_text()
    actions = planned(path)
    assert cloud.changes() == []
    assert cloud.everything() == before
    assert {key.partition("/")[0] for key in actions} <= set(_WITH_THE_IMAGE)
    assert not [key for key, action in actions.items() if action["verb"] in ("create", "delete")]
    also = _NOT_AS_IT_WAS.get(name, set())
    wrong = [
        (key, change)
        for key, action in actions.items()
        for change in action["changes"]
        if not re.fullmatch(_WITH_THE_IMAGE[key.partition("/")[0]], change["place"]) and change["place"] not in also
    ]
    assert not wrong


@pytest.mark.parametrize("name", OTHERS)
def test_a_public_endpoint_of_another_kind_is_refused_by_name(
    name: str, cloud: Cloud, tmp_path: Path, adopt: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    public, why = OTHERS[name]
    by_hand(cloud, public)
    path = tmp_path / "chat.yaml"
    assert adopt("--output", str(path)) == 2
    assert why in capsys.readouterr().err
    assert not path.exists()
    assert cloud.changes() == []
