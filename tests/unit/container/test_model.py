"""The choice of the model to serve, and the driver's words on the GPUs."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from handler.container.arguments import ModelSource, find_model
from handler.core.devices import DriverCheck, GpuDriver, check_driver, read_driver, visible_gpus
from handler.core.errors import ConfigError

# -- which model is served, of what SageMaker brought and what the environment names -----------------------------------


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
        ConfigError, match="contains a model, but the configuration names another model, a/b: remove one of the two"
    ):
        find_model(environment(data, HF_MODEL_ID="a/b"))


def test_properties_may_name_the_model_or_leave_it_to_the_environment(data: Path) -> None:
    (data / "serving.properties").write_text("option.model_id=a/b\n")
    assert find_model(environment(data)) == ModelSource(data, None, {})
    assert find_model(environment(data, HF_MODEL_ID="c/d")).model_id == "c/d"
    # as `lmi deploy` says it
    assert find_model(environment(data, OPTION_MODEL_ID=str(data))) == ModelSource(data, None, {})
    assert find_model(environment(data)).properties == data / "serving.properties"


def test_additional_sources_are_found_by_their_channels(data: Path) -> None:
    draft = data.parent / "additional-model-data-sources" / "draft"
    draft.mkdir(parents=True)
    found = find_model(environment(data, OPTION_MODEL_ID=str(draft)))
    assert found == ModelSource(None, str(draft), {"draft": draft})
    with pytest.raises(ConfigError, match=r"nowhere, which does not exist; SageMaker's model data: .*/draft"):
        find_model(environment(data, OPTION_MODEL_ID="/nowhere"))


def test_a_repacked_archive_is_told_what_lies_there(data: Path) -> None:
    (data / "llama").mkdir()
    with pytest.raises(ConfigError, match=r"contains no model: .* but llama"):
        find_model(environment(data))


def test_the_image_s_own_model_is_the_last_resort(data: Path, tmp_path: Path) -> None:
    own = tmp_path / "demo.gguf"
    with pytest.raises(
        ConfigError, match=r"there is no model: .* has no files, and neither OPTION_MODEL_ID nor HF_MODEL_ID"
    ):
        find_model(environment(data, LMI_DEFAULT_MODEL=str(own)))
    own.touch()
    assert find_model(environment(data, LMI_DEFAULT_MODEL=str(own))).model_id == str(own)
    assert find_model(environment(data, LMI_DEFAULT_MODEL=str(own), HF_MODEL_ID="demo")).model_id == str(own)
    assert find_model(environment(data, HF_MODEL_ID="demo")).model_id == "demo"


# -- the look at the driver: what NVML says, and what follows of it ----------------------------------------------------


OLD = GpuDriver("535.216.03", (12, 2), 4)
NEW = GpuDriver("580.95.05", (13, 0), 1)


class Nvml:
    """The five functions of NVML that are called, with its conventions: 0 is success, CUDA 12.2 is 12020."""

    def __init__(self, *, starts: bool = True) -> None:
        self._starts = starts

    def nvmlInit_v2(self) -> int:
        return 0 if self._starts else 9  # driver not loaded

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"535.216.03"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = 12020
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        ctypes.cast(number, ctypes.POINTER(ctypes.c_uint))[0] = 4
        return 0

    def nvmlShutdown(self) -> int:
        return 0


def missing(name: str) -> Any:
    raise OSError(name)


def test_driver_is_read_from_nvml() -> None:
    assert read_driver(lambda name: {"libnvidia-ml.so.1": Nvml()}[name]) == OLD
    assert read_driver(lambda name: Nvml(starts=False)) is None
    assert read_driver(missing) is None


def test_without_driver_and_cuda_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert check_driver(None, {}, tmp_path) == DriverCheck("")
    assert check_driver(NEW, {}, tmp_path).line == "GPUs visible: 1; driver 580.95.05 with CUDA 13.0"
    assert "no NVIDIA driver is visible" in check_driver(None, {"CUDA_VERSION": "13.1.0.036"}, tmp_path).line


def test_too_old_a_driver_is_refused_with_the_ami_that_has_a_newer_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_driver(OLD, {"CUDA_VERSION": "13.1.0.036"}, tmp_path)
    assert str(error.value) == (
        "GPUs visible: 4; driver 535.216.03 with CUDA 12.2; CUDA 13.1 in the image: the driver is too old for it. "
        "Deploy with InferenceAmiVersion=al2023-ami-sagemaker-inference-gpu-4-1 (driver 580, CUDA 13.0), "
        "or use an image with CUDA 12"
    )


def test_an_older_driver_gets_the_compatibility_library(tmp_path: Path) -> None:
    library = tmp_path / "lib.real" / "libcuda.so.1"
    library.parent.mkdir()
    library.touch()
    assert check_driver(OLD, {"CUDA_VERSION": "13.1.0"}, tmp_path).library_path == str(library.parent)
    assert check_driver(NEW, {"CUDA_VERSION": "13.0.2"}, tmp_path).library_path == ""


def test_a_newer_minor_version_needs_none(tmp_path: Path) -> None:
    assert check_driver(NEW, {"CUDA_VERSION": "13.1.0"}, tmp_path).line.endswith(
        "which works through CUDA's minor version compatibility"
    )


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "0 1 2 3"),
        ("0,2", "0 2"),
        ("", ""),
        ("-1", ""),
        ("1,-1,2", "1"),
        ("0,1,2,3,4,5", "0 1 2 3"),
        ("GPU-a,GPU-b", "GPU-a GPU-b"),
    ],
)
def test_visible_gpus_are_cuda_s(value: str | None, names: str) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(OLD, environ) == names.split()
    assert visible_gpus(None, environ) == []
