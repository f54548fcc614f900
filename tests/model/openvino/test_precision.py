"""fp16 on a CPU: refused where it makes noise."""

from __future__ import annotations

from pathlib import Path

import openvino
import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.openvino.engine import make_pipeline

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        "FP16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="this CPU has no fp16"
    ),
]


def test_fp16_is_refused_where_the_model_computes_no_numbers(model: Path) -> None:
    """The demo model's answers were noise on a CPU with AMX."""
    said = ""
    try:
        make_pipeline(EngineConfig(Config(dtype="fp16"), model=model))
    except ConfigError as error:
        said = str(error)
    if not said:
        pytest.skip("this CPU computes the model in fp16")
    assert said.startswith("option.dtype=fp16: the model computes NaN in fp16 on this CPU")
