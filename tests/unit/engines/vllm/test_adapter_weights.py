"""The scale of a LoRA adapter is a finite number, or vLLM does not get it. Weights: tests/gpu/vllm/test_served.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handler.engines.vllm.adapters import check_weights


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), "16", [16]])
def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path, alpha: Any) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))
    with pytest.raises(ValueError, match="is not a number"):
        check_weights(tmp_path)
