"""The options of a specification, read as the container will read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy.errors import SpecError
from deploy.spec.components import servers, title
from handler.config.loader import read_config
from handler.config.options import KNOWN
from handler.config.options.names import VARIABLES, find_option, variable

if TYPE_CHECKING:
    from deploy.spec import Spec

ADVICE = (
    "`lmi options` lists the options. If your image has another option, set it as a variable under "
    "environment:, named OPTION_NAME."
)

Value = str | int | float | bool


class Setting(NamedTuple):
    """A variable of the container, and its place in the specification."""

    name: str
    value: str
    origin: str


def settings_of(options: Mapping[str, Value], environment: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the variables of `options:` and `environment:`; misplaced options are left out."""
    for option, value in options.items():
        if not option.startswith("option.") and option != "model_id":
            yield Setting(variable_of(option), _text(value), f"options.{option}")
    for name, text in environment.items():
        yield Setting(name, text, f"environment.{name}")


def misplaced(options: Iterable[str]) -> list[str]:
    """Name the options that belong elsewhere or in another form."""
    names = list(options)
    prefixed = [f"options.{name}: write it without `option.`" for name in names if name.startswith("option.")]
    model = ["options.model_id: the model is set under model: (id, s3 or path)"] if "model_id" in names else []
    return prefixed + model


def wrong_options(settings: Iterable[Setting], directory: Path | None) -> list[str]:
    """Read the options as the container will, and say what it would refuse.

    Unknown variables under `environment:` are left to the image, which may be newer.

    Args:
        directory: the model's, which may contain a serving.properties.
    """
    by_name = {setting.name: setting for setting in settings}
    file = directory / "serving.properties" if directory else None
    reading = read_config(
        properties=file if file and file.is_file() else None,
        environ={name: setting.value for name, setting in by_name.items()},
        auto="",  # an image may choose the engine
    )
    origins = {f"environment variable {name}": setting.origin for name, setting in by_name.items()}
    found = [(origins.get(problem.where, problem.where), problem) for problem in reading.problems]
    return [
        f"{origin}: {problem.message.replace('option.', '')}"
        for origin, problem in found
        if not origin.startswith("environment.") or problem.name in VARIABLES or find_option(problem.name, "")
    ]


def options_problems(spec: Spec) -> list[str]:
    """List the options that the container would refuse by themselves; empty for AWS's own images."""
    groups = servers(spec)
    return [
        f"{title(server)}: {problem}" if len(groups) > 1 else problem
        for server in groups
        if server.image.aws is None and not is_aws_image(server.image.uri or "")
        for problem in (
            *misplaced(server.options),
            *wrong_options(settings_of(server.options, server.environment), server.model.directory),
        )
    ]


def problems_error(problems: list[str], advice: str) -> SpecError:
    """Return the error that lists them."""
    head = [f"{len(problems)} problems:"] if len(problems) > 1 else []
    return SpecError("\n  ".join([*head, *problems]), advice)


def is_aws_image(uri: str) -> bool:
    """Return whether the image is one of AWS's own LMI images, whose options differ."""
    return "/djl-inference" in uri


def variable_of(option: str) -> str:
    """Name the variable of an option; the specification writes all options without `option.`."""
    is_bare = any(one.field and not one.engines for one in KNOWN.get(option, ()))
    return variable(option if is_bare else f"option.{option}")


def _text(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


# -- places in S3 that SageMaker writes to or reads from in the role's name, beside models and adapters ----------------


_CONFIG = "sagemaker.endpoint_config"


class Written(NamedTuple):
    """A place that SageMaker writes to.

    Attributes:
        field: the field that names it.
        sid: name of its statement in policies.
        key: a KMS key that encrypts it; None: the bucket's default.
    """

    field: str
    sid: str
    uri: str
    key: str | None


def written(spec: Spec) -> list[Written]:
    """Return the places that SageMaker writes captured data and core dumps to."""
    config = spec.sagemaker.endpoint_config
    places = []
    if spec.capture is not None:
        places.append(Written("capture.output", "Capture", spec.capture.output, spec.encryption.capture_key))
    elif (capture := config.get("DataCaptureConfig")) is not None:
        field = f"{_CONFIG}.DataCaptureConfig"
        places.append(Written(field, "Capture", capture["DestinationS3Uri"], capture.get("KmsKeyId")))
    variants = [("sagemaker.variant", "CoreDumps", spec.sagemaker.variant)]
    for shadow in config.get("ShadowProductionVariants", ()):
        variants.append((f"{_CONFIG}.ShadowProductionVariants", "ShadowCoreDumps", shadow))
    for place, sid, variant in variants:
        if (dump := variant.get("CoreDumpConfig")) is not None:
            places.append(Written(f"{place}.CoreDumpConfig", sid, dump["DestinationS3Uri"], dump.get("KmsKeyId")))
    return places


def named(spec: Spec) -> dict[str, str]:
    """Return the S3 URIs of all these places and of asynchronous answers, with the field that names each."""
    found = {place.uri: place.field for place in written(spec)}
    if spec.asynchronous is not None:
        found |= {spec.asynchronous.output: "async.output"}
        found |= {} if spec.asynchronous.failures is None else {spec.asynchronous.failures: "async.failures"}
    return found | read(spec)


def read(spec: Spec) -> dict[str, str]:
    """Return the S3 URIs that SageMaker reads further model data from, with the field that names each."""
    container = spec.sagemaker.model.get("PrimaryContainer", {})
    place = "sagemaker.model.PrimaryContainer"
    found: dict[str, str] = {}
    sources = [
        ("ModelDataSource", container.get("ModelDataSource", {})),
        *[("AdditionalModelDataSources", source) for source in container.get("AdditionalModelDataSources", ())],
    ]
    for field, source in sources:
        data = source.get("S3DataSource", {})
        found |= {data[name]: f"{place}.{field}" for name in ("S3Uri", "ManifestS3Uri") if name in data}
    explainer = spec.sagemaker.endpoint_config.get("ExplainerConfig", {}).get("ClarifyExplainerConfig", {})
    shap = explainer.get("ShapConfig", {}).get("ShapBaselineConfig", {})
    if "ShapBaselineUri" in shap:
        found[shap["ShapBaselineUri"]] = f"{_CONFIG}.ExplainerConfig"
    return found
