"""Build all resources of a deployment from its specification and decision. Pure.

The name of a resource that AWS cannot change (model, endpoint configuration) ends in a digest of its request. Tags are
not in the digest, as one of them holds the specification's own digest: a changed alarm must not renew the model.
"""

from __future__ import annotations

from deploy.errors import Refused, SpecError
from deploy.resolve.decision import Decision, spec_on
from deploy.resources.alarms import component_alarms, endpoint_alarms
from deploy.resources.beside import beside_warnings
from deploy.resources.components import adapter, component
from deploy.resources.endpoint import endpoint
from deploy.resources.endpoint_config import endpoint_config
from deploy.resources.model import model
from deploy.resources.names import digest, tags
from deploy.resources.resource import Resource
from deploy.resources.scaling import scaling
from deploy.resources.updating import update_warnings
from deploy.spec import Spec
from deploy.spec.components import servers, title
from deploy.spec.shadow import shadow_of

__all__ = ["resources", "spec_digest", "warnings"]


def resources(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> tuple[Resource, ...]:
    """Return all resources of the deployment, in the order of their creation.

    Raises:
        Refused: the environment would hold a secret.
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
