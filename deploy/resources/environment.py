"""Build the container's environment: the handler's options, the model's place, settings for SageMaker.

An option of the handler is a variable (docs/options.md): `option.x` is OPTION_X, the few without `option.` are
SERVING_X. Everybody who may describe the model can read the environment, so it must hold no secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from deploy.errors import Refused, SpecError
from deploy.redaction import is_secret
from deploy.resolve.decision import Decision
from deploy.spec import Spec
from handler.config.loader import read_config
from handler.config.options import ENVIRONMENT, KNOWN
from handler.config.options.lookup import find_option, variable

MODEL_DATA = "/opt/ml/model"
"""Directory of the model data in the container (SageMaker's CreateModel, ModelDataSource)."""

_ENTRIES = 100
_LENGTH = 1024
_TOTAL = 32 * 1024
# botocore's limits of ContainerDefinition.Environment. The limit of 16 entries for a component's container does not
# apply: components name a model here, and the environment is the model's.

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

_SAME = {**{name: variable(key) for name, key in ENVIRONMENT.items()}, "OPTION_MAX_SEQ_LEN": "OPTION_MAX_MODEL_LEN"}
"""Variables with the same meaning in the handler."""


class _Setting(NamedTuple):
    name: str
    value: str
    origin: str  # place in the specification


def environment(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> dict[str, str]:
    """Return the container's variables, sorted by name.

    Raises:
        Refused: a value looks like a secret.
        SpecError: options are unknown or have wrong values, two settings contradict each other (with all such
            problems), or SageMaker's limits are exceeded.
    """
    user_settings = [*_options(spec), *_variables(spec)]
    if not allow_plaintext_secret:
        _refuse_secrets(user_settings)
    settings_by_name: dict[str, _Setting] = {}
    problems, advice = _misplaced(spec), []
    for setting in [*user_settings, *_required(spec, decision)]:
        key = _key(setting.name)
        before = settings_by_name.get(key)
        if before is not None and before.value != setting.value and not _is_inside(before, setting):
            problems.append(
                f"{before.origin} and {setting.origin} contradict each other ({before.name}={before.value}, "
                f"{setting.name}={setting.value})"
            )
            if before in user_settings:
                advice.append(f"Leave {before.origin} out.")
        settings_by_name.setdefault(key, setting)
    for setting in _defaults(spec, decision):
        settings_by_name.setdefault(_key(setting.name), setting)
    if not _is_aws_image(decision) and (wrong := _wrong_options(spec, settings_by_name)):
        problems += wrong
        advice.append(_OPTIONS)
    if problems:
        head = [f"{len(problems)} problems:"] if len(problems) > 1 else []
        raise SpecError("\n  ".join([*head, *problems]), "\n".join(advice))
    return _check_limits({setting.name: setting.value for setting in sorted(settings_by_name.values())})


def _key(name: str) -> str:
    return _SAME.get(name, name)


def _is_inside(user_settings: _Setting, required: _Setting) -> bool:
    """Whether the user names a directory inside the model data."""
    return required.value == MODEL_DATA and user_settings.value.startswith(f"{MODEL_DATA}/")


def _is_aws_image(decision: Decision) -> bool:
    """Whether the image is one of AWS's own LMI images, however it is named."""
    return "/djl-inference" in decision.image


def _misplaced(spec: Spec) -> list[str]:
    prefixed = [f"options.{name}: write it without `option.`" for name in spec.options if name.startswith("option.")]
    model = ["options.model_id: the model is said under model: (id, s3 or path)"] if "model_id" in spec.options else []
    return prefixed + model


def _options(spec: Spec) -> Iterable[_Setting]:
    for option, value in spec.options.items():
        if not option.startswith("option.") and option != "model_id":
            yield _Setting(_name(option), _text(value), f"options.{option}")


def _wrong_options(spec: Spec, settings: Mapping[str, _Setting]) -> list[str]:
    """Read the options as the container will, and say what it would refuse.

    Unknown variables under `environment:` are left to the image, which may be newer.
    """
    directory = spec.model.directory
    file = directory / "serving.properties" if directory else None
    reading = read_config(
        properties=file if file and file.is_file() else None,
        environ={setting.name: setting.value for setting in settings.values()},
        auto="",  # an image may choose the engine
    )
    origins = {f"environment variable {setting.name}": setting.origin for setting in settings.values()}
    found = [(origins.get(problem.where, problem.where), problem) for problem in reading.problems]
    return [
        f"{origin}: {problem.message.replace('option.', '')}"
        for origin, problem in found
        if not origin.startswith("environment.") or find_option(problem.name, "")
    ]


def _name(option: str) -> str:
    """Name the variable of an option; the specification writes all options without `option.`."""
    is_bare = any(one.field and not one.engines for one in KNOWN.get(option, ()))
    return variable(option if is_bare else f"option.{option}")


def _text(value: str | int | float | bool) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _variables(spec: Spec) -> Iterable[_Setting]:
    return (_Setting(name, value, f"environment.{name}") for name, value in spec.environment.items())


def _required(spec: Spec, decision: Decision) -> Iterable[_Setting]:
    """Yield the variables that follow from other parts of the specification; the user cannot override them."""
    model = spec.model
    # AWS's image documents HF_MODEL_ID; DJL's start and the handler read both.
    name = "HF_MODEL_ID" if _is_aws_image(decision) else "OPTION_MODEL_ID"
    if decision.model_data is not None:
        yield _Setting(name, MODEL_DATA, "model.path" if model.path is not None else "model.s3")
    elif model.id is not None:
        yield _Setting(name, model.id, "model.id")
    if model.context is not None:
        yield _Setting("OPTION_MAX_MODEL_LEN", str(model.context), "model.context")
    if model.token_secret is not None:
        if _is_aws_image(decision):
            raise SpecError(
                "model.token_secret: AWS's image does not read secrets; only this project's images do",
                "Use one of those (docs/container.md), or put the model's files into S3 (model.s3, model.path).",
            )
        yield _Setting("HF_TOKEN_SECRET_ARN", model.token_secret, "model.token_secret")
    if spec.network.isolated:
        for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            yield _Setting(offline, "1", "network.isolated")
    if any(component.adapters for component in spec.components):
        yield _Setting("OPTION_ENABLE_LORA", "true", "components.adapters")


def _defaults(spec: Spec, decision: Decision) -> Iterable[_Setting]:
    """Yield defaults, which the user can override."""
    if decision.tensor_parallel is not None and decision.tensor_parallel > 1:
        yield _Setting("OPTION_TENSOR_PARALLEL_DEGREE", str(decision.tensor_parallel), "instance.type")
    # The engine gives up before SageMaker does, so that the log has the reason.
    yield _Setting("OPTION_MODEL_LOADING_TIMEOUT", str(max(decision.startup - 30, 45)), "timeouts.startup")
    if most := max((len(component.adapters) for component in spec.components), default=0):
        yield _Setting("SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY", str(most), "components.adapters")


def _refuse_secrets(settings: Iterable[_Setting]) -> None:
    for name, value, origin in settings:
        if name == "LMI_API_KEY":
            raise Refused(
                f"{origin}: SageMaker authenticates itself, by SigV4 or bearer tokens; keys are for your own servers",
                "Leave it out, and allow sagemaker:InvokeEndpoint to those who may ask (`lmi deploy iam`).",
            )
        if is_secret(name, value):
            raise Refused(
                f"{origin} looks like a secret, and whoever may describe the model can read its environment",
                "A Hugging Face token: keep it in Secrets Manager and write its ARN into model.token_secret. Else: "
                "--allow-plaintext-secret.",
            )


def _check_limits(variables: dict[str, str]) -> dict[str, str]:
    if len(variables) > _ENTRIES:
        raise SpecError(f"environment: {len(variables)} variables, and SageMaker takes {_ENTRIES}", _TOO_LONG)
    for name, value in variables.items():
        if not _NAME.fullmatch(name):
            raise SpecError(f"{name}: as a variable's name SageMaker takes letters, digits and _, no digit first")
        for what, text in ("name", name), ("value", value):
            if (length := len(text.encode())) > _LENGTH:
                raise SpecError(f"{name}: its {what} is {length} bytes, and SageMaker takes {_LENGTH}", _TOO_LONG)
    total = sum(len(name.encode()) + len(value.encode()) for name, value in variables.items())
    if total > _TOTAL:
        raise SpecError(f"environment: {total} bytes in all, and SageMaker takes {_TOTAL}", _TOO_LONG)
    return variables


_TOO_LONG = "Put options into a serving.properties in the model's directory (model.path, model.s3)."

_OPTIONS = (
    "`lmi options` lists the options. An image that knows another one gets it by a variable under environment:, as "
    "OPTION_NAME."
)
