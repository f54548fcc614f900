"""The instance types that a model may run on, best first, and the table of them that `lmi deploy plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.errors import DoesNotFit
from deploy.resolve.decision import Decision
from deploy.resolve.fit import Fit, Need, fit
from deploy.resolve.instances import all_types
from deploy.resolve.prices import TABLE, Prices

if TYPE_CHECKING:
    from deploy.resolve.components import Sums

BEYOND_ONE_MACHINE = (
    "No endpoint of SageMaker spreads a model over several machines. On HyperPod Dynamo does: put this server in front "
    "of it (lmi serve --engine openai; documents: engines-by-url)."
)


@dataclass(frozen=True)
class Candidates:
    """All instance types of one sort for one model.

    Attributes:
        need: what has to fit.
        source: where the model's shape is from, for the table's title.
        fits: one entry a type, best first.
        chosen: the specification's type, or the one that `auto` chose; None: the tables do not know the type.
    """

    need: Need
    source: str
    fits: tuple[Fit, ...]
    chosen: Fit | None


@dataclass(frozen=True)
class Resolution:
    """Everything that follows from a specification before AWS is changed.

    Attributes:
        candidates: the instance types that the decision was made among; None: the model's size is unknown, or there
            are several models.
        sums: the components on the instances; None: there are none.
        prices: what instances cost.
    """

    decision: Decision
    candidates: Candidates | None
    sums: Sums | None = None
    prices: Prices = TABLE


def rank(need: Need, cpu: bool = False, prices: Prices = TABLE) -> tuple[Fit, ...]:
    """Fit the model on every known type, and sort: those that fit first, then those without remarks, then by price.

    Args:
        cpu: take the CPU types instead of those with GPUs.
    """
    types = [instance for instance in all_types() if (instance.gpus == 0) == cpu]
    fits = [fit(need, instance, prices.of(instance.name)) for instance in types]
    return tuple(
        sorted(fits, key=lambda item: (not item.fits, bool(item.remarks), item.price.rank, item.instance.gpus))
    )


def cheapest(fits: Sequence[Fit]) -> Fit:
    """Return the first of `rank`'s result.

    Raises:
        DoesNotFit: the model fits on no type.
    """
    if not fits[0].fits:
        largest = max(fits, key=lambda item: item.room * item.degree)
        raise DoesNotFit(
            f"no known instance type holds the model: the largest is {largest.instance.name}: {largest.problem}",
            f"A smaller context (model.context) or precision (model.dtype) needs less. {BEYOND_ONE_MACHINE}",
        )
    return fits[0]


def too_small(small: Fit, fits: Sequence[Fit]) -> DoesNotFit:
    """Return the error for a named type that is too small, with the cheapest types of `fits` that are large enough."""
    advice = []
    if small.tokens >= 1024:
        advice.append(f"Set model.context to {small.tokens // 1024 * 1024} or less, or")
    if others := [other for other in fits if other.fits][:3]:
        advice.append("take " + ", ".join(f"{other.instance.name} ({other.price.text})" for other in others) + ", or")
    advice.append("set instance.unchecked: true if you know better.")
    text = " ".join(advice)
    return DoesNotFit(f"instance.type: {small.instance.name}: {small.problem}", text[0].upper() + text[1:])


COLUMNS = (
    "type", "GPUs", "TP", "weights GiB", "KV GiB", "other GiB", "KV tokens", "requests", "cost class", "",
)  # fmt: skip


def title(candidates: Candidates) -> str:
    """Return e.g. `8.03 billion weights in bf16 (known model), context 8192: 15.0 GiB, and 0.125 MiB a token`."""
    need = candidates.need
    a_token = need.kv_gib(need.context, 1) / need.context * 1024
    return (
        f"{need.shape.parameters / 1e9:.3g} billion weights in {need.dtype} ({candidates.source}), "
        f"context {need.context}: {need.weight_gib:.1f} GiB, and {a_token:.3g} MiB a token"
    )


def rows(candidates: Candidates, limit: int = 6) -> tuple[tuple[str, ...], ...]:
    """Return the table's cells, in the order of COLUMNS: the best types, and the chosen one in any case.

    Of a family's types with equally many GPUs only the best is a row. GiB are of one GPU. Requests are those of the
    full context at once. The last column marks the chosen type, and holds the problem or the remarks.
    """
    best: dict[tuple[str, int], Fit] = {}
    for item in candidates.fits:
        if item.fits and len(best) < limit:
            best.setdefault((item.instance.family, item.instance.gpus), item)
    by_name = {item.instance.name: item for item in best.values()}
    if candidates.chosen is not None:
        by_name[candidates.chosen.instance.name] = candidates.chosen
    return tuple(_row(item, item is candidates.chosen) for item in by_name.values())


def _row(item: Fit, chosen: bool) -> tuple[str, ...]:
    notes = (["taken"] if chosen else []) + ([item.problem] if item.problem else list(item.remarks))
    instance = item.instance
    return (
        instance.name,
        f"{instance.gpus} x {instance.gpu} {instance.gpu_gib:.0f} GiB" if instance.gpus else f"{instance.vcpus} vCPU",
        str(item.degree) if instance.gpus else "",
        f"{item.weights:.1f}",
        f"{max(0.0, item.room):.1f}",
        f"{item.rest:.1f}",
        str(item.tokens),
        str(item.sequences),
        item.price.text,
        "; ".join(notes),
    )
