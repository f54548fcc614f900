"""Precisions that OpenVINO's CPU plugin supports."""

from __future__ import annotations

from collections.abc import Sequence

import openvino
import pytest

from handler.core.errors import ConfigError
from handler.engines.openvino.engine import properties


def cpu(monkeypatch: pytest.MonkeyPatch, *capabilities: str) -> None:
    class Core:
        def get_property(self, device: str, name: str) -> Sequence[str]:
            assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
            return capabilities

    monkeypatch.setattr(openvino, "Core", Core)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_refusal_lists_only_precisions_by_the_options_names(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    cpu(monkeypatch, "WINOGRAD", "FP32", "INT8", "BIN", "EXPORT_IMPORT")
    with pytest.raises(ConfigError, match=f"^option.dtype={dtype}: this CPU supports only fp32$"):
        properties(dtype)
    assert properties("fp32")["INFERENCE_PRECISION_HINT"] == "f32"


def test_a_precision_of_the_cpu_is_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu(monkeypatch, "BF16", "FP32", "FP16")
    assert properties("bf16") == {"INFERENCE_PRECISION_HINT": "bf16"}
    assert properties("fp16") == {"INFERENCE_PRECISION_HINT": "f16"}
