"""The environment variables of the container: the handler's options, the model location, and settings for SageMaker.

Each of the handler's options has an environment variable (docs/options.md): OPTION_X for `option.x`, and SERVING_X for
the few options without that prefix. Anyone who may describe the model can read the environment, so it must not
contain secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from deploy.errors import Refused, SpecError
from deploy.redaction import is_secret
from deploy.resolve.decision import Decision
from deploy.spec import Spec
from deploy.spec.options import ADVICE, Setting, is_aws_image, misplaced, problems_error, settings_of, wrong_options
from handler.config.options import ENVIRONMENT
from handler.config.options.names import KEY_VARIABLES, variable

MODEL_DATA = "/opt/ml/model"
"""Directory of the model data in the container (SageMaker's CreateModel, ModelDataSource)."""

_ENTRIES = 100
_LENGTH = 1024
_TOTAL = 32 * 1024
# botocore's limits for ContainerDefinition.Environment. The limit of 16 entries for a component's container does not
# apply, because the environment belongs to the component's model.

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

_SAME = {**{name: variable(key) for name, key in ENVIRONMENT.items()}, "OPTION_MAX_SEQ_LEN": "OPTION_MAX_MODEL_LEN"}
"""Maps names of variables to other names with the same meaning in the handler."""


def environment(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> dict[str, str]:
    """Return the environment variables of the container, sorted by name.

    Args:
        allow_plaintext_secret: whether to accept values that look like secrets.

    Raises:
        Refused: a value looks like a secret.
        SpecError: options are unknown, have invalid values or contradict each other, or SageMaker's limits are
            exceeded. The message lists all problems with options.
    """
    user_settings = list(settings_of(spec.options, spec.environment))
    if not allow_plaintext_secret:
        _refuse_secrets(user_settings)
    settings_by_name: dict[str, Setting] = {}
    problems, advice = misplaced(spec.options), []
    for setting in [*user_settings, *_required(spec, decision)]:
        key = _key(setting.name)
        before = settings_by_name.get(key)
        if before is not None and before.value != setting.value and not _is_inside(before, setting):
            problems.append(
                f"{before.origin} and {setting.origin} contradict each other ({before.name}={before.value}, "
                f"{setting.name}={setting.value})"
            )
            if before in user_settings:
                advice.append(f"Omit {before.origin}.")
        settings_by_name.setdefault(key, setting)
    for setting in _defaults(spec, decision):
        settings_by_name.setdefault(_key(setting.name), setting)
    if not is_aws_image(decision.image) and (wrong := wrong_options(settings_by_name.values(), spec.model.directory)):
        problems += wrong
        advice.append(ADVICE)
    if problems:
        raise problems_error(problems, "\n".join(advice))
    return _check_limits({setting.name: setting.value for setting in sorted(settings_by_name.values())})


def _key(name: str) -> str:
    return _SAME.get(name, name)


def _is_inside(setting: Setting, required: Setting) -> bool:
    """Return whether the setting of the user is a directory inside the model data."""
    return required.value == MODEL_DATA and setting.value.startswith(f"{MODEL_DATA}/")


def _required(spec: Spec, decision: Decision) -> Iterable[Setting]:
    """Yield the variables that other parts of the specification determine, which the user cannot override."""
    model = spec.model
    # AWS's image documents HF_MODEL_ID; DJL's start and the handler read both.
    name = "HF_MODEL_ID" if is_aws_image(decision.image) else "OPTION_MODEL_ID"
    if decision.model_data is not None:
        yield Setting(name, MODEL_DATA, "model.path" if model.path is not None else "model.s3")
    elif model.id is not None:
        yield Setting(name, model.id, "model.id")
    if model.context is not None:
        yield Setting("OPTION_MAX_MODEL_LEN", str(model.context), "model.context")
    if model.token_secret is not None:
        if is_aws_image(decision.image):
            raise SpecError(
                "model.token_secret: AWS's image does not read secrets; only this project's images do",
                "Use an image of this project, or a model in S3 (model.s3, model.path).",
            )
        yield Setting("HF_TOKEN_SECRET_ARN", model.token_secret, "model.token_secret")
    if str(spec.options.get("replicas", 1)) != "1":  # DJL Serving has its own workers, and rejects the option
        yield Setting("LMI_FRONT", "embedded", "options.replicas")
    if spec.network.isolated:
        for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            yield Setting(offline, "1", "network.isolated")
    if any(component.adapters for component in spec.components):
        yield Setting("OPTION_ENABLE_LORA", "true", "components.adapters")


def _defaults(spec: Spec, decision: Decision) -> Iterable[Setting]:
    """Yield defaults, which the user can override."""
    if decision.tensor_parallel is not None and decision.tensor_parallel > 1:
        yield Setting("OPTION_TENSOR_PARALLEL_DEGREE", str(decision.tensor_parallel), "instance.type")
    if decision.expert_parallel:
        yield Setting("OPTION_ENABLE_EXPERT_PARALLEL", "true", "instance.type")
    # The engine times out before SageMaker does, so that the log states the reason.
    yield Setting("OPTION_MODEL_LOADING_TIMEOUT", str(max(decision.startup - 30, 45)), "timeouts.startup")
    if most := max((len(component.adapters) for component in spec.components), default=0):
        yield Setting("SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY", str(most), "components.adapters")


def _refuse_secrets(settings: Iterable[Setting]) -> None:
    for name, value, origin in settings:
        if name in KEY_VARIABLES:
            raise Refused(
                f"{origin}: on SageMaker, clients authenticate with SigV4 or bearer tokens, not with the server's keys",
                f"Omit {name}, and allow sagemaker:InvokeEndpoint for everyone who may call the endpoint (`lmi "
                "deploy iam`).",
            )
        if is_secret(name, value):
            raise Refused(
                f"{origin} looks like a secret, but everyone who may describe the model can read its environment",
                "Store a Hugging Face token in Secrets Manager, and set model.token_secret to its ARN. For any other "
                "value, use --allow-plaintext-secret.",
            )


def _check_limits(variables: dict[str, str]) -> dict[str, str]:
    if len(variables) > _ENTRIES:
        raise SpecError(f"environment: {len(variables)} variables, but SageMaker accepts at most {_ENTRIES}", _TOO_LONG)
    for name, value in variables.items():
        if not _NAME.fullmatch(name):
            raise SpecError(f"{name}: a variable's name must consist of letters, digits and _, without a leading digit")
        for field, text in ("name", name), ("value", value):
            if (length := len(text.encode())) > _LENGTH:
                raise SpecError(f"{name}: the {field} has {length} bytes, but the maximum is {_LENGTH}", _TOO_LONG)
    total = sum(len(name.encode()) + len(value.encode()) for name, value in variables.items())
    if total > _TOTAL:
        raise SpecError(f"environment: {total} bytes in total, but SageMaker accepts at most {_TOTAL}", _TOO_LONG)
    return variables


_TOO_LONG = "Move options to a serving.properties file in the model's directory (model.path, model.s3)."
