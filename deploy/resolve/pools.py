"""Decide on an endpoint with several instance types: each must hold the model, and one host must suit them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deploy.errors import DoesNotFit, SpecError
from deploy.resolve.candidates import Resolution
from deploy.resolve.decision import Decision, Pool, spec_on
from deploy.spec import Spec


def resolve_pools(spec: Spec, resolve: Callable[[Spec], Resolution]) -> Resolution:
    """Decide for each type as if it were the only one, and join the decisions. The first pool's candidates are kept.

    Raises:
        DoesNotFit, SpecError: as for a single type, with the pool's place; or the types need different hosts.
    """
    found: list[tuple[Pool, Resolution]] = []
    for place, item in enumerate(spec.instance.pools):
        pool = Pool(item.priority or place + 1, item.type, 0, options=item.options)
        try:
            resolution = resolve(spec_on(spec, pool))
        except (DoesNotFit, SpecError) as error:
            raise type(error)(f"instance.pools[{place}]: {error}", error.advice) from error
        decision = resolution.decision
        pool = replace(
            pool,
            gpus=decision.gpus,
            tensor_parallel=decision.tensor_parallel,
            vcpus=decision.vcpus,
            ram_gib=decision.ram_gib,
        )
        found.append((pool, resolution))
    found.sort(key=lambda item: item[0].priority)
    decisions = [resolution.decision for _, resolution in found]
    _one_host(decisions)
    joined = replace(
        decisions[0],
        download=max(decision.download for decision in decisions),
        startup=max(decision.startup for decision in decisions),
        warnings=tuple(dict.fromkeys(warning for decision in decisions for warning in decision.warnings)),
        pools=tuple(pool for pool, _ in found),
        components={
            name: replace(decision, pools=tuple(pool for pool, _ in found))
            for name, decision in decisions[0].components.items()
        },
    )
    return replace(found[0][1], decision=joined)


def _one_host(decisions: list[Decision]) -> None:
    """Check that all types may have the same host, as an endpoint configuration names one.

    Raises:
        SpecError: CPU types beside GPU types, or types that need another InferenceAmiVersion.
    """
    if len({decision.ami for decision in decisions}) > 1 or len({decision.gpus == 0 for decision in decisions}) > 1:
        hosts = "; ".join(f"{decision.instance_type}: {decision.ami or 'the default'}" for decision in decisions)
        raise SpecError(
            f"instance.pools: the types need different hosts ({hosts}), and an endpoint has one",
            "Take types of one sort, with or without GPUs; an image of CUDA 13 runs on all of NVIDIA's.",
        )
