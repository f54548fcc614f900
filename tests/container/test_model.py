"""Which model is served, of what SageMaker brought and what the environment names."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.container.model import find_model
from handler.core.errors import ConfigError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return directory


def environment(data: Path, **more: str) -> dict[str, str]:
    return {"SAGEMAKER_MODEL_PATH": str(data), **more}


@pytest.mark.parametrize("mark", ["config.json", "openvino_model.xml", "any.gguf"])
def test_model_data_are_the_model(data: Path, mark: str) -> None:
    (data / mark).touch()
    assert find_model(environment(data))[:2] == (data, str(data))
    # as `lmi deploy` says it
    assert find_model(environment(data, OPTION_MODEL_ID=str(data))).model_id == str(data)


def test_two_models_are_refused(data: Path) -> None:
    (data / "config.json").touch()
    with pytest.raises(
        ConfigError, match="holds a model, and the environment names another, a/b: leave one of them out"
    ):
        find_model(environment(data, HF_MODEL_ID="a/b"))


def test_properties_alone_may_name_the_model_or_leave_it_to_the_environment(data: Path) -> None:
    (data / "serving.properties").write_text("option.model_id=a/b\n")
    assert find_model(environment(data)) == (data, None, {})
    assert find_model(environment(data, HF_MODEL_ID="c/d")).model_id == "c/d"
    # as `lmi deploy` says it
    assert find_model(environment(data, OPTION_MODEL_ID=str(data))) == (data, None, {})
    assert find_model(environment(data)).properties == data / "serving.properties"


def test_additional_sources_are_found_by_their_channels(data: Path) -> None:
    draft = data.parent / "additional-model-data-sources" / "draft"
    draft.mkdir(parents=True)
    found = find_model(environment(data, OPTION_MODEL_ID=str(draft)))
    assert found == (None, str(draft), {"draft": draft})
    with pytest.raises(ConfigError, match=r"nowhere, which is not there; SageMaker brought .*/draft"):
        find_model(environment(data, OPTION_MODEL_ID="/nowhere"))


def test_a_repacked_archive_is_told_what_lies_there(data: Path) -> None:
    (data / "llama").mkdir()
    with pytest.raises(ConfigError, match=r"holds no model: .* but llama"):
        find_model(environment(data))


def test_the_image_s_own_model_is_the_last_resort(data: Path, tmp_path: Path) -> None:
    own = tmp_path / "demo.gguf"
    with pytest.raises(
        ConfigError, match=r"there is no model: .* is empty, and neither OPTION_MODEL_ID nor HF_MODEL_ID"
    ):
        find_model(environment(data, LMI_DEFAULT_MODEL=str(own)))
    own.touch()
    assert find_model(environment(data, LMI_DEFAULT_MODEL=str(own))).model_id == str(own)
    assert find_model(environment(data, LMI_DEFAULT_MODEL=str(own), HF_MODEL_ID="demo")).model_id == str(own)
    assert find_model(environment(data, HF_MODEL_ID="demo")).model_id == "demo"
