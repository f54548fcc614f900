"""Read a model's JumpStart document. Field names are snake_case in JumpStart's bucket, and PascalCase in a hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from botocore import xform_name

from deploy.adopt.live import Source
from deploy.data import table
from deploy.errors import Refused, SpecError
from deploy.resolve.instances import find
from deploy.resources.resource import Content, Json, merged

_IMAGES: Mapping[str, str] = table("containers")["images_of_jumpstart"]
"""Maps each framework of the SDK to its image, for documents that do not name an image."""

_NOT_OVERRIDDEN = ("model_id", "url", "version", "gated_bucket")  # fields that a configuration does not override

_DRAFT = "speculative_decoding"

_OF_SERVING = ("hosting_", "model_kwargs")
_READ = (
    "hosting_artifact_",
    "hosting_prepacked_artifact_",
    "hosting_ecr_",
    "hosting_eula_",
    "hosting_instance_type_variants",
    "hosting_additional_data_sources",
    "hosting_use_script_uri",
)
"""Prefixes of the serving fields that adopt reads. It reports all other serving fields."""

_LICENCE = (
    "read the licence; if you accept it, write `ModelAccessConfig: {AcceptEula: true}` into each gated S3DataSource of "
    "sagemaker.model"
)


def read_jumpstart(content: Json, file: str, region: str) -> Source:
    """Read a document as the SDK does: with its highest-ranked configuration and its default instance type.

    Args:
        region: region of the bucket with the weights, or "" if it is unknown.

    Raises:
        SpecError: a field has the wrong type, or the region is needed but unknown.
        Refused: the document does not name an image, or the model is in a Marketplace package.
    """
    fields = _chosen(_section(content, file, "document"), file)
    if fields.get("hosting_model_package_arns"):  # the SDK prefers the package to an image
        raise Refused(
            f"{file}: the model's container and weights are in a Marketplace package",
            "Deploy it from the Marketplace; lmi deploy serves only weights that you can access.",
        )
    kind = str(fields.get("default_inference_instance_type") or "")
    variants = _section(fields.get("hosting_instance_type_variants"), file, "hosting_instance_type_variants")
    special = [*_special(variants, kind, file)]
    container: Content = {
        "Image": _image(fields, variants, special, file, region),
        "Environment": _environment(fields, special, file),
    }
    if uri := _weights(fields, special, file, region):
        container |= prefix_data(uri) if uri.endswith("/") else {"ModelDataUrl": uri}
    if drafts := _drafts(fields, file, region):
        container["AdditionalModelDataSources"] = drafts
    model: Content = {"PrimaryContainer": container}
    if fields.get("inference_enable_network_isolation") and uri:
        model["EnableNetworkIsolation"] = True
    return Source(
        "",
        f"{file} (JumpStart's {fields.get('model_id') or fields.get('url') or 'model'})",
        region,
        config={"ProductionVariants": [_variant(fields, kind, file)]},
        models={"": model},
        notes=[*_notes(fields)],
    )


def _variant(fields: Json, kind: str, file: str) -> Content:
    """Return the variant with the default instance type."""
    times = {**fields, **_section(fields.get("deploy_kwargs"), file, "deploy_kwargs")}
    instance = find(kind)
    variant = {
        "VariantName": "AllTraffic",
        "InstanceType": kind,
        "ModelDataDownloadTimeoutInSeconds": times.get("model_data_download_timeout"),
        "ContainerStartupHealthCheckTimeoutInSeconds": times.get("container_startup_health_check_timeout"),
        "VolumeSizeInGB": None if instance is None or instance.nvme_gb else fields.get("inference_volume_size"),
    }
    return {name: value for name, value in variant.items() if value}


def _notes(fields: Json) -> Iterator[tuple[str, str]]:
    """Yield each serving field that is not read, with the reason, and the licence that the user must accept."""
    for name, value in fields.items():
        if name.startswith(_OF_SERVING) and not name.startswith(_READ) and value:
            yield f"JumpStart's {name}", "adopt ignores this field"
    if fields.get("hosting_eula_key"):
        yield "JumpStart's hosting_eula_key", _LICENCE


def prefix_data(uri: str) -> Content:
    """Return the ModelDataSource field of a container for uncompressed model data under an S3 prefix."""
    data = {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
    return {"ModelDataSource": {"S3DataSource": data}}


def _chosen(fields: Content, file: str) -> Content:
    """Merge the highest-ranked configuration, or else the first by name, into the document's own fields."""
    configs = _map(fields, file, "inference_configs")
    components = _map(fields, file, "inference_config_components")
    for config in (_ranked(fields, configs, file) or sorted(configs))[:1]:
        section = _section(configs[config], file, f"inference_configs.{config}")
        for name in map(str, listed(section.get("component_names"), file, "component_names")):
            component = _section(components.get(name), file, f"inference_config_components.{name}")
            fields = merged(fields, {key: value for key, value in component.items() if key not in _NOT_OVERRIDDEN})
    return fields


def _ranked(fields: Json, configs: Json, file: str) -> list[str]:
    """Return the configuration names in the order in which the document ranks them."""
    path = "inference_config_rankings"
    ranking = _section(_map(fields, file, path).get("overall"), file, path)
    return [name for name in map(str, listed(ranking.get("rankings"), file, "rankings")) if name in configs]


def _special(variants: Json, kind: str, file: str) -> Iterator[Content]:
    """Yield the document's settings for the instance type, followed by those for its family."""
    variant_map = _map(variants, file, "variants")
    for name in (kind, kind.removeprefix("ml.").partition(".")[0]):
        yield _section(variant_map.get(name), file, f"variants.{name}")


def _of_type(special: list[Content], file: str, name: str) -> Any:
    values = (_section(item.get("properties"), file, "properties").get(name) for item in special)
    return next((value for value in values if value), None)


def _image(fields: Json, variants: Json, special: list[Content], file: str, region: str) -> str:
    regions = _map(variants, file, "regional_aliases")
    aliases = _map(regions, file, region if region in regions else next(iter(regions), ""))
    aliases_of_type = (
        _section(part.get("regional_properties"), file, "regional_properties").get("image_uri") for part in special
    )
    alias = next((str(uri) for uri in aliases_of_type if uri), "")
    if image := aliases.get(alias.removeprefix("$")) or _of_type(special, file, "image_uri"):
        return str(image)
    if image := fields.get("hosting_ecr_uri"):
        return str(image)
    specs = _section(fields.get("hosting_ecr_specs"), file, "hosting_ecr_specs")
    if not specs.get("framework"):
        raise Refused(f"{file}: the document names no image: it has neither hosting_ecr_uri nor hosting_ecr_specs", "")
    return _IMAGES.get(str(specs["framework"]), f"{specs['framework']}:{{}}").format(specs.get("framework_version", ""))


def _environment(fields: Json, special: list[Content], file: str) -> dict[str, str]:
    environ: Content = {}
    path = "inference_environment_variables"
    for number, item in enumerate(listed(fields.get(path), file, path)):
        variable = _section(item, file, f"{path}[{number}]")
        if "name" not in variable:
            raise SpecError(f"{file}: {path}[{number}]: must be an object with a name")
        if variable.get("scope", "container") == "container":
            environ[str(variable["name"])] = variable.get("default")
    for variable in reversed(special):
        properties = _section(variable.get("properties"), file, "properties")
        environ |= _map(properties, file, "environment_variables")
    return {name: str(value) for name, value in environ.items() if value is not None}


def _weights(fields: Json, special: list[Content], file: str, region: str) -> str:
    """Return the URI of the weights, or "" if there are none.

    Prepacked artifacts, which include a script, take precedence.
    """
    has_it = any(fields.get(f"hosting_prepacked_artifact_{suffix}") for suffix in ("key", "uri"))
    is_prepacked = has_it or not fields.get("hosting_use_script_uri", True)
    kinds = ("prepacked_artifact", "artifact") if is_prepacked else ("artifact",)
    for kind in kinds:
        if uri := _of_type(special, file, f"{kind}_uri") or fields.get(f"hosting_{kind}_uri"):
            return str(uri)
        if key := _of_type(special, file, f"{kind}_key") or fields.get(f"hosting_{kind}_key"):
            return _in_bucket(str(key), file, region, gated=bool(fields.get("gated_bucket")))
    return ""


def _drafts(fields: Json, file: str, region: str) -> list[Content]:
    """Return the draft models as entries of CreateModel's AdditionalModelDataSources."""
    name = "hosting_additional_data_sources"
    sources = listed(_section(fields.get(name), file, name).get(_DRAFT), file, _DRAFT)
    return [_draft(source, file, region) for source in sources]


def _draft(item: Any, file: str, region: str) -> Content:
    source = _section(item, file, _DRAFT)
    data = _section(source.get("s3_data_source"), file, f"{_DRAFT}: s3_data_source")
    provider = _section(source.get("provider"), file, f"{_DRAFT}: provider")
    uri = str(data.get("s3_uri", ""))
    if not uri.startswith("s3://"):
        uri = _in_bucket(uri, file, region, gated=provider.get("classification") == "gated")
    draft = {"S3Uri": uri, "S3DataType": data.get("s3_data_type"), "CompressionType": data.get("compression_type")}
    return {"ChannelName": source.get("channel_name"), "S3DataSource": draft}


def _in_bucket(key: str, file: str, region: str, *, gated: bool) -> str:
    if not region:
        raise SpecError(f"{file}: the bucket with the weights depends on the region", "Pass --region REGION.")
    return f"s3://jumpstart-{'private-' * gated}cache-prod-{region}/{key}"


def _section(value: Any, file: str, path: str) -> Content:
    """Return an object with its field names converted to snake case, or {} for None."""
    return {xform_name(name): item for name, item in _object(value, file, path).items()}


def _map(fields: Json, file: str, name: str) -> Content:
    """Return an object without converting its keys, which are names of variables, instance types or regions."""
    return _object(fields.get(name), file, name)


def _object(value: Any, file: str, path: str) -> Content:
    if value is not None and not isinstance(value, dict):
        raise SpecError(f"{file}: {path}: must be an object")
    return value or {}


def listed(value: Any, file: str, path: str) -> list[Any]:
    """Return `value`, which must be an array, or [] if it is None."""
    if value is not None and not isinstance(value, list):
        raise SpecError(f"{file}: {path}: must be an array")
    return value or []
