"""Pure functions that build all resources of a deployment from its specification and decision.

AWS cannot change models and endpoint configurations, so their names end in a digest of their content. The digest does
not include tags, because one of the tags changes whenever any part of the specification changes.
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
from deploy.spec.options import deprecated
from deploy.spec.sections import Capture


def endpoint(
    spec: Spec, decision: Decision, config: Resource, alarms: Sequence[Resource], tags: list[dict[str, str]]
) -> Resource:
    """Build the endpoint.

    Args:
        config: the endpoint configuration.
        alarms: alarms that trigger the rollback of an update. They are created before the endpoint.
        tags: tags of the deployment.
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
                # Keep a number of instances that automatic scaling has set, but not a number that was set manually.
                "RetainAllVariantProperties": scaled,
                "DeploymentConfig": endpoint_deployment(spec, decision, alarms),
            },
            spec.sagemaker.endpoint,
        ),
    )


# -- warnings about the cost of capture, a shadow variant and a reservation, for the user to read before confirming ----


_REQUESTS, _KB = 1_000_000, 10.0  # example: number of requests, and kB of each request with its response
_SHARE = {"both": 1.0, "input": 0.5, "output": 0.5}
_STORED = 0.023  # US dollars per GB and month in S3 (Standard, us-east-1, September 2026)


def beside_warnings(spec: Spec, decision: Decision) -> Iterator[str]:
    """Yield the warnings about capture, the shadow variant and the reservation, each as a sentence."""
    if spec.capture is not None:
        yield _capture(spec.capture)
    if spec.shadow is not None and decision.shadow is not None:
        several = "instances" if spec.shadow.count > 1 else "instance"
        yield (
            f"shadow: while the endpoint exists, you also pay for {spec.shadow.count} {several} of "
            f"{decision.shadow.instance_type}; {spec.shadow.percent} % of the requests are copied to the shadow "
            f"variant, and its responses are discarded{'' if spec.capture is not None else ' (capture keeps them)'}"
        )
    if spec.reservation is not None:
        yield (
            f"reservation: all instances come from {spec.reservation.rpartition('/')[2]}, which is paid in advance; "
            "no more instances can start, and all stop when the reservation ends"
        )


def _capture(capture: Capture) -> str:
    gigabytes = _REQUESTS * _KB * _SHARE[capture.content] * capture.percent / 100 / 1e6
    return (
        f"capture: S3 charges for writing the files in {capture.output}, and for storing them until you delete them: a "
        f"million requests of {_KB:g} kB, responses included, need about {gigabytes:.2g} GB "
        f"(${gigabytes * _STORED:.2g} per month in us-east-1); the files contain everything that clients send"
    )


def resources(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> tuple[Resource, ...]:
    """Return all resources of the deployment, in the order of their creation.

    Args:
        allow_plaintext_secret: whether the environment may contain a value that looks like a secret.

    Raises:
        Refused: the environment contains a value that looks like a secret.
        SpecError: settings are invalid or contradict each other.
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
        # An update names its alarms, so they are created before the endpoint.
        served = endpoint(spec, decision, config, watching, marks)
        built += [config, *watching, served]
    if served is not None and not spec.components:
        return (*built, *scaling(spec, served, marks))
    decided = {item.name: decision.of(server) for server in servers(spec) for item in server.components}
    for item in spec.components:
        alarms = component_alarms(spec, item.name, marks)
        base = component(spec, item, decided[item.name], of_component[item.name], served, alarms, marks)
        adapters = [adapter(spec, child, base, marks) for child in item.adapters]
        built += [*alarms, base, *adapters, *scaling(spec, base, marks)]
    return tuple(built)


def _models(
    spec: Spec, decision: Decision, marks: list[dict[str, str]], *, allow_plaintext_secret: bool
) -> tuple[list[Resource], dict[str, Resource]]:
    """Return the models, and a mapping from component names to models.

    Without components, there is one model for each instance pool, in the order of the pools, or a single model.
    """

    def build_model(server: Spec, decided: Decision) -> Resource:
        return model(server, decided, marks, allow_plaintext_secret=allow_plaintext_secret)

    if not spec.components:
        on_types = [(spec_on(spec, pool), decision.on(pool)) for pool in decision.pools]
        return [build_model(*server) for server in on_types or [(spec, decision)]], {}
    groups = servers(spec)
    of_component: dict[str, Resource] = {}
    for server in groups:
        try:
            resource = build_model(server, decision.of(server))
        except (Refused, SpecError) as error:
            if len(groups) == 1:
                raise
            raise type(error)(f"{title(server)}: {error}", error.advice) from error
        of_component |= {item.name: resource for item in server.components}
    return list(of_component.values()), of_component


def spec_digest(spec: Spec) -> str:
    """Return the digest of a specification.

    It includes only settings that are not defaults, so that new settings in later versions do not change it.
    """
    # Settings for batch transform do not affect the endpoint.
    return digest(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"batch"}))


def warnings(spec: Spec, decision: Decision) -> tuple[str, ...]:
    """Return all warnings for the user to read before confirming, each as a sentence."""
    return (*decision.warnings, *deprecated(spec), *update_warnings(spec), *beside_warnings(spec, decision))
