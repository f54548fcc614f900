"""Models and endpoint configurations cannot be changed: which version is in use, and which ones may go. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deploy.deployer.live import Live, LiveResource
from deploy.resources.resource import Json, Kind, Resource


def current_version(resource: Resource, live: Live) -> LiveResource | None:
    """What the wanted one takes the place of: the version that the endpoint, or a component, uses now."""
    endpoint = live.endpoint
    if endpoint is None:
        return None
    config = live.get(Kind.ENDPOINT_CONFIG, (str(endpoint.said["EndpointConfigName"]),))
    if resource.kind is Kind.ENDPOINT_CONFIG:
        return config
    if resource.kind is not Kind.MODEL:
        return None
    used = [*_models([config.said] if config is not None else []), *_component_models(live)]
    return next((found for name in used if (found := live.get(Kind.MODEL, (name,))) is not None), None)


def outdated(wanted: Sequence[Resource], live: Live, keep: int) -> list[LiveResource]:
    """Those of ours that may go: beyond the `keep` newest configurations, and the models that none of the rest uses.

    Never what serves, nor what is wanted; none while versions serve beside each other, as AWS names only one. A
    version that a killed run left behind is one of these too.
    """
    if live.endpoint is not None and live.endpoint.mixed:
        return []
    names = {(one.kind, one.name) for one in wanted}
    serving = {str(live.endpoint.said["EndpointConfigName"])} if live.endpoint is not None else set()
    configs = _newest(one for one in live.ours if one.kind is Kind.ENDPOINT_CONFIG)
    sure = [one for one in configs if (one.kind, one.name) in names]
    others = [one for one in configs if one not in sure]
    # The one that serves now is what an update would be undone to: it is the first to be kept.
    others.sort(key=lambda one: one.name not in serving)
    coming = sum(one.kind is Kind.ENDPOINT_CONFIG for one in wanted)
    kept = [*sure, *others[: max(keep - coming, 0)]]
    gone = [one for one in configs if one not in kept]
    used = {name for kind, name in names if kind is Kind.MODEL}
    used |= set(_models(one.said for one in kept))  # components are changed, or gone, before any model goes
    models = _newest(one for one in live.ours if one.kind is Kind.MODEL and one.name not in used)
    if any(one.kind is Kind.COMPONENT for one in wanted):  # no configuration names their models
        models = models[max(keep - 1, 0) :]
    return [*gone, *models]


def _newest(things: Iterable[LiveResource]) -> list[LiveResource]:
    return sorted(things, key=lambda one: (one.said["CreationTime"], one.name), reverse=True)


def _models(configs: Iterable[Json]) -> list[str]:
    return [one["ModelName"] for config in configs for one in config["ProductionVariants"] if "ModelName" in one]


def _component_models(live: Live) -> list[str]:
    specifications = [one.said.get("Specification", {}) for one in live.of(Kind.COMPONENT)]
    return [str(one["ModelName"]) for one in specifications if "ModelName" in one]
