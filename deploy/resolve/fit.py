"""Whether a model fits on an instance, and on how many of its GPUs: arithmetic, no I/O (contract sagemaker.md, 6.3).

Of one GPU, in GiB:

    weights       bytes of all weights / tensor parallel degree
    KV cache      2 * layers * KV heads * head's size * bytes, a token; each GPU holds its share of the KV heads, but
                  at least one: degrees above the number of KV heads keep copies
    workspace     a tenth of the weights, at least half a GiB: activations, and what the kernels need
    CUDA graphs   1, and 2 where GPUs work together (buffers to exchange results)
    in all        not above 0.9 of what the driver counts; the rest is the driver's and the fragments'

It fits if one request of the full context fits. Layers with a sliding window keep less than this says, so the advice
is on the safe side for them. A CPU type holds weights and cache in its RAM, of which the system keeps 2 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.errors import DoesNotFit
from deploy.resolve.instances import InstanceType, all_types
from deploy.resolve.model_shape import WIDTH
from deploy.resolve.prices import Price, price_of
from deploy.spec.sections import Shape
from deploy.spec.values import Precision

_GIB = 1 << 30
_USABLE = 0.9
_NEEDS: dict[str, tuple[int, int]] = {"fp4": (10, 0), "fp8": (8, 9), "bf16": (8, 0)}
_BLACKWELL_CUDA = (12, 8)
_BUS_LIMIT = 4
"""GPUs without NVLink exchange each layer's result over PCIe; with more of them than this that takes longest."""


@dataclass(frozen=True)
class Need:
    """What has to fit.

    Attributes:
        shape: the model's.
        dtype: of the weights in memory.
        context: tokens of the longest request, prompt and answer.
        kv_bytes: of a value in the KV cache: 2, with an FP8 cache 1.
        degree: GPUs that the user asked a copy to be spread over; None: the best degree.
        usable: part of a GPU's memory that may be taken.
        cuda: the image's, (12, 8); None: not known.
    """

    shape: Shape
    dtype: Precision = "bf16"
    context: int = 4096
    kv_bytes: int = 2
    degree: int | None = None
    usable: float = _USABLE
    cuda: tuple[int, int] | None = None

    @property
    def weight_gib(self) -> float:
        """All weights. The checkpoint's own bytes where it is served as it is stored."""
        shape = self.shape
        if shape.stored is not None and shape.dtype == self.dtype:
            return shape.stored / _GIB
        kept = 0.0
        if WIDTH[self.dtype] < 2:  # embeddings and the last layer stay in 16 bits
            kept = min(0.1 * shape.parameters, 2e9) if shape.embeddings is None else shape.embeddings
            kept = min(kept, shape.parameters)
        return (kept * 2 + (shape.parameters - kept) * WIDTH[self.dtype]) / _GIB

    @property
    def stored_gib(self) -> float:
        """What is downloaded, and goes through the host's RAM."""
        shape = self.shape
        return (shape.stored or shape.parameters * WIDTH[shape.dtype or "bf16"]) / _GIB

    def kv_gib(self, tokens: int, degree: int) -> float:
        """Of one GPU."""
        heads = -(-self.shape.kv_heads // degree)
        return 2 * self.shape.layers * heads * self.shape.head_dim * self.kv_bytes * tokens / _GIB


@dataclass(frozen=True)
class Fit:
    """How a model lies on one instance type. GiB are of one GPU, or of the host's RAM on a CPU type.

    Attributes:
        degree: GPUs that a copy is spread over; 1 on a CPU type.
        weights: GiB.
        rest: GiB of workspace and CUDA graphs.
        limit: GiB that may be taken.
        room: GiB left for the KV cache; negative: the weights alone are too much.
        tokens: that the KV cache holds.
        sequences: requests of the full context at once.
        problem: why it does not fit; empty: it does.
        remarks: what speaks against it although it fits.
        price: of one instance.
    """

    instance: InstanceType
    degree: int
    weights: float
    rest: float
    limit: float
    room: float
    tokens: int
    sequences: int
    problem: str
    remarks: tuple[str, ...]
    price: Price

    @property
    def fits(self) -> bool:
        return not self.problem


def fit(need: Need, instance: InstanceType, own_price: float | None = None) -> Fit:
    """On one type, with the degree that suits it best."""
    fits = [_with_degree(need, instance, degree, own_price) for degree in _degrees(need, instance)]
    return max(fits, key=lambda one: (one.fits, not _bus_bound(one) or not one.fits, one.degree))


def advise(need: Need, cpu: bool = False) -> tuple[Fit, ...]:
    """All known types: first those that fit, without remarks before with, then by price.

    Args:
        cpu: of the CPU types instead of those with GPUs.
    """
    fits = [fit(need, one) for one in all_types() if (one.gpus == 0) == cpu]
    return tuple(sorted(fits, key=lambda one: (not one.fits, bool(one.remarks), one.price.rank, one.instance.gpus)))


def best(need: Need, cpu: bool = False) -> Fit:
    """The cheapest type that fits.

    Raises:
        DoesNotFit: none does.
    """
    first = advise(need, cpu)[0]
    if not first.fits:
        largest = max(advise(need, cpu), key=lambda one: one.room * one.degree)
        raise DoesNotFit(
            f"no known instance type holds the model: the largest is {largest.instance.name}: {largest.problem}",
            "A smaller context (model.context) or precision (model.dtype) needs less.",
        )
    return first


def refuse(need: Need, one: Fit) -> DoesNotFit:
    """The error for a named type that is too small: its numbers, and the cheapest types that would do."""
    advice = []
    if one.tokens >= 1024:
        advice.append(f"Set model.context to {one.tokens // 1024 * 1024} or less, or")
    others = [other for other in advise(need, cpu=one.instance.gpus == 0) if other.fits][:3]
    if others:
        advice.append("take " + ", ".join(f"{other.instance.name} ({other.price.text})" for other in others) + ", or")
    advice.append("set instance.unchecked: true if you know better.")
    text = " ".join(advice)
    return DoesNotFit(f"instance.type: {one.instance.name}: {one.problem}", text[0].upper() + text[1:])


def _degrees(need: Need, instance: InstanceType) -> Sequence[int]:
    """Degrees worth a try: they divide the heads; the asked one alone, even if it does not suit."""
    if instance.gpus == 0:
        return (1,)
    if need.degree is not None:
        return (need.degree,)
    heads, kv_heads = need.shape.heads or need.shape.kv_heads, need.shape.kv_heads
    suits = [
        degree
        for degree in (1, 2, 4, 8)
        if degree <= instance.gpus and heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
    ]
    return suits or (1,)


def _with_degree(need: Need, instance: InstanceType, degree: int, own_price: float | None) -> Fit:
    if instance.gpus == 0:
        limit, graphs = need.usable * (instance.ram_gib - 2), 0.0
    else:
        limit, graphs = need.usable * instance.gpu_gib, 1.0 if degree == 1 else 2.0
    weights = need.weight_gib / degree
    rest = max(0.5, weights / 10) + graphs
    room = limit - weights - rest
    tokens = max(0, int(room / need.kv_gib(1, degree)))
    problem = _problem(need, instance, degree, weights, rest, limit, tokens)
    return Fit(
        instance=instance,
        degree=degree,
        weights=weights,
        rest=rest,
        limit=limit,
        room=room,
        tokens=tokens,
        sequences=tokens // need.context,
        problem=problem,
        remarks=_remarks(need, instance, degree),
        price=price_of(instance.name, own_price),
    )


def _problem(
    need: Need, instance: InstanceType, degree: int, weights: float, rest: float, limit: float, tokens: int
) -> str:
    least = _NEEDS.get(need.dtype)
    if instance.gpus and least is not None and instance.compute < least:
        return (
            f"{need.dtype} needs compute capability {least[0]}.{least[1]}, "
            f"the {instance.gpu} has {instance.compute[0]}.{instance.compute[1]}"
        )
    if instance.blackwell and need.cuda is not None and need.cuda < _BLACKWELL_CUDA:
        return f"the {instance.gpu} needs CUDA 12.8, and the image has {need.cuda[0]}.{need.cuda[1]}"
    if degree > max(1, instance.gpus):
        return f"tensor parallel degree {degree}, and {instance.gpus} GPU{'s' * (instance.gpus != 1)}"
    where = f"each of {degree} GPUs" if degree > 1 else "the GPU" if instance.gpus else "RAM"
    if tokens == 0:
        return (
            f"weights of {weights:.1f} GiB and {rest:.1f} GiB beside them are more than the {limit:.1f} GiB of {where}"
        )
    if tokens < need.context:
        return (
            f"beside weights of {weights:.1f} GiB and {rest:.1f} GiB more, the {limit:.1f} GiB of {where} hold a KV "
            f"cache of {tokens} tokens, and the context has {need.context}"
        )
    return ""


def _remarks(need: Need, instance: InstanceType, degree: int) -> tuple[str, ...]:
    remarks = []
    if instance.gpus and need.stored_gib > 0.75 * instance.ram_gib:
        remarks.append(f"a checkpoint of {need.stored_gib:.0f} GiB loads through {instance.ram_gib} GiB of host RAM")
    if instance.blackwell and need.cuda is None:
        remarks.append("needs an image of CUDA 12.8 or newer (image.cuda)")
    if not instance.gpus and not instance.family.endswith("7i"):
        remarks.append("no AMX: bf16 is slow")
    if not instance.gpus and instance.vcpus < 4:
        remarks.append("few cores")
    if degree > _BUS_LIMIT and not instance.nvlink:
        remarks.append(f"{degree} GPUs without NVLink")
    return tuple(remarks)


def _bus_bound(one: Fit) -> bool:
    return one.degree > _BUS_LIMIT and not one.instance.nvlink


@dataclass(frozen=True)
class Advice:
    """What `plan` shows: the candidates, and which is taken.

    Attributes:
        need: what was asked.
        source: where the model's size is from, for the table's title.
        rows: all types that were looked at, best first.
        taken: the one of the specification, or that `auto` took; None: a type that the tables do not know.
    """

    need: Need
    source: str
    rows: tuple[Fit, ...]
    taken: Fit | None


ADVICE_COLUMNS = (
    "type", "GPUs", "TP", "weights GiB", "KV GiB", "other GiB", "KV tokens", "requests", "cost class", "",
)  # fmt: skip


def advice_title(advice: Advice) -> str:
    """`8.0e9 weights in bf16 (known model), context 8192: 15.0 GiB and 0.12 MiB a token`."""
    need = advice.need
    return (
        f"{need.shape.parameters / 1e9:.3g} billion weights in {need.dtype} ({advice.source}), context {need.context}: "
        f"{need.weight_gib:.1f} GiB, and {need.kv_gib(1, 1) * 1024:.3g} MiB a token"
    )


def advice_rows(advice: Advice, limit: int = 6) -> tuple[tuple[str, ...], ...]:
    """The table's cells, in the order of ADVICE_COLUMNS: the best types, and the taken one wherever it stands.

    Of a family's types with equally many GPUs the best one is shown. GiB are of one GPU; requests are those of the full
    context at once. The last column says what is taken, why it does not fit, or what speaks against it.
    """
    shown: dict[tuple[str, int], Fit] = {}
    for one in advice.rows:
        if one.fits and len(shown) < limit:
            shown.setdefault((one.instance.family, one.instance.gpus), one)
    names = {one.instance.name: one for one in shown.values()}
    taken = advice.taken
    if taken is not None:
        names[taken.instance.name] = taken
    return tuple(_row(one, one is taken) for one in names.values())


def _row(one: Fit, taken: bool) -> tuple[str, ...]:
    said = (["taken"] if taken else []) + ([one.problem] if one.problem else list(one.remarks))
    instance = one.instance
    return (
        instance.name,
        f"{instance.gpus} x {instance.gpu} {instance.gpu_gib:.0f} GiB" if instance.gpus else f"{instance.vcpus} vCPU",
        str(one.degree) if instance.gpus else "",
        f"{one.weights:.1f}",
        f"{max(0.0, one.room):.1f}",
        f"{one.rest:.1f}",
        str(one.tokens),
        str(one.sequences),
        one.price.text,
        "; ".join(said),
    )
