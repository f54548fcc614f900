"""Plan to add a deployment to another owner's endpoint as a shadow variant, to promote it, or to remove it.

The endpoint keeps its owner and its tags. It only gets a copy of its configuration with the shadow added. A tag of this
copy names the previous configuration, to which the endpoint returns when the shadow is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.deployer.live import Live, LiveResource
from deploy.deployer.plan import Action, Plan, Verb, action_of, in_order_of_removal, plan, refuse_foreign, removal_of
from deploy.errors import NotThere, Refused, SpecError
from deploy.resources.resource import (
    READY,
    SHADOW,
    TAG_BEFORE,
    TAG_DEPLOYMENT,
    TAG_STACK,
    Json,
    Kind,
    Resource,
    batch_name,
    containers,
    digest,
    is_version_of,
    tag_list,
    user_tags,
    version_name,
)
from deploy.service_model import sagemaker
from deploy.spec import Spec

_LIVE_WEIGHT, _FIRST_WEIGHT = "DesiredWeight", "InitialVariantWeight"
_CAPTURE = "DataCaptureConfig"
_AGAIN = "Run this again when the endpoint is InService."
_DELETE = "Have its owner delete it first."


@dataclass(frozen=True)
class Share:
    """A shadow's share of the requests, and its number of instances.

    Attributes:
        percent: percentage of the requests that are copied to the shadow.
        count: number of instances of the shadow.
    """

    percent: int = 10
    count: int = 1


def refuse_specification(spec: Spec) -> None:
    """Refuse settings that SageMaker does not support with shadow variants, and specifications with their own shadow.

    Raises:
        SpecError: the specification has such a setting, which the message names.
    """
    for is_set, setting, reason in (
        (bool(spec.components), "components", "SageMaker does not support shadow variants with inference components"),
        (spec.endpoint is not None, "endpoint", "SageMaker does not support shadow variants with inference components"),
        (spec.asynchronous is not None, "async", "SageMaker does not support shadow variants of async endpoints"),
        (spec.shadow is not None, "shadow", "with --shadow the file itself describes the shadow"),
        (
            "ShadowProductionVariants" in spec.sagemaker.endpoint_config,
            "sagemaker.endpoint_config.ShadowProductionVariants",
            "with --shadow the file itself describes the shadow",
        ),
    ):
        if is_set:
            raise SpecError(f"{setting}: {reason}", f"Omit {setting}, or use `lmi deploy up` without --shadow.")


def beside(spec: Spec, resources: Sequence[Resource], live: Live, share: Share) -> tuple[Resource, ...]:
    """Return the resources of a shadow: models, a configuration, and the endpoint with that configuration.

    Args:
        resources: resources of the deployment without `--shadow`.

    Raises:
        NotThere: the endpoint does not exist.
        Refused: the endpoint cannot get a shadow.
    """
    endpoint = live.endpoint
    if endpoint is None:
        raise NotThere(f"there is no endpoint {spec.name} to add a shadow to", "`lmi deploy up` creates it.")
    if reason := next(_reasons(spec, endpoint, live), None):
        raise Refused(f"endpoint/{endpoint.name} {reason[0]}", reason[1])
    served = live.config
    assert served is not None
    models = [item for item in resources if item.kind is Kind.MODEL]
    (config_request,) = (item.request for item in resources if item.kind is Kind.ENDPOINT_CONFIG)
    content = _content(spec, config_request, served, _weight(endpoint, served), share)
    config = _config(spec.name, content, [*config_request["Tags"], {"Key": TAG_BEFORE, "Value": before(live)}], models)
    return (*models, config, _serving(spec.name, config.name, _kept(content, served.description)))


def _content(spec: Spec, request: Json, served: LiveResource, weight: float, share: Share) -> dict[str, Any]:
    """Return the content of a configuration that adds the shadow to the served one."""
    shadow = _variant(request["ProductionVariants"][0], weight, share)
    content = {**_creation_fields(served.description), "ShadowProductionVariants": [shadow]}
    if spec.capture is not None:  # SageMaker discards the shadow's responses otherwise
        content[_CAPTURE] = request[_CAPTURE]
    return content


def plan_shadow(desired: Sequence[Resource], live: Live) -> Plan:
    """Plan the creation of the shadow from the resources of `beside`, and the deletion of an earlier shadow's parts.

    Raises:
        Refused: a model or configuration has a desired name but another owner.
    """
    refuse_foreign([item for item in desired if item.kind is not Kind.ENDPOINT], live, _DELETE)
    actions = [action for resource in desired for action in action_of(resource, live, desired)]
    keep = {item.name for item in desired} | {before(live)}
    left = [removal_of(item, "it belonged to an earlier shadow") for item in _removable_parts(live, keep)]
    return Plan(live.deployment, (*actions, *left), live.online)


def plan_promotion(desired: Sequence[Resource], live: Live, keep: int) -> Plan:
    """Plan the promotion of the shadow, which takes over the endpoint with its current number of instances.

    Args:
        desired: resources of the deployment without `--shadow`.
        keep: number of configuration versions to keep, including the new version.

    Raises:
        NotThere: there is no shadow.
        Refused: the endpoint is not in service, the shadow differs from the specification, or a model or configuration
            has a desired name but another owner.
    """
    _refuse_other_shadow(desired, live)
    refuse_foreign([item for item in desired if item.kind in (Kind.MODEL, Kind.ENDPOINT_CONFIG)], live, _DELETE)
    (config,) = (item.request for item in desired if item.kind is Kind.ENDPOINT_CONFIG)
    kept = _kept(config, {} if live.config is None else live.config.description)
    retaining = [
        replace(item, update={**item.update, **kept}) if item.kind is Kind.ENDPOINT else item for item in desired
    ]
    promotion = plan(retaining, live, keep=keep, adopt=True)
    gone = {action.key for action in promotion.actions if action.verb is Verb.DELETE}
    ended = [
        removal_of(item, "it has the shadow variant")
        for item in live.owned
        if TAG_BEFORE in item.tags and item.key not in gone
    ]
    return replace(promotion, actions=(*promotion.actions, *ended))


def plan_end(live: Live) -> Plan:
    """Plan to return the endpoint to its previous configuration, and to delete the shadow's resources.

    If the previous configuration was deleted, the endpoint gets a copy of the current configuration without the shadow.

    Raises:
        Refused: the endpoint is the deployment's own, can only be deleted, or has a configuration that cannot be read.
    """
    endpoint, config = live.endpoint, _shadow_config(live)
    if endpoint is not None and endpoint.failed:
        raise Refused(f"endpoint/{endpoint.name} is {endpoint.status}: AWS can only delete it", "Its owner must do so.")
    if endpoint is not None and endpoint.is_of(live.deployment):
        raise Refused(
            f"endpoint/{endpoint.name} belongs to this deployment, so `up --shadow` cannot have added a shadow",
            "Remove shadow from its file and run `lmi deploy up`, or delete everything with `lmi deploy down`.",
        )
    if endpoint is not None and live.config is None and _removable_parts(live, ()):
        raise Refused(
            f"endpoint/{endpoint.name} serves the configuration {endpoint.description['EndpointConfigName']}, which "
            "was deleted or cannot be read. As it may still contain the shadow, the shadow's resources are kept",
            "`lmi deploy iam FILE --adopt` prints the policy needed to read the configuration. If it was deleted, the "
            "endpoint's owner must first switch the endpoint to another configuration; then repeat this command.",
        )
    back: list[Action] = []
    keep = {before(live)}
    if endpoint is not None and config is not None:
        name, back = _back(live, endpoint, config)
        keep = {name}
    elif endpoint is not None and endpoint.mixed and any(TAG_BEFORE in item.tags for item in live.owned):
        # The update that added the shadow could not be rolled back, so parts of the endpoint may still use it.
        back += action_of(_serving(endpoint.name, before(live), _kept({}, {})), live, ())
    left = [removal_of(item, "") for item in _removable_parts(live, keep)]
    return Plan(live.deployment, (*back, *left))


def _back(live: Live, endpoint: LiveResource, config: LiveResource) -> tuple[str, list[Action]]:
    """Return the name of the configuration that the endpoint gets again, and the actions for it."""
    name = config.tags[TAG_BEFORE]
    actions: list[Action] = []
    previous = live.get(Kind.ENDPOINT_CONFIG, (name,))
    if previous is None:
        copy = _without_shadow(live, config)
        name = copy.name
        actions += action_of(copy, live, ())
    kept = _kept((config if previous is None else previous).description, config.description)
    return name, [*actions, *action_of(_serving(endpoint.name, name, kept), live, ())]


def before(live: Live) -> str:
    """Return the name of the endpoint's configuration or, if that has a shadow, of the previous configuration."""
    config = live.config
    return "" if config is None else config.tags.get(TAG_BEFORE, config.name)


def _refuse_other_shadow(desired: Sequence[Resource], live: Live) -> None:
    """Refuse to promote a shadow that does not exist or differs from the specification. A promotion may be repeated.

    Raises:
        NotThere, Refused: the promotion is refused; see `plan_promotion`.
    """
    endpoint, config = live.endpoint, live.config
    desired_names = {item.name for item in desired}
    if endpoint is not None and config is not None and config.is_of(live.deployment) and config.name in desired_names:
        return
    config = _shadow_config(live)
    if endpoint is None or config is None:
        raise NotThere(f"{live.deployment} has no shadow that `up --shadow` added", "Create it first.")
    if endpoint.status not in READY:
        raise Refused(f"endpoint/{endpoint.name} is {endpoint.status}", _AGAIN)
    shadow = str(config.description["ShadowProductionVariants"][0]["ModelName"])
    models = [item.name for item in desired if item.kind is Kind.MODEL]
    if shadow not in models:
        raise Refused(
            f"the running shadow differs from the file: its model is {shadow}, but the file's is {models[0]}",
            "Run `lmi deploy up --shadow` with this file first, or pass the file that created the shadow.",
        )


def _reasons(spec: Spec, endpoint: LiveResource, live: Live) -> Iterator[tuple[str, str]]:
    """Yield each reason why the endpoint cannot get a shadow, with advice."""
    owner, stack = endpoint.tags.get(TAG_DEPLOYMENT), endpoint.tags.get(TAG_STACK)
    if owner == live.deployment:
        yield "belongs to this deployment", "Add shadow: to its file, and run `lmi deploy up` without --shadow."
    if owner is not None:
        yield f"belongs to another deployment of lmi deploy, {owner}", "Add shadow: to that deployment's file."
    if stack is not None:
        yield (
            f"belongs to the CloudFormation stack {stack}, which would undo changes by lmi deploy",
            "Remove it from the stack first (DeletionPolicy: Retain).",
        )
    if endpoint.status not in READY:
        yield f"is {endpoint.status}, and only an endpoint in service can get a shadow variant", _AGAIN
    config = live.config
    if config is None:
        yield (
            f"serves the configuration {endpoint.description['EndpointConfigName']}, which was deleted or cannot be "
            "read, so no shadow variant can be added",
            "`lmi deploy iam FILE --adopt` prints the policy needed to read the configuration.",
        )
        return
    yield from _unsupported(spec, config, live)


def _unsupported(spec: Spec, config: LiveResource, live: Live) -> Iterator[tuple[str, str]]:
    none = "Create a separate endpoint instead: `lmi deploy adopt --name ANOTHER` writes its file."
    variants = config.description["ProductionVariants"]
    names = [str(variant["VariantName"]) for variant in variants]
    if "AsyncInferenceConfig" in config.description:
        yield "is asynchronous, and SageMaker does not support shadow variants of async endpoints", none
    if any("ServerlessConfig" in variant for variant in variants):
        yield "is serverless, and SageMaker does not support shadow variants of serverless endpoints", none
    if live.foreign_components or live.of(Kind.COMPONENT) or any("ModelName" not in variant for variant in variants):
        yield "has inference components, and SageMaker does not support shadow variants with them", none
    if len(variants) > 1:
        yield (
            f"has {len(variants)} production variants ({', '.join(names)}): SageMaker supports shadow variants "
            "with only one production variant",
            none,
        )
    if spec.instance.variant not in names:
        yield (
            f"has the production variant {names[0]}, but the file's is {spec.instance.variant}",
            f"Set instance.variant: {names[0]}, so that the shadow can take its place.",
        )
    shadows = [str(variant["VariantName"]) for variant in config.description.get("ShadowProductionVariants", ())]
    if shadows and not config.is_of(live.deployment):
        yield (
            f"already has a shadow of its owner, {shadows[0]}, and SageMaker allows only one shadow",
            "Have that shadow removed first.",
        )
    for name in [str(variant["ModelName"]) for variant in variants if "ModelName" in variant]:
        if _has_several_models(live.get(Kind.MODEL, (name,))):
            yield (
                f"serves {name}, which has several containers or models: SageMaker does not support shadow "
                "variants with it",
                none,
            )


def _has_several_models(model: LiveResource | None) -> bool:
    parts = containers(model.description) if model is not None else []
    return len(parts) > 1 or any(part.get("Mode") == "MultiModel" for part in parts)


def _variant(variant: Json, weight: float, share: Share) -> dict[str, Any]:
    """Return the shadow variant, which is a copy of the deployment's variant with the shadow's weight and instances.

    Its name depends on its content, because an update keeps the number of instances and the weight of a variant with
    the same name. It does not use a capacity reservation, which is for the serving variant.
    """
    content = {
        name: value for name, value in variant.items() if name not in ("VariantName", "CapacityReservationConfig")
    }
    content |= {"InitialInstanceCount": share.count, "InitialVariantWeight": round(weight * share.percent / 100, 6)}
    return {"VariantName": f"{SHADOW}-{digest(content)}", **content}


def _weight(endpoint: LiveResource, config: LiveResource) -> float:
    """Return the serving variant's weight. A shadow's share of the requests is its own weight divided by this weight.

    Raises:
        Refused: the weight is 0, so no requests can be copied.
    """
    (variant,) = config.description["ProductionVariants"]
    now: Json = next(iter(endpoint.description.get("ProductionVariants", ())), {})
    weight = float(now.get(_LIVE_WEIGHT, variant.get(_FIRST_WEIGHT, 1.0)))
    if not weight:
        raise Refused(
            f"endpoint/{endpoint.name}: the weight of {variant['VariantName']} is 0, so there are no requests to copy",
            "Set a weight for the variant first (UpdateEndpointWeightsAndCapacities).",
        )
    return weight


def _creation_fields(description: Json) -> dict[str, Any]:
    """Convert a configuration's description to arguments of CreateEndpointConfig, without name, tags and shadow."""
    omitted = ("EndpointConfigName", "ShadowProductionVariants", "Tags")
    fields = sagemaker().operation_model("CreateEndpointConfig").input_shape.members
    return {name: value for name, value in description.items() if name in fields and name not in omitted and value}


def _config(deployment: str, content: Json, tags: Sequence[Json], models: Sequence[Resource] = ()) -> Resource:
    """Return a configuration that depends on the models. Its name contains a digest of its content."""
    name = version_name(deployment, content)
    request = {"EndpointConfigName": name, **content, "Tags": tags}
    return Resource(Kind.ENDPOINT_CONFIG, name, request, needs=tuple(model.key for model in models))


def _serving(name: str, config: str, kept: Json) -> Resource:
    """Return the endpoint with another configuration.

    Args:
        kept: fields of the update from `_kept`.
    """
    request = {"EndpointName": name, "EndpointConfigName": config}
    return Resource(Kind.ENDPOINT, name, request, update={**request, **kept})


def _kept(desired: Json, current: Json) -> dict[str, Any]:
    """Return the fields of an update that keep the variants' instances and weights, and an unchanged data capture.

    Args:
        desired, current: the configurations after and before the update.
    """
    fields: dict[str, Any] = {"RetainAllVariantProperties": True}
    if desired.get(_CAPTURE) != current.get(_CAPTURE):
        fields["ExcludeRetainedVariantProperties"] = [{"VariantPropertyType": _CAPTURE}]
    return fields


def _shadow_config(live: Live) -> LiveResource | None:
    """Return the endpoint's configuration if it contains the deployment's shadow, or None."""
    config = live.config
    return config if config is not None and config.is_of(live.deployment) and TAG_BEFORE in config.tags else None


def _without_shadow(live: Live, config: LiveResource) -> Resource:
    tags = {**user_tags(config.tags), TAG_DEPLOYMENT: live.deployment}
    return _config(live.deployment, _creation_fields(config.description), tag_list(tags))


def _removable_parts(live: Live, keep: Collection[str]) -> list[LiveResource]:
    """Return the deployment's models and configurations to delete.

    Models of the serving variants, and models that batch transform jobs may use, are kept.

    Args:
        keep: names of further resources to keep.
    """
    batch = batch_name(live.deployment)
    versions = [item for item in live.owned if item.kind in (Kind.MODEL, Kind.ENDPOINT_CONFIG)]
    stay = {*keep, *(item.get("ModelName") for item in live.variants)}
    return in_order_of_removal(
        [item for item in versions if item.name not in stay and not is_version_of(batch, item.name)]
    )
