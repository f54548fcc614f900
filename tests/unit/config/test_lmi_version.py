"""option.lmi_version: its values, and what the configuration tells of it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from handler.config.config import Config
from handler.config.lmi_version import VERSIONS, LmiVersion, release_of
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from tests.one_test import in_one_test

ASYNC = "option.async_mode=true"
HANDLER = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service"


def read(*overrides: str, env: dict[str, str] | None = None, djl: str = "", java: bool = False) -> Config:
    return read_config(overrides=overrides, environ=env or {}, djl=djl, java=java).checked()


def version(*overrides: str, env: dict[str, str] | None = None, djl: str = "", java: bool = False) -> tuple[str, str]:
    config = read(*overrides, env=env, djl=djl, java=java)
    return str(config.lmi_version), config.where("option.lmi_version")


def test_the_default_is_0_28() -> None:
    assert version() == ("0.28", "default")
    assert version("option.rolling_batch=vllm", "option.async_mode=false") == ("0.28", "default")
    assert version("option.entryPoint=djl_python.huggingface") == ("0.28", "default")


@in_one_test("release", VERSIONS, ids=str)
def test_each_release_is_comparable(release: LmiVersion) -> None:
    found = read(f"option.lmi_version={release}")
    assert found.lmi_version == release
    assert (found.lmi_version >= (0, 32)) is (release.minor >= 32)
    assert read(f"option.lmi_version={release}.0").lmi_version == release
    assert pickle.loads(pickle.dumps(found.lmi_version)) == release


@in_one_test("text", ["0.27", "0.39", "28", "1.0", "0.28.x", "latest", "", "0.4", "9" * 5000 + ".1"])
def test_a_release_that_does_not_exist_is_refused_with_those_that_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option\.lmi_version.*must be one of 0\.28, 0\.29, .*, 0\.37, 0\.38"):
        read_config(environ={"OPTION_LMI_VERSION": text}).checked()


def test_what_yaml_makes_of_0_30_is_0_30() -> None:
    assert version("option.lmi_version=0.3")[0] == "0.30"


def test_lmis_async_mode_tells_0_36() -> None:
    assert version(ASYNC) == ("0.36", f"-o {ASYNC}")
    assert version(HANDLER) == ("0.36", f"-o {HANDLER}")
    assert version("option.entryPoint=djl_python.lmi_trtllm.trtllm_async_service")[0] == "0.36"
    env = {"OPTION_ASYNC_MODE": "True", "OPTION_ROLLING_BATCH": "disable"}
    assert version(env=env) == ("0.36", "environment variable OPTION_ASYNC_MODE")
    assert version("option.async_mode=false", env=env)[0] == "0.28"


def test_awss_vllm_image_tells_0_36() -> None:
    assert version(env={"SM_VLLM_MAX_MODEL_LEN": "512"}) == ("0.36", "environment variable SM_VLLM_MAX_MODEL_LEN")


@in_one_test(
    ("djl", "wanted"),
    [("0.25.0", "0.28"), ("0.28.0", "0.28"), ("0.34.0", "0.34"), ("0.36.0-SNAPSHOT", "0.36"), ("0.41.0", "0.38")],
)
def test_the_djl_serving_that_runs_the_handler_tells_the_nearest(djl: str, wanted: str) -> None:
    assert version(djl=djl, java=True) == (wanted, f"DJL Serving {djl}")
    assert version(ASYNC, djl=djl, java=True)[0] == wanted


def test_the_option_beats_whatever_tells(tmp_path: Path) -> None:
    env = {"SM_VLLM_MAX_MODEL_LEN": "512", "OPTION_LMI_VERSION": "0.30"}
    assert version(ASYNC, env=env) == ("0.30", "environment variable OPTION_LMI_VERSION")
    assert version(ASYNC, "option.lmi_version=0.31", env=env, djl="0.36.0", java=True)[0] == "0.31"
    file = tmp_path / "serving.properties"
    file.write_text(f"{ASYNC}\noption.lmi_version=0.33\n")
    found = read_config(properties=file, environ={}).checked()
    assert (found.lmi_version, found.where("option.lmi_version")) == ((0, 33), "serving.properties, line 2")


@in_one_test(
    ("tag", "wanted"),
    [
        ("0.28.0-lmi10.0.0-cu124", (0, 28)), ("0.36.0-lmi18.0.0-cu128", (0, 36)), ("0.36.0-lmi25.0.0-cu130", (0, 36)),
        ("0.36.0-lmi26.0.0-cu130", (0, 37)), ("0.36.0-lmi27.0.0-cu130", (0, 37)), ("0.38.0-lmi29.0.0-cu130", (0, 38)),
        ("0.33.0-tensorrtllm0.21.0-cu128", (0, 33)), ("v0.29.0", (0, 29)), ("0.12.0-cpu", (0, 28)),
        ("latest", None), ("", None), ("12", None),
    ],
)  # fmt: skip
def test_an_images_tag_tells_its_release(tag: str, wanted: tuple[int, int] | None) -> None:
    assert release_of(tag) == wanted


@in_one_test(
    ("overrides", "wanted"),
    [
        ([], False),
        ([ASYNC], True),
        ([HANDLER], True),
        ([HANDLER, "option.async_mode=false"], False),
        ([ASYNC, "option.rolling_batch=disable"], True),
        ([ASYNC, "option.lmi_version=0.33"], True),
        ([ASYNC, "option.lmi_version=0.32"], False),
        ([ASYNC, "option.tgi_compat=true"], True),
        (["option.lmi_version=0.34"], False),
        (["option.lmi_version=0.35"], True),
        (["option.lmi_version=0.36", "option.rolling_batch=auto"], True),
        (["option.lmi_version=0.36", "option.rolling_batch=scheduler"], False),
        (["option.lmi_version=0.36", "option.rolling_batch=disable"], False),
        (["option.lmi_version=0.36", "option.tgi_compat=true"], False),
        (["option.lmi_version=0.36", "option.async_mode=false"], False),
    ],
)
def test_the_schema_of_the_async_mode(overrides: list[str], wanted: bool) -> None:
    assert read(*overrides).async_schema is wanted


def test_awss_vllm_image_answers_as_openai() -> None:
    assert not read(env={"SM_VLLM_MODEL": "a/b"}).async_schema


def test_async_mode_ends_rolling_batch_disable() -> None:
    """Java batches nothing then; the handler does."""
    assert read(ASYNC, "option.rolling_batch=disable").rolling_batch == "auto"
    assert read(HANDLER, "option.rolling_batch=disable").rolling_batch == "auto"
    assert read("option.async_mode=false", "option.rolling_batch=disable").rolling_batch == "disable"


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ([ASYNC, "option.lmi_version=0.29"], "option.async_mode .*; LMI 0.29 has no async mode"),
        ([ASYNC, "option.tgi_compat=true"], "option.tgi_compat .*; LMI's async mode ignores it"),
        ([ASYNC, "option.output_formatter=sse"], "option.output_formatter .*; LMI's async mode ignores it"),
    ],
)
def test_what_the_mode_does_not_heed_gets_a_warning(overrides: list[str], warning: str) -> None:
    (found,) = read(*overrides).warnings
    assert re.search(f"without effect.*{warning}", found)
