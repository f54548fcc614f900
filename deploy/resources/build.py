"""Build all resources of a deployment from its specification and decision. Pure.

The name of a resource that AWS cannot change (model, endpoint configuration) ends in a digest of its request. Tags are
not in the digest, as one of them is the specification's own digest: a changed alarm must not replace the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.errors import Refused, SpecError
from deploy.resolve.decision import Decision, spec_on
from deploy.resources.components import adapter, component
from deploy.resources.endpoint_config import endpoint_config, model
from deploy.resources.resource import Kind, Resource, digest, merged, tags
from deploy.resources.scaling import component_alarms, endpoint_alarms, scaling
from deploy.resources.updating import endpoint_deployment, update_warnings
from deploy.spec import Spec
from deploy.spec.components import servers, shadow_of, title
from deploy.spec.sections import Capture


def endpoint(
    spec: Spec, decision: Decision, config: Resource, alarms: Sequence[Resource], tags: list[dict[str, str]]
) -> Resource:
    """Build the endpoint.

    Args:
        alarms: they trigger the rollback of an update, and must exist before it.
    """
    scaled = spec.scaling is not None or spec.instance.managed is not None
    return Resource(
        Kind.ENDPOINT,
        spec.name,
        {"EndpointName": spec.name, "EndpointConfigName": config.name, "Tags": tags},
        needs=(config.key, *(alarm.key for alarm in alarms)),
        update=merged(
            {
                "EndpointName": spec.name,
                "EndpointConfigName": config.name,
                # Keep the number of instances that scaling has reached; otherwise the specification decides.
                "RetainAllVariantProperties": scaled,
                "DeploymentConfig": endpoint_deployment(spec, decision, alarms),
            },
            spec.sagemaker.endpoint,
        ),
    )


# -- say what capture, a shadow and a reservation cost and mean, before the user confirms ------------------------------


_REQUESTS, _KB = 1_000_000, 10.0  # an example: requests, and kB of a request's body and its answer
_SHARE = {"both": 1.0, "input": 0.5, "output": 0.5}
_STORED = 0.023  # US dollars of a GB in S3 (Standard, us-east-1) for a month; September 2026


def beside_warnings(spec: Spec, decision: Decision) -> Iterator[str]:
    """Yield the warnings about a shadow or guest, a sentence each."""
    if spec.capture is not None:
        yield _capture(spec.capture)
    if spec.shadow is not None and decision.shadow is not None:
        several = "instances" if spec.shadow.count > 1 else "instance"
        yield (
            f"shadow: {spec.shadow.count} more {several} of {decision.shadow.instance_type}, paid for as long as the "
            f"endpoint exists; {spec.shadow.percent} % of the requests are copied to it, and its answers are discarded"
            f"{'' if spec.capture is not None else ' (capture keeps them)'}"
        )
    if spec.reservation is not None:
        yield (
            f"reservation: instances come only from {spec.reservation.rpartition('/')[2]}, which is paid in advance; "
            "when it ends they end, and none start beyond it"
        )


def _capture(capture: Capture) -> str:
    gigabytes = _REQUESTS * _KB * _SHARE[capture.content] * capture.percent / 100 / 1e6
    return (
        f"capture: S3 charges for the files in {capture.output} until they are deleted: of a million requests of "
        f"{_KB:g} kB with their answers about {gigabytes:.2g} GB (${gigabytes * _STORED:.2g} a month in us-east-1), "
        "and for each file written; they contain whatever clients send"
    )


def resources(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> tuple[Resource, ...]:
    """Return all resources of the deployment, in the order of their creation.

    Raises:
        Refused: the environment would contain a secret.
        SpecError: the decision and the specification contradict each other.
    """
    marks = tags(spec.deployment, spec_digest(spec), spec.tags)
    models, of_component = _models(spec, decision, marks, allow_plaintext_secret=allow_plaintext_secret)
    shadow = None
    if decision.shadow is not None:
        shadow = model(shadow_of(spec), decision.shadow, marks, allow_plaintext_secret=allow_plaintext_secret)
    every = [*models, *([shadow] if shadow is not None else [])]
    built = list({item.name: item for item in every}.values())
    served = None
    if spec.endpoint is None:
        config, watching = endpoint_config(spec, decision, models, marks, shadow), endpoint_alarms(spec, marks)
        # An update names its alarms, so they exist before the endpoint.
        served = endpoint(spec, decision, config, watching, marks)
        built += [config, *watching, served]
    if served is not None and not spec.components:
        return (*built, *scaling(spec, served, marks))
    decided = {item.name: decision.of(server) for server in servers(spec) for item in server.components}
    for item in spec.components:
        own = component_alarms(spec, item.name, marks)
        base = component(spec, item, decided[item.name], of_component[item.name], served, own, marks)
        adapters = [adapter(spec, child, base, marks) for child in item.adapters]
        built += [*own, base, *adapters, *scaling(spec, base, marks)]
    return tuple(built)


def _models(
    spec: Spec, decision: Decision, marks: list[dict[str, str]], *, allow_plaintext_secret: bool
) -> tuple[list[Resource], dict[str, Resource]]:
    """Return the models, and those of components by the components' names.

    Without components there is one for each pool, in their order, or one.
    """

    def made(server: Spec, decided: Decision) -> Resource:
        return model(server, decided, marks, allow_plaintext_secret=allow_plaintext_secret)

    if not spec.components:
        on_types = [(spec_on(spec, pool), decision.on(pool)) for pool in decision.pools]
        return [made(*one) for one in on_types or [(spec, decision)]], {}
    groups = servers(spec)
    of_component: dict[str, Resource] = {}
    for server in groups:
        try:
            own = made(server, decision.of(server))
        except (Refused, SpecError) as error:
            if len(groups) == 1:
                raise
            raise type(error)(f"{title(server)}: {error}", error.advice) from error
        of_component |= {item.name: own for item in server.components}
    return list(of_component.values()), of_component


def spec_digest(spec: Spec) -> str:
    """Return the digest of all settings that are not defaults: new settings in a later version do not change it."""
    # A batch is no part of the endpoint.
    return digest(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"batch"}))


def warnings(spec: Spec, decision: Decision) -> tuple[str, ...]:
    """Return all warnings to show before the user confirms, a sentence each."""
    return (*decision.warnings, *update_warnings(spec), *beside_warnings(spec, decision))
