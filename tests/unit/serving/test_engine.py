"""Choice of the engine, its downloads, and the check of structured output before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handler.config.config import Config
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.serving.engine import choose_engine, downloads_of
from handler.serving.start import make_validator


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("llm_engine=openvino", "the engine openvino runs on one device"),
        ("engine_python=/opt/python", "pass it to the server of option.engine_python as a flag"),
    ],
)
def test_an_engine_of_one_device_refuses_tensor_parallelism(option: str, advice: str) -> None:
    settings = read_config(overrides=["option.llm_engine=openvino", "option.tensor_parallel_degree=2"]).config
    if option.startswith("engine_python"):
        settings = replace(settings, engine_options={**settings.engine_options, "engine_python": "/opt/python"})
    with pytest.raises(ConfigError, match=advice):
        choose_engine(settings)


def test_only_an_engine_that_fetches_models_downloads_from_s3() -> None:
    settings = read_config(overrides=["option.model_id=s3://bucket/a/"]).config
    assert downloads_of(settings, "echo") == {}
    assert downloads_of(settings, "vllm") == {"option.model_id": "s3://bucket/a/"}


def test_structured_output_is_checked_for_generation_only() -> None:
    assert make_validator(Spec("openvino", EngineConfig(Config(), task=Task.EMBEDDING))) is None
