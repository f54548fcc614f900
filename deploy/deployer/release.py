"""Keep the LMI release of an endpoint that is taken over, so that its responses do not change.

The tag of AWS's image contains the release. `--adopt` writes the release to the model's environment, where later runs
read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from botocore.exceptions import ClientError

from deploy.aws import Aws, components_of, is_denied
from deploy.deployer.calls import show
from deploy.deployer.live import Live, LiveResource
from deploy.deployer.preparation import Comparison, Preparation, compare, compare_beside, compare_promotion
from deploy.deployer.shadow import Share
from deploy.resources.build import resources
from deploy.resources.resource import Json, Kind, containers, specifications
from deploy.spec import Spec
from deploy.spec.components import is_guest, servers
from deploy.spec.options import is_aws_image, settings_of
from handler.config.lmi_version import KEY, release_of
from handler.config.options.names import variable
from handler.config.sources import Setting, from_file

_VARIABLE = variable(KEY)
_FIELD = f"options.{KEY.removeprefix('option.')}"


def compare_online(
    preparation: Preparation, aws: Aws, live: Live, *, adopt: bool, share: Share | None = None, promote: bool = False
) -> tuple[Preparation, Comparison]:
    """Return the preparation with the endpoint's LMI release, and its comparison with the existing resources.

    Args:
        adopt: whether to take over resources that have a desired name but another owner.
        share: the shadow's share of the requests if a shadow is compared, or None otherwise.
        promote: whether to compare the promotion of the shadow.

    Raises:
        Refused, NotThere, SpecError: the existing resources do not allow the plan; see `compare`, `compare_beside` and
            `compare_promotion`.
    """
    preparation, notes = keep_release(preparation, aws, live, adopt=adopt or promote or share is not None)
    if share is not None:
        preparation, comparison = compare_beside(preparation, aws, live, share)
    elif promote:
        comparison = compare_promotion(preparation, aws, live)
    else:
        comparison = compare(preparation, aws, live, adopt=adopt)
    return preparation, replace(comparison, warnings=(*notes, *comparison.warnings))


def keep_release(preparation: Preparation, aws: Aws, live: Live, *, adopt: bool) -> tuple[Preparation, tuple[str, ...]]:
    """Return the preparation with the endpoint's LMI release, and warnings, each as a sentence.

    The release is not added if the specification already names a release or uses AWS's own image.

    Args:
        adopt: whether the endpoint is taken over from another owner.
    """
    spec, endpoint = preparation.spec, live.endpoint
    without = [server for server in servers(spec) if _lacks_release(preparation, server)]
    if endpoint is None or not without:
        return preparation, ()
    chosen = _component_names(spec) - {name for server in without for name in _component_names(server)}
    try:
        releases = _releases(endpoint, aws, live, chosen, adopt=adopt)
    except ClientError as error:
        if not is_denied(error):
            raise
        return preparation, (f"reading the image of {endpoint.name} is denied: set {_FIELD} to its LMI release",)
    if len(releases) > 1:
        note = (
            f"{endpoint.name} responds like LMI {' and '.join(sorted(releases))}: set {_FIELD} to the release to keep"
        )
        return preparation, (note,)
    if not releases:
        return preparation, ()
    (version,) = releases
    note = f"{endpoint.name} keeps responding like LMI {version}: set {_FIELD}: '{version}', or another release"
    return _with_spec(preparation, _with_release(spec, version, chosen)), (note,)


def _component_names(spec: Spec) -> set[str]:
    return {component.name for component in spec.components}


def _with_spec(preparation: Preparation, spec: Spec) -> Preparation:
    """Return a copy of the preparation for another specification, with the same decision."""
    desired = resources(spec, preparation.decision, allow_plaintext_secret=preparation.allow_plaintext_secret)
    return replace(preparation, spec=spec, resources_in_order=desired)


def _with_release(spec: Spec, version: str, component_names: Collection[str]) -> Spec:
    """Return the specification with a release for all components that are not in `component_names`."""
    if not component_names:
        return spec.model_copy(update={"environment": {**spec.environment, _VARIABLE: version}})
    components = tuple(
        item
        if item.name in component_names
        else item.model_copy(update={"environment": {**item.environment, _VARIABLE: version}})
        for item in spec.components
    )
    return spec.model_copy(update={"components": components})


def _lacks_release(preparation: Preparation, spec: Spec) -> bool:
    """Return whether a server uses this project's image but its specification does not name a release."""
    if is_aws_image(preparation.decision.of(spec).image):
        return False
    file = spec.model.directory / "serving.properties" if spec.model.directory else None
    keys = [item.key for item in from_file(file) if isinstance(item, Setting)] if file and file.is_file() else []
    return KEY not in keys and all(item.name != _VARIABLE for item in settings_of(spec.options, spec.environment))


def _releases(endpoint: LiveResource, aws: Aws, live: Live, without: Collection[str], *, adopt: bool) -> set[str]:
    """Return the known releases of an endpoint's containers; see `_containers`."""
    parts = _containers(endpoint, aws, live, without, adopt=adopt)
    return {_release(container, adopt=adopt) for container in parts} - {""}


def _containers(
    endpoint: LiveResource, aws: Aws, live: Live, without: Collection[str], *, adopt: bool
) -> Iterator[Json]:
    """Yield the containers of an endpoint's models. Without `adopt`, only resources in `live` are used.

    Args:
        without: names of components to omit.
    """
    config = str(endpoint.description["EndpointConfigName"])
    fields = _described(Kind.ENDPOINT_CONFIG, config, aws, live, adopt=adopt) or {}
    for part in [*fields.get("ProductionVariants", ()), *_components(endpoint.name, aws, live, without, adopt=adopt)]:
        if (name := part.get("ModelName")) is not None:
            model = _described(Kind.MODEL, name, aws, live, adopt=adopt) or {}
            yield from containers(model)
        elif (container := part.get("Container")) is not None:
            yield {**container, "Image": container.get("DeployedImage", {}).get("SpecifiedImage", "")}


def _components(endpoint: str, aws: Aws, live: Live, without: Collection[str], *, adopt: bool) -> Iterator[Json]:
    """Yield the specifications of the endpoint's inference components."""
    if not adopt or is_guest(live.deployment):  # a guest takes over only components with desired names
        components = [component for component in live.of(Kind.COMPONENT) if component.name not in without]
        yield from (part for component in components for part in specifications(component.description))
        return
    for name in components_of(aws, endpoint):
        if name not in without:
            yield from specifications(_described(Kind.COMPONENT, name, aws, live, adopt=True) or {})


def _described(kind: Kind, name: str, aws: Aws, live: Live, *, adopt: bool) -> Json | None:
    existing = live.get(kind, (name,))
    if existing is not None:
        return existing.description
    return show(aws, kind, (name,)) if adopt else None


def _release(container: Json, *, adopt: bool) -> str:
    image = str(container.get("Image", ""))
    if adopt and is_aws_image(image):
        return str(release_of(image.rpartition(":")[2]) or "")
    return str(container.get("Environment", {}).get(_VARIABLE, ""))
