"""Convert an endpoint's settings to a specification. Each setting is mapped, passed through or reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from deploy.adopt.live import Source, container_of, data_of, refuse_owned, refuse_unsettled
from deploy.adopt.triton import NAME, read_repository
from deploy.adopt.variables import KINDS, Container, Variables, container_kind, setting_text, variables
from deploy.errors import Refused, SpecError
from deploy.resolve.images import image_architecture, image_cuda, package_version
from deploy.resolve.instances import GPU_FAMILIES, LLAMACPP, architecture, family
from deploy.resources.environment import MODEL_DATA
from deploy.resources.resource import Content, Json
from deploy.s3.archive import OPTIONS_FILE, Artifact
from deploy.s3.prefix import ARCHIVE
from deploy.service_model import sagemaker
from deploy.spec.passthrough import OWNED, TYPES, problems, shape_of
from deploy.spec.reading import content_problems
from deploy.spec.sections import Image

_BY_CONCURRENCY = (
    "SageMakerVariantConcurrentRequestsPerModelHighResolution",
    "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution",
)
_COOLDOWN = 300  # seconds: Application Auto Scaling's default for SageMaker


def scaling_of(source: Source, variant: Json, unmapped: list[tuple[str, str]]) -> Content | None:
    """Return the `scaling` section, or None if the endpoint has no scaling that can be mapped.

    Args:
        unmapped: list that receives each setting that cannot be mapped, with the reason.
    """
    resource_ids = [f"inference-component/{component['InferenceComponentName']}" for component in source.bases]
    resource_ids = resource_ids or [f"endpoint/{source.name}/variant/{variant.get('VariantName')}"]
    targets = [target for target in source.targets if target["ResourceId"] in resource_ids]
    sections = [section for target in targets if (section := _scaling(source, target, unmapped)) is not None]
    if not sections:
        return None
    if len(sections) < len(resource_ids) or any(section != sections[0] for section in sections):
        unmapped.append(("scaling", "the components scale differently, but lmi deploy scales all of them alike"))
        return None
    return sections[0]


def _scaling(source: Source, target: Json, unmapped: list[tuple[str, str]]) -> Content | None:
    result: Content | None = None
    for policy in [item for item in source.policies if item["ResourceId"] == target["ResourceId"]]:
        name, tracking = policy["PolicyName"], policy.get("TargetTrackingScalingPolicyConfiguration", {})
        metric = tracking.get("PredefinedMetricSpecification", {}).get("PredefinedMetricType")
        if metric in _BY_CONCURRENCY and target["MinCapacity"] >= 1:
            result = {
                "min": target["MinCapacity"],
                "max": target["MaxCapacity"],
                "concurrency": tracking["TargetValue"],
                "scale_in_cooldown": tracking.get("ScaleInCooldown", _COOLDOWN),
                "scale_out_cooldown": tracking.get("ScaleOutCooldown", _COOLDOWN),
            }
            reason = "`up` creates the same policy under another name: delete the old policy afterwards"
        else:
            reason = f"it is kept ({metric or policy.get('PolicyType', 'unknown type')}); set scaling: to replace it"
        unmapped.append((f"scaling policy {name} of {target['ResourceId']}", reason))
    return result


@dataclass(frozen=True)
class Wishes:
    """The user's own settings, which take precedence over those of the endpoint.

    Attributes:
        name: name of the deployment, or None to use the endpoint name.
        region: region of the deployment, or None for the source's region.
        role: the ARN of the execution role, or None to use the endpoint's role.
        image: image to deploy, as `{"uri": ...}` or `{"repository": ...}`, or None for the one with the container's
            engine.
        model: model ID on the hub or S3 prefix, or None for the container's model.
        token_secret: the ARN of the secret that contains the hub token, or None.
        container: kind of the serving container, or None to derive it from its image.
        variant: name of the production variant to adopt, which is needed only if there are several.
    """

    name: str | None = None
    region: str | None = None
    role: str | None = None
    image: Mapping[str, str] | None = None
    model: str | None = None
    token_secret: str | None = None
    container: str | None = None
    variant: str | None = None


@dataclass
class Adopted:
    """A specification and its comments.

    Attributes:
        content: fields of the specification, in the order of the file.
        head: phrases for the comments at the top of the file.
        unmapped: pairs `(field or NAME=value, reason)` for settings that cannot be mapped.
        idle: pairs of the same form for settings that have no effect here.
        differences: pairs of the same form for settings that have another effect here.
        defaults: pairs `(setting, origin)` for defaults of the container or SageMaker on which the source relies.
        passed: names of the fields that are passed to SageMaker unchanged.
        container: the serving container of the source, or None before it is known.
    """

    content: Content
    head: list[str] = field(default_factory=list)
    unmapped: list[tuple[str, str]] = field(default_factory=list)
    idle: list[tuple[str, str]] = field(default_factory=list)
    differences: list[tuple[str, str]] = field(default_factory=list)
    defaults: list[tuple[str, str]] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    container: Container | None = None

    def put(self, name: str, value: Any) -> None:
        """Set a field of the specification, unless the value is empty."""
        if value:
            self.content[name] = value


def _without_none(**values: Any) -> Content:
    return {name: value for name, value in values.items() if value is not None}


def adopted(source: Source, wishes: Wishes) -> Adopted:
    """Return the specification of an endpoint.

    Raises:
        Refused: the endpoint cannot be adopted because of its owner, container or configuration.
        SpecError: a required setting, such as the name or the role, is neither in the source nor in `wishes`, or the
            result would not be a valid specification.
    """
    name = wishes.name or source.name
    if not name:
        raise SpecError("the file names no endpoint", "Pass the deployment's name as --name NAME.")
    if name == source.name:
        refuse_owned(source)
        refuse_unsettled(source)
    variant = _variant(source, wishes, beside=name != source.name)
    first, *different = _served(source, variant)
    reading = _read(source, first, wishes)
    result = Adopted({"name": name}, container=reading.container)
    content = result.content
    result.put("region", wishes.region or source.region)
    content["role"] = _role(result, source, variant, [first, *different], wishes)
    content["image"] = _image(wishes.image, reading.container, first.container, variant)
    content["model"] = _model(result, first.container, reading, wishes)
    result.put("options", reading.settings.options)
    result.put("environment", reading.settings.environment)
    content["instance"] = _instance(result, source, variant)
    result.put("timeouts", _times(source, variant))
    content["routing"] = _routing(result, variant)
    result.put("components", _components(result, source, different, wishes))
    _check_token_secret(content, wishes)
    result.put("scaling", scaling_of(source, variant, result.unmapped))
    content["alarms"] = None
    result.put("network", _network(source, first.model))
    result.put("encryption", _without_none(volume_key=source.config.get("KmsKeyId")))
    _asynchronous(content, source)
    result.put("sagemaker", _passed(result, source, variant, first))
    result.put("tags", source.user_tags)
    result.unmapped += [*reading.settings.unmapped, *source.notes]
    result.idle += reading.settings.idle
    result.differences += reading.settings.differences
    result.defaults += reading.settings.defaults
    result.head.append(f"from {source.origin}; its container is {_container_text(reading.container)}")
    return _checked(result)


def _image(
    wish: Mapping[str, str] | None, container: Container, fields: Mapping[str, Any], variant: Json
) -> dict[str, str]:
    """Return the image to deploy: the user's, or the one with the container's engine, for the same processors.

    Args:
        fields: the fields of the serving container.
    """
    image = dict(wish or {"repository": _LLAMACPP_IMAGE if container.engine == LLAMACPP else "lmi-handler"})
    types = [variant.get("InstanceType", ""), *(pool["InstanceType"] for pool in variant.get("InstancePools", ()))]
    on_arm = any(architecture(name) == "arm64" for name in types)
    on_gpus = any(family(name).startswith(GPU_FAMILIES) for name in types)
    if wish is None and container.engine == LLAMACPP:
        if on_arm:
            image["repository"] += "-arm64"
        elif on_gpus or "cuda" in str(fields.get("Image", "")):
            image["tag"] = f"{package_version()}-{_CUDA}"
    if on_arm and image_architecture(Image(**image)) != "arm64":
        image["architecture"] = "arm64"
    return image


_LLAMACPP_IMAGE, _CUDA = "lmi-handler-llamacpp", "cu130"
"""The names that docs/container.md gives to the image, and to that for GPUs."""


def _container_text(container: Container) -> str:
    """Return the name of a container and its release, such as `TGI 2.3.1`."""
    tagged, release = container.tagged_release, container.release
    also = f", treated as {release}" if tagged != release else ""
    return f"{KINDS[container.kind]} {tagged}".rstrip() + also


def _check_token_secret(content: Mapping[str, Any], wishes: Wishes) -> None:
    """Raise SpecError if the user names a secret with the hub token, but no model is on the hub."""
    models = [content["model"], *(item.get("model", {}) for item in content.get("components", ()))]
    if wishes.token_secret is not None and not any("token_secret" in model for model in models):
        raise SpecError("--token-secret applies only to a model on the hub", "This model is in S3: omit the argument.")


def _variant(source: Source, wishes: Wishes, *, beside: bool) -> Json:
    """Return the production variant to adopt.

    Raises:
        Refused: the variant does not exist or is serverless, or the endpoint has several variants and `wishes` does
            not name both a variant and another endpoint.
    """
    variants = source.config.get("ProductionVariants", ())
    names = [str(item.get("VariantName")) for item in variants]
    if len(variants) > 1 and (wishes.variant is None or not beside):
        raise Refused(
            f"{source.name or 'the endpoint'} has {len(variants)} production variants ({', '.join(names)}), but "
            "lmi deploy supports only one",
            "Adopt one of them as a separate endpoint: --variant VARIANT --name ANOTHER.",
        )
    if wishes.variant is not None and wishes.variant not in names:
        raise Refused(f"--variant {wishes.variant}: no such variant; the endpoint has {', '.join(names) or 'none'}", "")
    chosen: Json = next((item for item in variants if wishes.variant in (None, item.get("VariantName"))), {})
    if "ServerlessConfig" in chosen:
        raise Refused(
            f"{source.name or 'the endpoint'} is serverless, and serverless endpoints have no GPU",
            "Deploy the model to an endpoint with instances: pass its CreateModel request with --file, and a --name.",
        )
    return dict(chosen)


class ServingContainer(NamedTuple):
    """A serving container: the name of its component ("" if there are no components), its fields, and its model."""

    component: str
    container: Content
    model: Json


class Reading(NamedTuple):
    """A serving container's kind, its settings, and the contents of its model data."""

    container: Container
    settings: Variables
    artifact: Artifact


def _served(source: Source, variant: Json) -> list[ServingContainer]:
    """Return the first serving container, followed by those that differ from it.

    Raises:
        Refused: the endpoint serves no model, its container is not supported, or a component has a separate
            specification for each instance type.
    """
    if not source.bases:
        name = str(variant.get("ModelName", ""))
        if not name and source.endpoint:
            raise Refused(
                f"{source.name} serves nothing: its variant has no model, and there are no components",
                "Adopt it once it serves a model, or write the specification yourself.",
            )
        model = source.model(name)
        return [ServingContainer("", container_of(model, name), model)]
    first, *further = (_served_by(source, component) for component in source.bases)
    return [first, *(other for other in further if other.container != first.container)]


def _served_by(source: Source, component: Json) -> ServingContainer:
    """Return the serving container of a component.

    Raises:
        Refused: the component has a separate specification for each instance type, or its model is not supported.
    """
    name, specification = str(component["InferenceComponentName"]), component.get("Specification", {})
    if component.get("Specifications"):
        raise Refused(f"component {name} has specifications by instance type", "Write the specification yourself.")
    if (model_name := specification.get("ModelName")) is not None:
        model = source.model(str(model_name))
        return ServingContainer(name, container_of(model, str(model_name)), model)
    container = dict(specification.get("Container", {}))
    image = container.pop("DeployedImage", {}).get("SpecifiedImage")
    artifact = container.pop("ArtifactUrl", None)
    fields = {**({"Image": image} if image else {}), **container, **({"ModelDataUrl": artifact} if artifact else {})}
    return ServingContainer(name, fields, {})


# With --file, the model data may belong to another account.
_UNREAD = Artifact(problem="with --file, model data is read only with --read-data", unseen=True)


_BEATEN = "vLLM's image ignores it and serves the model data or the value of SM_VLLM_MODEL"


def _read(source: Source, served: ServingContainer, wishes: Wishes) -> Reading:
    """Read a container's kind, settings and model data.

    If the model data will no longer be used, its serving.properties is merged into the settings.
    """
    container = container_kind(str(served.container.get("Image", "")), wishes.container)
    environ = dict(served.container.get("Environment", {}))
    uri, is_prefix = data_of(served.container)
    beaten = environ.pop("HF_MODEL_ID", "") if container.kind == "vllm" and uri else ""
    artifact = source.artifacts.get(uri, _UNREAD) if uri else Artifact()
    if container.kind not in ("lmi", "ours"):  # only DJL Serving reads serving.properties, and looks into a folder
        other_files = (*([OPTIONS_FILE] if artifact.variables else []), *artifact.other_files)
        artifact = replace(artifact, variables={}, other_files=other_files, folder="")
    if container.kind == "triton":
        container = _with_repository(container, artifact, str(environ.get(NAME, "")), wishes.model)
    settings = variables(environ, container)
    if not ((is_prefix or artifact.may_serve) and _stays(wishes.model or settings.model_id)):
        settings = variables({**environ, **artifact.variables}, container)
    if beaten:
        settings.idle.append((setting_text("HF_MODEL_ID", beaten), _BEATEN))
    return Reading(container, settings, artifact)


def _with_repository(container: Container, artifact: Artifact, name: str, model: str | None) -> Container:
    """Return Triton's container with what its repository of models says."""
    engine, repository = read_repository(artifact, name, model)
    return container._replace(engine=engine, repository=repository)


def _component_parts(result: Adopted, source: Source, served: ServingContainer, wishes: Wishes) -> Content:
    """Return a component's own model, options and environment, which replace those at the top level."""
    if wishes.model is not None:
        raise SpecError(
            "--model applies only to an endpoint with one model",
            f"Component {served.component} has a different model: omit --model.",
        )
    reading, part = _read(source, served, wishes), Adopted({})
    model = _model(part, served.container, reading, wishes)
    if model != result.content["model"]:
        part.content["model"] = model
    part.unmapped += reading.settings.unmapped
    part.idle += reading.settings.idle
    part.differences += reading.settings.differences
    part.put("options", _override(reading.settings.options, result.content.get("options", {})))
    part.put("environment", _override(reading.settings.environment, result.content.get("environment", {})))
    fields = _without_owned(
        shape_of("model"), {"PrimaryContainer": _container_fields(served.container, model)}, OWNED["model"], ""
    )
    for name in fields.get("PrimaryContainer", {}):
        part.unmapped.append((name, "sagemaker.model applies to all components"))
    result.unmapped += _of_component(served.component, part.unmapped)
    result.idle += _of_component(served.component, part.idle)
    result.differences += _of_component(served.component, part.differences)
    return part.content


def _of_component(name: str, notes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"components {name}: {setting}", reason) for setting, reason in notes]


def _override(settings: Mapping[str, Any], whole: Mapping[str, Any]) -> Content:
    """Return the settings that differ from those at the top level. Settings that only the top level has are None."""
    return {key: settings.get(key) for key in (*settings, *whole) if settings.get(key) != whole.get(key)}


def _role(result: Adopted, source: Source, variant: Json, served: Sequence[ServingContainer], wishes: Wishes) -> str:
    """Return the execution role: the user's, or the first in the source. Report the source's other roles."""
    roles = _roles_by_owner(source, variant, served)
    role = wishes.role or next(iter(roles.values()), None)
    if not role:
        raise SpecError("no execution role is known", "Pass its ARN as --role ARN.")
    if wishes.role is None:
        reason = "a specification has one role, which needs the permissions of this one too"
        others = (f"ExecutionRoleArn={arn} of {owner}" for owner, arn in roles.items() if arn != role)
        result.unmapped += [(other, reason) for other in others]
    return str(role)


def _stays(model_id: str) -> bool:
    """Return whether the model ID refers to the model data that SageMaker mounts, rather than to another model."""
    return not model_id or model_id.startswith("/")


def _roles_by_owner(source: Source, variant: Json, served: Sequence[ServingContainer]) -> dict[str, str]:
    by_owner = {"the variant": variant, **{f"the model {item.component}".rstrip(): item.model for item in served}}
    by_owner["the endpoint configuration"] = source.config
    return {owner: fields["ExecutionRoleArn"] for owner, fields in by_owner.items() if fields.get("ExecutionRoleArn")}


def _model(result: Adopted, served: Json, reading: Reading, wishes: Wishes) -> Content:
    """Return the `model` section, and report the container's other model data in the comments.

    Raises:
        Refused: no location is known from which this project's image can load the model.
    """
    uri, is_prefix = data_of(served)
    settings, artifact = reading.settings, reading.artifact
    id = wishes.model or settings.model_id
    model: Content = {}
    if id.startswith("s3://"):
        model["s3"] = id if id.endswith(("/", ARCHIVE)) else f"{id}/"
    elif not _stays(id):
        model["id"] = id
    elif is_prefix or (uri.endswith(ARCHIVE) and artifact.may_serve):
        model["s3"] = uri
        if artifact.unseen and not is_prefix:
            reason = f"{artifact.problem}; SageMaker unpacks it, and the model's files must be at its top level"
            result.unmapped.append((f"ModelDataUrl={uri}", reason))
        if OPTIONS_FILE in artifact.other_files:
            reason = "the original container ignores it, but this project's image reads it: remove it"
            result.unmapped.append((f"{uri}{OPTIONS_FILE}", reason))
        if id.rstrip("/").startswith(f"{MODEL_DATA}/"):
            settings.environment["OPTION_MODEL_ID"] = id
        elif artifact.folder:
            settings.environment["OPTION_MODEL_ID"] = f"{MODEL_DATA}/{artifact.folder}"
    else:
        where = f"in the archive {uri}" if uri else (f"{id}, whose location is unknown" if id else "not named")
        reason = artifact.problem or artifact.fault or ("it contains no weights" if uri else "")
        raise Refused(
            f"the container's model is {where}{': ' * bool(reason)}{reason}",
            "Unpack the model to an S3 prefix and pass --model s3://BUCKET/PREFIX/, or pass its hub ID as --model ID.",
        )
    if uri and model.get("s3") != uri:
        result.unmapped += [*_left_behind(uri, is_prefix, artifact)]
    if settings.context is not None:
        model["context"] = settings.context
    _token(result, model, settings, wishes)
    return model


def _left_behind(uri: str, is_prefix: bool, artifact: Artifact) -> Iterator[tuple[str, str]]:
    """Yield the model data that is not carried over, with the reason."""
    field_name = "ModelDataSource" if is_prefix else "ModelDataUrl"
    if artifact.problem:
        yield f"{field_name}={uri}", f"it was not read ({artifact.problem}); nothing in it is carried over"
    elif artifact.weights:
        yield f"{field_name}={uri}", f"it contains weights ({artifact.weights}); nothing in it is carried over"
    elif is_prefix:
        yield (
            f"{field_name}={uri}",
            "the model is loaded from elsewhere, so other files there, such as model.py, are not carried over",
        )
    elif artifact.other_files:
        names = ", ".join(artifact.other_files[:_MOST_NAMES]) + ", ..." * (len(artifact.other_files) > _MOST_NAMES)
        are = "is" if len(artifact.other_files) == 1 else "are"
        yield f"{field_name}={uri}", f"{names} {are} not carried over"


_MOST_NAMES = 5  # maximum number of file names in a comment


def _token(result: Adopted, model: Content, settings: Variables, wishes: Wishes) -> None:
    """Set `model.token_secret`, or report a token in the environment that has to be moved there."""
    if wishes.token_secret is not None and "id" in model:
        model["token_secret"] = wishes.token_secret
    elif settings.hub_token:
        reason = "a model in S3 needs no token"
        if "id" in model:
            reason = "put the token into Secrets Manager and its ARN into model.token_secret (or --token-secret ARN)"
        result.unmapped += [(f"{name}=***", reason) for name in settings.hub_token]


def _instance(result: Adopted, source: Source, variant: Json) -> Content:
    instance: Content = {}
    if pools := variant.get("InstancePools", ()):
        instance["pools"] = _pools(result, pools)
    elif "InstanceType" in variant:
        instance |= {"type": variant["InstanceType"], "unchecked": True}
    if count := source.instances(variant.get("VariantName")) or variant.get("InitialInstanceCount"):
        instance["count"] = count
    if variant.get("VariantName", "AllTraffic") not in (None, "AllTraffic"):
        instance["variant"] = variant["VariantName"]
    managed = variant.get("ManagedInstanceScaling", {})
    if managed.get("Status") == "ENABLED" and source.bases:
        maximum = managed.get("MaxInstanceCount") or instance.get("count", 1)
        instance["managed"] = {"min": managed.get("MinInstanceCount", 1), "max": maximum}
        instance["count"] = min(instance.get("count", 1), maximum)
    elif managed.get("Status") == "ENABLED":
        reason = "AWS rejects it for a variant with its own model; instance.managed applies only to components"
        result.unmapped.append(("ManagedInstanceScaling", reason))
    instance |= _without_none(volume_gb=variant.get("VolumeSizeInGB"))
    if (ami := variant.get("InferenceAmiVersion")) is not None:
        if image_cuda(Image(**result.content["image"])) is None:
            instance["ami"] = ami
        else:
            reason = "the image's tag names its CUDA version, by which instance.ami: auto chooses the AMI"
            result.idle.append((f"InferenceAmiVersion={ami}", reason))
    return instance


def _pools(result: Adopted, pools: Sequence[Json]) -> list[Content]:
    """Return `instance.pools`, and report the models' names that differ by pool."""
    reason = "set the options that differ in instance.pools[].options"
    names = (pool["ModelNameOverride"] for pool in pools if "ModelNameOverride" in pool)
    result.unmapped += [(f"ModelNameOverride={name}", reason) for name in names]
    return [_without_none(type=pool["InstanceType"], priority=pool.get("Priority")) for pool in pools]


def _times(source: Source, variant: Json) -> dict[str, int]:
    """Return the timeouts that the source sets. The others are derived later from the model size."""
    parameters = [component.get("Specification", {}).get("StartupParameters", {}) for component in source.bases]
    times: dict[str, int] = {}
    for name, field_name in (
        ("download", "ModelDataDownloadTimeoutInSeconds"),
        ("startup", "ContainerStartupHealthCheckTimeoutInSeconds"),
    ):
        seconds = [fields[field_name] for fields in (*parameters, variant) if field_name in fields]
        if seconds:
            times[name] = max(seconds[: len(parameters)] or seconds)
    return times | _without_none(provision=variant.get("VariantInstanceProvisionTimeoutInSeconds"))


def _routing(result: Adopted, variant: Json) -> Any:
    routing = variant.get("RoutingConfig", {})
    if (strategy := routing.get("RoutingStrategy")) is None:
        strategy = "RANDOM"
        result.defaults.append(("routing: random", "SageMaker's default"))
    if strategy == "PREFIX_AWARE":
        prefix = routing.get("PrefixAwareRoutingConfig", {})
        names = {"PrefixLength": "prefix_length", "ConcurrencyThreshold": "concurrency_threshold"}
        return {ours: prefix[theirs] for theirs, ours in names.items() if theirs in prefix}
    if strategy == "KV_AWARE":
        result.unmapped.append(
            (
                "RoutingStrategy=KV_AWARE",
                "only AWS's own containers support it; the setting `routing` has the other strategies",
            )
        )
    return "random" if strategy == "RANDOM" else "least_outstanding"


def _components(
    result: Adopted, source: Source, different: Sequence[ServingContainer], wishes: Wishes
) -> list[Content]:
    """Return the `components` section, in which each of `different` has its own model."""
    parts_by_component = {other.component: _component_parts(result, source, other, wishes) for other in different}
    return [
        _component(result, source, item, parts_by_component.get(item["InferenceComponentName"], {}))
        for item in source.bases
    ]


def _component(result: Adopted, source: Source, item: Json, parts: Json) -> Content:
    name, specification = str(item["InferenceComponentName"]), item.get("Specification", {})
    needs, runtime = specification.get("ComputeResourceRequirements", {}), item.get("RuntimeConfig", {})
    copies = runtime.get("DesiredCopyCount", runtime.get("CopyCount"))
    if copies == 0:
        reason = "AWS cannot create a component with 0 copies, so the file says 1"
        result.unmapped.append((f"components {name}: 0 copies", reason))
    gpus = needs.get("NumberOfAcceleratorDevicesRequired")
    component = _without_none(
        name=name,
        copies=None if copies is None else max(copies, 1),
        accelerators=None if gpus is None else int(gpus),
        memory_mb=needs.get("MinMemoryRequiredInMb"),
        cpus=needs.get("NumberOfCpuCoresRequired"),
        cache=bool(specification.get("DataCacheConfig", {}).get("EnableCaching", False)),
        adapters=[*_adapters(source, name)] or None,
    )
    return {
        **component,
        **parts,
        **_without_none(sagemaker=_unowned_fields(result, "component", item, f"components {name}") or None),
    }


def _adapters(source: Source, base: str) -> Iterator[dict[str, str]]:
    for item in source.components:
        specification = item.get("Specification", {})
        if specification.get("BaseInferenceComponentName") == base:
            artifact = specification.get("Container", {}).get("ArtifactUrl", "")
            yield {"name": str(item["InferenceComponentName"]), "artifact": artifact}


def _network(source: Source, model: Json) -> Content:
    network: Content = {}
    vpc = model.get("VpcConfig") or source.config.get("VpcConfig")
    if vpc:
        network = {"subnets": list(vpc["Subnets"]), "security_groups": list(vpc["SecurityGroupIds"])}
    if model.get("EnableNetworkIsolation") or source.config.get("EnableNetworkIsolation"):
        network["isolated"] = True
    return network


def _asynchronous(content: Content, source: Source) -> None:
    """Set `async` and its key if the endpoint is asynchronous."""
    if (config := source.config.get("AsyncInferenceConfig")) is None:
        return
    output, client = config.get("OutputConfig", {}), config.get("ClientConfig", {})
    topics = output.get("NotificationConfig", {})
    content["async"] = _without_none(
        output=output.get("S3OutputPath"),
        failures=output.get("S3FailurePath"),
        concurrency=client.get("MaxConcurrentInvocationsPerInstance"),
        notify_success=topics.get("SuccessTopic"),
        notify_error=topics.get("ErrorTopic"),
    )
    if (key := output.get("KmsKeyId")) is not None:
        content["encryption"] = {**content.get("encryption", {}), "output_key": key}


def _passed(result: Adopted, source: Source, variant: Json, served: ServingContainer) -> Content:
    """Return the `sagemaker` section: all fields that the specification has no setting for."""
    if "ImageConfig" in served.container:
        result.idle.append(("ImageConfig", "it applies only to the original image"))
    container = _container_fields(served.container, result.content["model"])
    model = {name: value for name, value in served.model.items() if name != "Containers"}
    parts = {
        "endpoint_config": source.config,
        "variant": variant,
        "model": {**model, "PrimaryContainer": container},
    }
    parts_left = {part: _unowned_fields(result, part, fields, part) for part, fields in parts.items()}
    if "managed" not in result.content["instance"]:
        parts_left["variant"].pop("ManagedInstanceScaling", None)
    return {part: fields for part, fields in parts_left.items() if fields}


def _container_fields(container: Json, model: Json) -> Content:
    """Return the container's fields without ImageConfig, and without ModelDataSource unless the model is in S3."""
    omitted = ("ImageConfig",) if "s3" in model else ("ImageConfig", "ModelDataSource")
    return {name: value for name, value in container.items() if name not in omitted}


def _unowned_fields(result: Adopted, part: str, content: Json, path: str) -> Content:
    """Return the fields of a part that the specification has no setting for, under SageMaker's names."""
    fields = _without_owned(shape_of(part), content, OWNED[part], "")
    for name in list(fields):
        wrong = (line.partition(": ") for line in problems(part, {name: fields[name]}))
        reason = next((reason for where, _, reason in wrong if f".{name}" in where), None)
        if reason is None:
            result.passed.append(f"{path}.{name}")
        else:
            del fields[name]
            result.unmapped.append((f"{path}.{name}", reason))
    return fields


def _without_owned(shape: Any, content: Json, owned: Mapping[str, str], path: str) -> Content:
    fields: Content = {}
    for name, value in content.items():
        below = f"{path}.{name}".removeprefix(".")
        if below in owned or name not in shape.members or value in (None, {}, [], ""):
            continue
        if shape.members[name].type_name == "structure" and isinstance(value, Mapping):
            value = _without_owned(shape.members[name], value, owned, below)
            if not value:
                continue
        fields[name] = value
    return fields


def _checked(result: Adopted) -> Adopted:
    """Move settings that a specification does not support to `unmapped`, with the reason.

    Raises:
        SpecError: the remaining settings are not a valid specification.
    """
    for _ in range(_MOST_PASSES):
        lines = content_problems(result.content)
        if not lines:
            return result
        dropped = [line for line in lines if _dropped(result, line)]
        if not dropped:
            raise SpecError(f"the endpoint has settings that a specification does not support: {'; '.join(lines)}")
    raise SpecError("the endpoint has settings that a specification does not support")


_MOST_PASSES = 12  # a pass may reveal problems that an earlier problem has hidden


def _dropped(result: Adopted, line: str) -> bool:
    """Move the field that a message names to `unmapped` if its section is optional. Return whether it was moved."""
    path, _, reason = line.partition(": ")
    names = path.split(".")
    if names[0] not in ("sagemaker", "environment", "options", "tags", "timeouts", "capture"):
        return False
    level: Any = result.content
    for name in names[:-1]:
        level = level.get(name) if isinstance(level, dict) else None
    if isinstance(level, dict) and names[-1] in level:
        level.pop(names[-1])
    else:
        result.content.pop(names[0], None)
    result.unmapped.append((path, reason))
    result.passed = [field for field in result.passed if not path.endswith(field)]
    return True


# -- check a file's fields against AWS's shapes ------------------------------------------------------------------------


_WORDS = {
    "structure": "an object",
    "map": "an object",
    "list": "an array",
    "string": "a string (quote numbers, and replace references with values)",
}
"""Maps each type to its name in messages."""


def checked(file: str, path: str, operation: str, content: Any) -> list[tuple[str, str]]:
    """Check a response of SageMaker's Describe calls, or the request of the matching Create call.

    Returns:
        A pair `(field, reason)` for each field that is in neither of the two AWS shapes.

    Raises:
        SpecError: a field has the wrong type or is missing. The message names the first such field.
    """
    api = sagemaker()
    shapes = [api.operation_model(operation).output_shape]
    if operation in _CREATED:
        shapes.append(api.operation_model(operation.replace("Describe", "Create")).input_shape)
    problems = [[*_problems(shape, content, path)] for shape in shapes]
    wrong = [[problem for problem in items if problem[1] != _NO_FIELD] for items in problems]
    if all(wrong):
        raise SpecError(f"{file}: {': '.join(wrong[0][0])}")
    return [problem for problem in problems[0] if problem in problems[-1] and problem[1] == _NO_FIELD]


_NO_FIELD = "AWS's API has no such field"


def _problems(shape: Any, value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield each field that does not match AWS's shape, with the reason."""
    types, words = TYPES.get(shape.type_name, ((), ""))
    if types and type(value) not in types:
        yield path, f"must be {_WORDS.get(shape.type_name, words)}"
    elif shape.type_name == "structure":
        for name in shape.required_members:
            if name in _NEEDED and name not in value:
                yield f"{path}.{name}".removeprefix("."), "must be given"
        for name, item in value.items():
            where = f"{path}.{name}".removeprefix(".")
            if name in shape.members:
                yield from _problems(shape.members[name], item, where)
            elif name != "ResponseMetadata":  # added by boto3
                yield where, _NO_FIELD
    elif shape.type_name == "list":
        for number, item in enumerate(value):
            yield from _problems(shape.member, item, f"{path}[{number}]")
    elif shape.type_name == "map":
        for name, item in value.items():
            yield from _problems(shape.value, item, f"{path}.{name}")


_CREATED = ("DescribeEndpoint", "DescribeEndpointConfig", "DescribeInferenceComponent", "DescribeModel")
"""Describe calls for which a file may contain either the response or the matching Create request."""

_NEEDED = ("InferenceComponentName", "Subnets", "SecurityGroupIds", "InstanceType", "Key", "Value")
"""Required fields that adopt reads without checking that they exist."""
