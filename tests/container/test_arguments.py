"""What may stand behind the image's name."""

from __future__ import annotations

import pytest

from handler.container.arguments import Arguments, read_arguments
from handler.core.errors import ConfigError

_STORE = "/opt/ml/model"


@pytest.mark.parametrize(
    "argv",
    [
        [], ["serve"], ["djl-serving"], ["djl-serving", "-s", _STORE], ["djl-serving", "-s", f"{_STORE}/"],
        ["djl-serving", "--model-store", _STORE], ["djl-serving", f"--model-store={_STORE}"],
        ["serve", "-s", _STORE], ["serve", "-m", f"file:{_STORE}"], ["-m", _STORE],
    ],
)  # fmt: skip
def test_serve_and_nothing_are_the_same(argv: list[str]) -> None:
    assert read_arguments(argv, {}) == Arguments(8080, ())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (_STORE, ()),
        (f"file:{_STORE}", ()),
        (f"llm={_STORE}/", ("option.model_name=llm",)),
        (f"llm::Python:*=file://{_STORE}", ("option.model_name=llm",)),
        (f"[llm:1:Python:-1]=file:{_STORE}", ("option.model_name=llm",)),
    ],
)
def test_a_model_of_djl_servings_command_is_served_by_its_name(model: str, options: tuple[str, ...]) -> None:
    for command in (["djl-serving"], ["serve"], []):  # AWS's entry point passes what stands behind `serve` on
        assert read_arguments([*command, "-m", model], {}) == Arguments(8080, options)


def test_flags_with_and_without_serve() -> None:
    flags = ["--engine", "echo", "-o", "option.dtype=fp32", "--port", "9000"]
    expected = Arguments(9000, ("option.llm_engine=echo", "option.dtype=fp32"))
    assert read_arguments(flags, {"SAGEMAKER_BIND_TO_PORT": "1"}) == expected
    assert read_arguments(["serve", *flags], {}) == expected


def test_another_address_is_for_tests() -> None:
    assert read_arguments([], {"LMI_HOST": "127.0.0.1"}) == Arguments(8080, (), "127.0.0.1")


def test_sagemaker_names_the_port() -> None:
    assert read_arguments(["serve"], {"SAGEMAKER_BIND_TO_PORT": "8090"}).port == 8090


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["train"], {}, "this image serves models; it has no `train`"),
        (["djl-serving", "-s", "/models"], {}, "--model-store /models: the model is in /opt/ml/model"),
        (["djl-serving", "-m", "m::Python=https://example.com/m.zip"], {}, "the model is in /opt/ml/model"),
        (["djl-serving", "-m", f"a=file:{_STORE}", f"b=file:{_STORE}"], {}, "serves one model"),
        (
            ["djl-serving", "-s", _STORE, "-m", "m::Python=/m"],
            {},
            "--models m::Python=/m: the model is in /opt/ml/model",
        ),
        (["djl-serving", "-f", "/x"], {}, "--config-file: only DJL Serving has it"),
        (["serve", "--install", "ai.djl:x:1", "ai.djl:y:1"], {}, "--install: only DJL Serving has it"),
        (["serve", "-m", f"test=file:{_STORE}/test/"], {}, f"--models test=file:{_STORE}/test/: the model is in "),
        (["bash"], {}, "'bash' is not a command"),
        (["serve", "--tp-size", "2"], {}, "unrecognized arguments: --tp-size 2: set options by -o option"),
        (["--model-id", "a/b"], {}, "unrecognized arguments: --model-id: set options by -o option"),
        (["serve"], {"SAGEMAKER_BIND_TO_PORT": "eighty"}, "SAGEMAKER_BIND_TO_PORT=eighty: must be a number"),
        (["serve", "--port", 5000 * "9"], {}, "must be a number from 1 to 65535"),
        (["serve", "--port", "0"], {}, "--port=0: must be a number from 1 to 65535"),
    ],
)
def test_anything_else_is_refused_by_name(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments(argv, environ)
