"""Advice on growth: a bigger instance, more instances, or HyperPod with Dynamo. A sentence or two each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.resolve.candidates import Candidates
from deploy.resolve.decision import Decision
from deploy.resolve.devices import num_engines
from deploy.resolve.fit import Fit
from deploy.spec import Spec
from deploy.spec.sections import PrefixAware

_FEW = 4
"""Requests of the full context at once, below which a larger cache helps more than another instance."""

_MANY = 4
"""Instances from which on the routing decides how much of the caches is used."""


def advice(spec: Spec, decision: Decision, candidates: Candidates | None) -> tuple[str, ...]:
    """Return the advice that follows from the specification and from what fits.

    Args:
        candidates: None: the model's size is not known, and only the number of instances says something.
    """
    chosen = None if candidates is None else candidates.chosen
    found = [] if chosen is None or candidates is None else [*_size(spec, chosen, candidates.fits)]
    return (*found, *_number(spec, decision), *_routing(spec))


def _size(spec: Spec, chosen: Fit, fits: Sequence[Fit]) -> Iterator[str]:
    """Compare the requests that a server on the chosen type holds with what is wanted of it."""
    if not chosen.fits:
        return
    wanted = _FEW if spec.scaling is None else max(_FEW, round(spec.scaling.concurrency))
    server = f"A copy on {chosen.instance.name}" if spec.components else chosen.instance.name
    gpus = spec.components[0].accelerators if spec.components else chosen.instance.gpus
    sequences = chosen.sequences * num_engines(spec, gpus, chosen.degree)
    held = f"{server} holds {sequences} requests of the full context at once"
    if sequences >= wanted:
        yield f"{held}: for more take more instances (instance.count, scaling.max), not a bigger one."
        return
    bigger = next((item for item in fits if item.fits and item.sequences >= wanted), None)
    name = "a bigger instance"
    if bigger is not None:
        name = f"{bigger.instance.name} ({bigger.price.text}) for {bigger.sequences}"
    yield (
        f"{held}: for {wanted} take {name}, or a shorter model.context. More instances divide the requests, and make "
        "no room for longer ones."
    )


def _number(spec: Spec, decision: Decision) -> Iterator[str]:
    if spec.instance.count == 1 and spec.scaling is None and spec.instance.managed is None and not spec.components:
        yield (
            "One instance has no spare: a second (instance.count: 2) serves on while one fails or is replaced, also "
            "where one bigger instance would be fast enough."
        )


def _routing(spec: Spec) -> Iterator[str]:
    most = max(spec.instance.count, spec.scaling.max if spec.scaling is not None else 0)
    if most >= _MANY and isinstance(spec.routing, PrefixAware):
        yield (
            f"With up to {most} instances, prefix-aware routing looks at a text's beginning, not at the caches. "
            "Dynamo on HyperPod routes by what each worker holds: compare both for long shared prompts "
            "(lmi deploy export --format hyperpod)."
        )
