"""The options of a specification, checked as the container will check them, and its S3 locations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploy.errors import SpecError
from deploy.spec.components import servers, title
from handler.config.loader import Reading, read_config
from handler.config.options import KNOWN
from handler.config.options.names import FRONTS, VARIABLES, find_option, variable

if TYPE_CHECKING:
    from deploy.spec import Spec

ADVICE = (
    "`lmi options` lists the options. If your image supports another option, set the variable OPTION_NAME under "
    "`environment` instead."
)

Value = str | int | float | bool


class Setting(NamedTuple):
    """An environment variable of the container.

    Attributes:
        origin: name of the field in the specification that sets the variable.
    """

    name: str
    value: str
    origin: str


def settings_of(options: Mapping[str, Value], environment: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the environment variables that `options` and `environment` set. Misplaced options are skipped."""
    for option, value in options.items():
        if not option.startswith("option.") and option != "model_id":
            yield Setting(variable_of(option), _text(value), f"options.{option}")
    for name, text in environment.items():
        yield Setting(name, text, f"environment.{name}")


def misplaced(options: Iterable[str]) -> list[str]:
    """Return a problem for each option that must be written without `option.` or set in another section."""
    names = list(options)
    prefixed = [f"options.{name}: write it without `option.`" for name in names if name.startswith("option.")]
    model = ["options.model_id: set the model with model.id, model.s3 or model.path"] if "model_id" in names else []
    return prefixed + model


def wrong_options(settings: Iterable[Setting], directory: Path | None) -> list[str]:
    """Return the problems for which the container would reject the options, by reading them as the container does.

    Unknown variables under `environment` are accepted, because the image may be newer.

    Args:
        settings: environment variables of the container.
        directory: the model directory, which may contain a serving.properties file, or None.
    """
    origins, environ = dict[str, str](), dict[str, str]()
    for setting in settings:
        origins[f"environment variable {setting.name}"] = setting.origin
        environ[setting.name] = setting.value
    front = environ.get("LMI_FRONT") or "embedded"
    reading = _read(environ, directory)
    lines = (
        []
        if front in FRONTS
        else [f"{origins['environment variable LMI_FRONT']}: {front}: must be {' or '.join(FRONTS)}"]
    )
    for problem in reading.problems:
        origin = origins.get(problem.where, problem.where)
        if not origin.startswith("environment.") or problem.name in VARIABLES or find_option(problem.name, ""):
            lines.append(f"{origin}: {problem.message.replace('option.', '')}")
    return lines


def _read(environ: Mapping[str, str], directory: Path | None) -> Reading:
    return read_config(
        properties=_properties(directory),
        environ=environ,
        java=environ.get("LMI_FRONT") == "djl",
        auto="",  # an image may choose the engine
    )


def deprecated(spec: Spec) -> list[str]:
    """Return the warnings about deprecated options and variables of this handler's images, each once."""
    readings = (
        _read(
            {setting.name: setting.value for setting in settings_of(server.options, server.environment)},
            server.model.directory,
        )
        for server in servers(spec)
        if server.image.aws is None and not is_aws_image(server.image.uri or "")
    )
    lines = (warning for reading in readings for warning in reading.config.warnings)
    return [*dict.fromkeys(line for line in lines if line.startswith("deprecated:"))]


def _properties(directory: Path | None) -> Path | None:
    file = directory / "serving.properties" if directory else None
    return file if file and file.is_file() else None


def options_problems(spec: Spec) -> list[str]:
    """Return the problems that would make containers reject their options. AWS's images are not checked."""
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
    """Return an error that lists problems."""
    head = [f"{len(problems)} problems:"] if len(problems) > 1 else []
    return SpecError("\n  ".join([*head, *problems]), advice)


def is_aws_image(uri: str) -> bool:
    """Return whether the image is one of AWS's LMI images, whose options differ from those of the handler's images."""
    return "/djl-inference" in uri


def variable_of(option: str) -> str:
    """Return the environment variable of an option, whose name is passed without the prefix `option.`."""
    is_bare = any(variable.field and not variable.engines for variable in KNOWN.get(option, ()))
    return variable(option if is_bare else f"option.{option}")


def _text(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


# -- locations in S3, other than models and adapters, that SageMaker reads or writes with the role ---------------------


_CONFIG, _CONTAINER = "sagemaker.endpoint_config", "sagemaker.model.PrimaryContainer"


class Written(NamedTuple):
    """A location in S3 to which SageMaker writes.

    Attributes:
        field: name of the field that contains the URI.
        sid: the ID of the policy statement that allows writing to the location.
        uri: the S3 URI.
        key: the KMS key that encrypts the objects, or None for the bucket default.
    """

    field: str
    sid: str
    uri: str
    key: str | None


def written(spec: Spec) -> list[Written]:
    """Return the locations to which SageMaker writes captured data and core dumps."""
    config, dumps = spec.sagemaker.endpoint_config, _core_dumps(spec)
    if spec.capture is not None:
        return [Written("capture.output", "Capture", spec.capture.output, spec.encryption.capture_key), *dumps]
    if (capture := config.get("DataCaptureConfig")) is None:
        return [*dumps]
    field = f"{_CONFIG}.DataCaptureConfig"
    return [Written(field, "Capture", capture["DestinationS3Uri"], capture.get("KmsKeyId")), *dumps]


def _core_dumps(spec: Spec) -> Iterator[Written]:
    shadows = spec.sagemaker.endpoint_config.get("ShadowProductionVariants", ())
    for path, sid, variant in (
        ("sagemaker.variant", "CoreDumps", spec.sagemaker.variant),
        *((f"{_CONFIG}.ShadowProductionVariants", "ShadowCoreDumps", shadow) for shadow in shadows),
    ):
        if (dump := variant.get("CoreDumpConfig")) is not None:
            yield Written(f"{path}.CoreDumpConfig", sid, dump["DestinationS3Uri"], dump.get("KmsKeyId"))


def locations(spec: Spec) -> dict[str, str]:
    """Return the S3 URIs that SageMaker reads or writes, each with the name of its field.

    They include data in `sagemaker` fields, but not the data of `model` and of adapters.
    """
    fields = {location.uri: location.field for location in written(spec)}
    if spec.asynchronous is not None:
        fields |= {spec.asynchronous.output: "async.output"}
        fields |= {} if spec.asynchronous.failures is None else {spec.asynchronous.failures: "async.failures"}
    return fields | read(spec)


def read(spec: Spec) -> dict[str, str]:
    """Return the S3 URIs of model data and of an explainer's baseline in `sagemaker`, each with its field name."""
    container = spec.sagemaker.model.get("PrimaryContainer", {})
    fields: dict[str, str] = {}
    for field, sources in (
        ("ModelDataSource", [container.get("ModelDataSource", {})]),
        ("AdditionalModelDataSources", container.get("AdditionalModelDataSources", ())),
    ):
        for data in (source.get("S3DataSource", {}) for source in sources):
            fields |= {data[name]: f"{_CONTAINER}.{field}" for name in ("S3Uri", "ManifestS3Uri") if name in data}
    baseline = spec.sagemaker.endpoint_config
    for name in ("ExplainerConfig", "ClarifyExplainerConfig", "ShapConfig", "ShapBaselineConfig"):
        baseline = baseline.get(name, {})
    return fields | (
        {baseline["ShapBaselineUri"]: f"{_CONFIG}.ExplainerConfig"} if "ShapBaselineUri" in baseline else {}
    )
