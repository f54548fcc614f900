"""A settled specification as what AWS is to keep: pure functions, without I/O; `builders/` has one file a kind.

A name ends in a digest of the request where the thing cannot be changed (model, endpoint configuration). Tags are left
out of it, as one of them holds the digest of the specification: a changed alarm must not renew the model.
"""

from __future__ import annotations

from deploy.resolve.decision import Settled
from deploy.resources.alarms import component_alarms, endpoint_alarms
from deploy.resources.components import adapter, component
from deploy.resources.endpoint import endpoint
from deploy.resources.endpoint_config import endpoint_config
from deploy.resources.model import model
from deploy.resources.names import digest, tags
from deploy.resources.resource import Resource
from deploy.resources.scaling import scaling
from deploy.resources.updating import update_warnings
from deploy.spec import Spec

__all__ = ["resources", "spec_digest", "warnings"]


def resources(spec: Spec, settled: Settled, *, allow_plaintext_secret: bool = False) -> tuple[Resource, ...]:
    """All that the deployment consists of, in the order in which it is made.

    Raises:
        Refused: the environment would hold a secret.
        SpecError: what settling showed does not go together with the specification.
    """
    marks = tags(spec.name, spec_digest(spec), spec.tags)
    watching = endpoint_alarms(spec, marks)
    made_model = model(spec, settled, marks, allow_plaintext_secret=allow_plaintext_secret)
    config = endpoint_config(spec, settled, made_model, marks)
    # An update names its alarms, so they are there before.
    served = endpoint(spec, settled, config, watching, marks)
    made = [made_model, config, *watching, served]
    if not spec.components:
        return (*made, *scaling(spec, served, marks))
    for one in spec.components:
        own = component_alarms(spec, one.name, marks)
        base = component(spec, one, settled, made_model, served, own, marks)
        adapters = [adapter(spec, child, base, marks) for child in one.adapters]
        made += [*own, base, *adapters, *scaling(spec, base, marks)]
    return tuple(made)


def spec_digest(spec: Spec) -> str:
    """Of what the specification says that is not a default: the tag's value.

    So it stays what it is where a newer version of ours knows more settings.
    """
    return digest(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True))


def warnings(spec: Spec, settled: Settled) -> tuple[str, ...]:
    """What the user should know before saying yes, beside what settling found."""
    return (*settled.warnings, *update_warnings(spec))
