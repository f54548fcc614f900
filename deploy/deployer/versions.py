"""Versions of models and endpoint configurations, which AWS cannot change: the current and the outdated. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deploy.deployer.live import Live, LiveResource
from deploy.resources.names import batch_name, is_version_of
from deploy.resources.resource import Json, Kind, Resource, specifications


def current_version(resource: Resource, live: Live, desired: Sequence[Resource] = ()) -> LiveResource | None:
    """Return the version that the endpoint, or a component, uses now.

    Args:
        desired: all resources; a model's earlier version is that of the components which are to have the model.
    """
    endpoint = live.endpoint
    if endpoint is None:
        return None
    config = live.config
    if resource.kind is Kind.ENDPOINT_CONFIG:
        return config
    if resource.kind is not Kind.MODEL:
        return None
    users = [item.name for item in desired if item.kind is Kind.COMPONENT and resource.key in item.needs]
    used_models = [*_models([config.description] if config is not None else []), *_component_models(live, users)]
    return next((existing for name in used_models if (existing := live.get(Kind.MODEL, (name,))) is not None), None)


def outdated(desired: Sequence[Resource], live: Live, keep: int) -> list[LiveResource]:
    """Return the versions to delete: configurations beyond the `keep` newest, and models that no remaining one uses.

    Serving and desired versions always stay. While two versions serve side by side nothing is outdated, as AWS names
    only one of them. The version of a killed run counts too.
    """
    if live.endpoint is not None and live.endpoint.mixed:
        return []
    names = {(item.kind, item.name) for item in desired}
    serving = {str(live.endpoint.description["EndpointConfigName"])} if live.endpoint is not None else set()
    configs = _newest(item for item in live.owned if item.kind is Kind.ENDPOINT_CONFIG)
    current = [item for item in configs if (item.kind, item.name) in names]
    others = [item for item in configs if item not in current]
    # The serving version is the target of a rollback: it is kept first.
    others.sort(key=lambda item: item.name not in serving)
    coming = sum(item.kind is Kind.ENDPOINT_CONFIG for item in desired)
    retained = [*current, *others[: max(keep - coming, 0)]]
    removable = [item for item in configs if item not in retained]
    used_models = {name for kind, name in names if kind is Kind.MODEL}
    # Components are changed or deleted before any model.
    used_models |= set(_models(item.description for item in retained))
    batch = batch_name(live.deployment)  # whose models jobs may use; they go with the deployment
    models = _newest(
        item
        for item in live.owned
        if item.kind is Kind.MODEL and item.name not in used_models and not is_version_of(batch, item.name)
    )
    if any(item.kind is Kind.COMPONENT for item in desired):  # with components no configuration names the models
        of_version = sum(item.kind is Kind.MODEL for item in desired)
        models = models[max(keep - 1, 0) * of_version :]
    return [*removable, *models]


def _newest(resources: Iterable[LiveResource]) -> list[LiveResource]:
    return sorted(resources, key=lambda item: (item.description["CreationTime"], item.name), reverse=True)


def _models(configs: Iterable[Json]) -> list[str]:
    variants = [
        item
        for config in configs
        for item in (*config["ProductionVariants"], *config.get("ShadowProductionVariants", ()))
    ]
    names = [item["ModelName"] for item in variants if "ModelName" in item]
    pools = [pool for item in variants for pool in item.get("InstancePools", ())]
    return [*names, *(pool["ModelNameOverride"] for pool in pools if "ModelNameOverride" in pool)]


def _component_models(live: Live, names: Sequence[str]) -> list[str]:
    components = [item for item in live.of(Kind.COMPONENT) if item.name in names]
    every = [one for item in components for one in specifications(item.description)]
    return [str(item["ModelName"]) for item in every if "ModelName" in item]
