"""Fit a model on an instance and on a number of its GPUs. Arithmetic without I/O.

Memory of one GPU, in GiB:

    weights       bytes of all weights / tensor parallel degree
    KV cache      2 * layers * KV heads * head size * bytes per token. A GPU holds its share of the KV heads, at least
                  one: above as many GPUs as KV heads, heads are copied. A layer with a sliding window keeps the window
                  and a step's chunk of the prompt, if the engine frees the rest; linear attention a state a request
    workspace     a tenth of the weights, at least half a GiB: activations and the kernels' buffers
    CUDA graphs   1; 2 if several GPUs work together (buffers to exchange results)
    total         at most 0.9 of what the driver counts; the driver and fragmentation take the rest

A model fits if one request of the full context fits. A CPU type holds weights and cache in its RAM, of which the system
keeps 2 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.errors import DoesNotFit
from deploy.resolve.decision import Decision
from deploy.resolve.instances import InstanceType, all_types
from deploy.resolve.model.quantization import WIDTH
from deploy.resolve.prices import TABLE, Price, Prices
from deploy.spec.sections import Shape
from deploy.spec.values import Precision

if TYPE_CHECKING:
    from deploy.resolve.components import Sums

_GIB = 1 << 30
_USABLE = 0.9
LEAST_CAPABILITIES: dict[str, tuple[int, int]] = {"fp4": (10, 0), "fp8": (8, 9), "mxfp4": (8, 0), "bf16": (8, 0)}
CHUNK = 8192
"""Tokens of a prompt that one step computes, by default at most: a layer with a window keeps them in addition."""

_IN_16_BITS = ("fp8", "fp4")
"""Precisions that vLLM's Marlin kernels compute in 16 bits on GPUs from Ampere on that do not have them."""

_BLACKWELL_CUDA = (12, 8)
_AMPERE = (8, 0)
_BUS_LIMIT = 4
"""More GPUs than this without NVLink: exchanging each layer's result over PCIe takes the most time."""


@dataclass(frozen=True)
class Need:
    """A model and how it is served, which has to fit.

    Attributes:
        shape: the model's shape.
        dtype: precision of the weights in memory.
        context: tokens of the longest request, prompt and answer together.
        kv_bytes: bytes of a value in the KV cache: 2, or 1 with an FP8 cache.
        degree: GPUs that the user wants a copy spread over; None: the best degree.
        usable: the fraction of a GPU's memory that may be used.
        cuda: the image's CUDA version, e.g. (12, 8); None: unknown.
        built_for: the least compute capability that the image has kernels for; None: unknown.
        windows: whether the engine frees the cache outside of a sliding window.
        weight_only: whether the engine computes weights in 16 bits if the GPU does not have their precision: vLLM
            does.
    """

    shape: Shape
    dtype: Precision = "bf16"
    context: int = 4096
    kv_bytes: int = 2
    degree: int | None = None
    usable: float = _USABLE
    cuda: tuple[int, int] | None = None
    built_for: tuple[int, int] | None = None
    windows: bool = False
    weight_only: bool = False

    @property
    def weight_gib(self) -> float:
        """Return the size of all weights: the checkpoint's own size if they are served as they are stored."""
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
        """Return the size of the checkpoint, which is downloaded and loaded through the host's RAM."""
        shape = self.shape
        return (shape.stored or shape.parameters * WIDTH[shape.dtype or "bf16"]) / _GIB

    def kv_gib(self, tokens: int, degree: int) -> float:
        """Return the size of the KV cache of one request of `tokens` on one GPU, with its states."""
        fixed, full, windowed = self._bytes(degree)
        return (fixed + full * tokens + windowed * min(tokens, self._kept)) / _GIB

    def cached(self, room: float, degree: int) -> int:
        """Return how many tokens fit into a cache of `room` GiB: of requests of the full context, otherwise of a
        shorter one.

        Only the first tokens of a request take room in layers with a window.
        """
        whole = self.kv_gib(self.context, degree)
        if room >= whole:
            return int(room / (whole / self.context))
        fixed, full, windowed = self._bytes(degree)
        left = room * _GIB - fixed
        if left <= 0:
            return 0
        within = left / (full + windowed) if full + windowed else float(self.context)
        if within > self._kept and full:
            within = (left - windowed * self._kept) / full
        return max(0, int(within))

    @property
    def _kept(self) -> int:
        """Return how many tokens of a request a layer with a sliding window caches."""
        return self.context if self.shape.window is None or not self.windows else self.shape.window + CHUNK

    def _bytes(self, degree: int) -> tuple[float, float, float]:
        """Return the bytes on one GPU of a request's states, and of a token in all layers without and with a window."""
        shape = self.shape
        full = shape.layers - shape.window_layers - shape.uncached_layers
        of_full = -(-shape.kv_heads // degree) * shape.head_dim
        of_window = -(-(shape.window_kv_heads or shape.kv_heads) // degree) * (shape.window_head_dim or shape.head_dim)
        value = 2 * self.kv_bytes
        return shape.state / degree, full * of_full * value, shape.window_layers * of_window * value


@dataclass(frozen=True)
class Fit:
    """A model's memory on one instance type. GiB are of one GPU, or of the host's RAM on a CPU type.

    Attributes:
        degree: GPUs that a copy is spread over; 1 on a CPU type.
        weights: GiB of weights.
        rest: GiB of workspace and CUDA graphs.
        limit: GiB that may be used.
        room: GiB left for the KV cache; negative: the weights alone are too large.
        tokens: number of tokens in the KV cache.
        sequences: concurrent requests of the full context.
        problem: why the model does not fit; empty: it fits.
        remarks: disadvantages of a type that fits.
        price: price of one instance.
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


def fit(need: Need, instance: InstanceType, price: Price | None = None) -> Fit:
    """Fit the model on one type, with its best degree.

    Args:
        price: the instance's; None: the table's.
    """
    price = price or TABLE.of(instance.name)
    fits = [_with_degree(need, instance, degree, price) for degree in _degrees(need, instance)]
    return max(fits, key=lambda item: (item.fits, not _bus_bound(item) or not item.fits, item.degree))


def cpu_limit(instance: InstanceType, usable: float = _USABLE) -> float:
    """Return the GiB of a CPU type's memory that models may use."""
    return usable * (instance.ram_gib - 2)


def _degrees(need: Need, instance: InstanceType) -> Sequence[int]:
    """Return the degrees to try: those that divide the heads, or only the user's, even if it divides none."""
    if instance.gpus == 0:
        return (1,)
    if need.degree is not None:
        return (need.degree,)
    heads, kv_heads = need.shape.heads or need.shape.kv_heads, need.shape.kv_heads
    divisors = [
        degree
        for degree in (1, 2, 4, 8)
        if degree <= instance.gpus and heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
    ]
    return divisors or (1,)


def _with_degree(need: Need, instance: InstanceType, degree: int, price: Price) -> Fit:
    if instance.gpus == 0:
        limit, graphs = cpu_limit(instance, need.usable), 0.0
    else:
        limit, graphs = need.usable * instance.gpu_gib, 1.0 if degree == 1 else 2.0
    weights = need.weight_gib / degree
    rest = max(0.5, weights / 10) + graphs
    room = limit - weights - rest
    tokens = need.cached(room, degree)
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
        price=price,
    )


def _problem(
    need: Need, instance: InstanceType, degree: int, weights: float, rest: float, limit: float, tokens: int
) -> str:
    if problem := too_old(instance, need.built_for):
        return problem
    least = _AMPERE if need.weight_only and need.dtype in _IN_16_BITS else LEAST_CAPABILITIES.get(need.dtype)
    if instance.gpus and least is not None and instance.compute < least:
        return (
            f"{need.dtype} needs compute capability {least[0]}.{least[1]}, "
            f"the {instance.gpu} has {instance.compute[0]}.{instance.compute[1]}"
        )
    if instance.blackwell and need.cuda is not None and need.cuda < _BLACKWELL_CUDA:
        return f"the {instance.gpu} needs CUDA 12.8, but the image has {need.cuda[0]}.{need.cuda[1]}"
    if degree > max(1, instance.gpus):
        return f"tensor parallel degree {degree}, but {instance.gpus} GPU{'s' * (instance.gpus != 1)}"
    where = f"each of {degree} GPUs" if degree > 1 else "the GPU" if instance.gpus else "RAM"
    if tokens == 0:
        return (
            f"weights of {weights:.1f} GiB and {rest:.1f} GiB of other memory are more than the {limit:.1f} "
            f"GiB of {where}"
        )
    if tokens < need.context:
        return (
            f"with weights of {weights:.1f} GiB and {rest:.1f} GiB of other memory, the {limit:.1f} GiB of {where} "
            f"have room for a KV cache of {tokens} tokens, but the context has {need.context}"
        )
    return ""


def too_old(instance: InstanceType, built_for: tuple[int, int] | None) -> str:
    """Return why the image has no kernels for the GPU, or "" if it has them or this is unknown."""
    if not instance.gpus or built_for is None or instance.compute >= built_for:
        return ""
    least, has = (".".join(map(str, version)) for version in (built_for, instance.compute))
    return f"the image is built for compute capability {least} and newer, the {instance.gpu} has {has}"


def able(built_for: tuple[int, int] | None) -> str:
    """Return the families of types whose GPUs an image has kernels for."""
    families = [f"ml.{item.family}" for item in all_types() if item.gpus and not too_old(item, built_for)]
    return ", ".join(dict.fromkeys(families))


def _remarks(need: Need, instance: InstanceType, degree: int) -> tuple[str, ...]:
    remarks = []
    if instance.gpus and need.stored_gib > 0.75 * instance.ram_gib:
        remarks.append(f"a checkpoint of {need.stored_gib:.0f} GiB loads through {instance.ram_gib} GiB of host RAM")
    if instance.blackwell and need.cuda is None:
        remarks.append("needs an image of CUDA 12.8 or newer (image.cuda)")
    if instance.gpus and instance.compute < _AMPERE and need.built_for is None:
        remarks.append(f"the {instance.gpu} is older than Ampere, for which AWS's vLLM is built")
    if instance.gpus and need.dtype in _IN_16_BITS and instance.compute < LEAST_CAPABILITIES[need.dtype]:
        remarks.append(
            f"the {instance.gpu} does not compute in {need.dtype}: it saves memory, but computation is in 16 bits"
        )
    if not instance.gpus and not instance.family.endswith("7i"):
        remarks.append("no AMX: bf16 is slow")
    if not instance.gpus and instance.vcpus < 4:
        remarks.append("few cores")
    if degree > _BUS_LIMIT and not instance.nvlink:
        remarks.append(f"{degree} GPUs without NVLink")
    return tuple(remarks)


def _bus_bound(item: Fit) -> bool:
    return item.degree > _BUS_LIMIT and not item.instance.nvlink


# -- instance types that a model may run on, best first, and the table that `lmi deploy plan` prints -------------------


BEYOND_ONE_MACHINE = (
    "No endpoint of SageMaker spreads a model over several machines. On HyperPod Dynamo does: put this server in front "
    "of it (lmi serve --engine openai; documents: engines-by-url)."
)


@dataclass(frozen=True)
class Candidates:
    """All instance types of one kind for one model.

    Attributes:
        need: what has to fit.
        source: where the model's shape is from, for the table's title.
        fits: one entry per type, best first.
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
        prices: prices of instances.
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
            f"no known instance type has room for the model: the largest is {largest.instance.name}: {largest.problem}",
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
    advice.append("set instance.unchecked: true to use it anyway.")
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
        f"context {need.context}: {need.weight_gib:.1f} GiB, and {a_token:.3g} MiB per token"
    )


_MOST_ROWS = 6


def rows(candidates: Candidates) -> tuple[tuple[str, ...], ...]:
    """Return the table's cells, in the order of COLUMNS: the best types, and the chosen one in any case.

    Of a family's types with equally many GPUs only the best is a row. GiB are of one GPU. Requests are concurrent ones
    of the full context. The last column marks the chosen type, and has the problem or the remarks.
    """
    best: dict[tuple[str, int], Fit] = {}
    for item in candidates.fits:
        if item.fits and len(best) < _MOST_ROWS:
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
