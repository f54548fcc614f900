"""Compute the memory that a model needs on an instance type, and rank instance types, without I/O.

Memory of one GPU, in GiB:

    weights       bytes of all weights / tensor parallel degree
    KV cache      2 * layers * KV heads * head size * bytes per value, for each token. A GPU has its share of the KV
                  heads, but at least one: with more GPUs than KV heads, heads are copied. A layer with a sliding window
                  caches only the window and one chunk of the prompt, if the engine frees the rest. Linear attention
                  has a state of fixed size for each request. Index keys and compressed entries of sparse attention
                  are on every GPU
    workspace     a tenth of the weights, at least 0.5: activations and the kernels' buffers
    CUDA graphs   1, or 2 with several GPUs (buffers to exchange results)
    total         at most 0.9 of the memory that the driver reports; the driver and fragmentation need the rest

A model fits if one request of the full context fits. On a CPU type, weights and cache are in RAM, of which the system
needs 2 GiB. llama.cpp divides the layers of a model, with their caches, between all GPUs that it sees.
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
from deploy.spec.values import Architecture, Precision

if TYPE_CHECKING:
    from deploy.resolve.components import Sums

_GIB = 1 << 30
_USABLE = 0.9
LEAST_CAPABILITIES: dict[str, tuple[int, int]] = {"fp4": (10, 0), "fp8": (8, 9), "mxfp4": (8, 0), "bf16": (8, 0)}
CHUNK = 8192
"""Maximum number of prompt tokens per step, by default. A layer with a window caches them in addition to the window."""

_IN_16_BITS = ("fp8", "fp4")
"""Precisions that vLLM's Marlin kernels compute in 16 bits on GPUs (Ampere and newer) that do not support them."""

_BLACKWELL_CUDA = (12, 8)
_AMPERE = (8, 0)
_BUS_LIMIT = 4
"""Maximum number of GPUs without NVLink. With more, exchanging results over PCIe takes most of the time."""


@dataclass(frozen=True)
class Need:
    """A model and the settings that determine how much memory it needs.

    Attributes:
        shape: the model's shape.
        dtype: precision of the weights in memory.
        context: maximum number of tokens of a request, prompt and response together.
        kv_bytes: bytes per value in the KV cache: 2, or 1 with an FP8 cache.
        degree: number of GPUs for each copy of the model, or None to choose the best number.
        usable: fraction of a GPU's memory that may be used.
        cuda: the CUDA version of the image, e.g. (12, 8), or None if it is unknown.
        built_for: minimum compute capability that the image has kernels for, or None if it is unknown.
        windows: whether the engine frees the cache outside of a sliding window.
        stages: number of pipeline stages times number of context parts, both included in `degree`.
        experts: whether each GPU has whole experts (expert parallelism), or None to choose it where the engine can.
        weight_only: whether the engine, like vLLM, computes in 16 bits if the GPU does not support the weights'
            precision.
        layered: whether the engine, like llama.cpp, divides the layers between all GPUs, instead of each layer.
        architecture: the processors that the image is built for.
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
    stages: int = 1
    experts: bool | None = False
    layered: bool = False
    architecture: Architecture = "amd64"

    @property
    def weight_gib(self) -> float:
        """Return the size of all weights in memory, which is the checkpoint's size if their precision is kept."""
        shape = self.shape
        if shape.stored is not None and shape.dtype == self.dtype:
            return shape.stored / _GIB
        unquantized = 0.0
        if WIDTH[self.dtype] < 2:  # embeddings and the last layer stay in 16 bits
            unquantized = min(0.1 * shape.parameters, 2e9) if shape.embeddings is None else shape.embeddings
            unquantized = min(unquantized, shape.parameters)
        return (unquantized * 2 + (shape.parameters - unquantized) * WIDTH[self.dtype]) / _GIB

    @property
    def stored_gib(self) -> float:
        """Return the size of the checkpoint, which is downloaded and loaded through the host RAM."""
        shape = self.shape
        return (shape.stored or shape.parameters * WIDTH[shape.dtype or "bf16"]) / _GIB

    def kv_gib(self, tokens: int, degree: int) -> float:
        """Return the size of one request's KV cache and states on one GPU.

        Args:
            tokens: number of tokens of the request.
            degree: number of GPUs for each copy of the model.
        """
        fixed, full, windowed = self._bytes(degree)
        return (fixed + full * tokens + windowed * min(tokens, self._window_tokens)) / _GIB

    def cached(self, room: float, degree: int) -> int:
        """Return the number of tokens that fit into a cache.

        If not even one request of the full context fits, return the number of tokens of the longest request that fits.
        In layers with a window, only a limited number of tokens of each request need memory.

        Args:
            room: size of the cache on one GPU, in GiB.
            degree: number of GPUs for each copy of the model.
        """
        whole = self.kv_gib(self.context, degree)
        if room >= whole:
            return int(room / (whole / self.context))
        fixed, full, windowed = self._bytes(degree)
        left = room * _GIB - fixed
        if left <= 0:
            return 0
        within = left / (full + windowed) if full + windowed else float(self.context)
        if within > self._window_tokens and full:
            within = (left - windowed * self._window_tokens) / full
        return max(0, int(within))

    @property
    def _window_tokens(self) -> int:
        """Return the maximum number of tokens of a request that a layer with a sliding window caches."""
        return self.context if self.shape.window is None or not self.windows else self.shape.window + CHUNK

    def _bytes(self, degree: int) -> tuple[float, float, float]:
        """Return the bytes on one GPU for a request's states, and for a token in layers without and with a window."""
        if self.layered and degree > 1:
            fixed, of_full, of_window = self._bytes(1)
            return fixed / degree, of_full / degree, of_window / degree
        shape = self.shape
        full = shape.layers - shape.window_layers - shape.uncached_layers
        heads = shape.kv_heads_by_layer or [shape.kv_heads] * full
        of_full = sum(-(-number // degree) for number in heads) * shape.head_dim
        of_window = -(-(shape.window_kv_heads or shape.kv_heads) // degree) * (shape.window_head_dim or shape.head_dim)
        value = 2 * self.kv_bytes
        extra = shape.extra_values * self.kv_bytes
        return shape.state / degree, of_full * value + extra, shape.window_layers * of_window * value


@dataclass(frozen=True)
class Fit:
    """A model's memory on one instance type. Sizes are in GiB, for one GPU or for the RAM of a CPU type.

    Attributes:
        instance: the instance type.
        degree: number of GPUs for each copy of the model, or 1 on a CPU type.
        weights: size of the weights.
        overhead: size of workspace and CUDA graphs.
        limit: amount of memory that may be used.
        room: amount of memory left for the KV cache. It is negative if the weights and `overhead` are too large.
        tokens: number of tokens that the KV cache can store.
        sequences: number of concurrent requests of the full context.
        problem: reason why the model does not fit, or empty if it fits.
        remarks: disadvantages of the instance type.
        experts: whether each GPU has whole experts.
        price: price of one instance.
    """

    instance: InstanceType
    degree: int
    weights: float
    overhead: float
    limit: float
    room: float
    tokens: int
    sequences: int
    problem: str
    remarks: tuple[str, ...]
    price: Price
    experts: bool = False

    @property
    def fits(self) -> bool:
        return not self.problem


def fit(need: Need, instance: InstanceType, price: Price | None = None) -> Fit:
    """Return the memory of a model on one instance type, with the best number of GPUs per copy.

    Args:
        price: price of the instance, or None to use the price in the table.
    """
    price = price or TABLE.of(instance.name)
    fits = [_with_degree(need, instance, degree, experts, price) for degree, experts in _degrees(need, instance)]
    return max(fits, key=lambda item: (item.fits, not _bus_bound(item) or not item.fits, not item.experts, item.degree))


def cpu_limit(instance: InstanceType, usable: float = _USABLE) -> float:
    """Return how much memory of a CPU instance models may use, in GiB."""
    return usable * (instance.ram_gib - 2)


def _degrees(need: Need, instance: InstanceType) -> Sequence[tuple[int, bool]]:
    """Return the pairs to try: a number of GPUs per copy, and whether each GPU has whole experts.
    If the user sets the number, only that is tried. Otherwise, 1, 2, 4 and 8 are tried if the engine accepts them.
    """
    if instance.gpus == 0:
        return ((1, False),)
    if need.layered:
        return ((instance.gpus, False),)
    ways = [False, True] if need.experts is None else [need.experts]
    numbers = [degree for degree in (1, 2, 4, 8) if degree <= instance.gpus] if need.degree is None else [need.degree]
    accepted = [(degree, way) for degree in numbers for way in ways if not undivided(need, degree, experts=way)]
    return accepted or ((1 if need.degree is None else need.degree, bool(need.experts)),)


def undivided(need: Need, degree: int, *, experts: bool) -> str:
    """Return why an engine refuses a number of GPUs per copy, or an empty string if the model's parts can be divided.

    Args:
        experts: whether each GPU has whole experts.
    """
    if need.layered:
        return ""
    parts, shape = degree // need.stages, need.shape
    heads = shape.heads or shape.kv_heads
    if heads % parts:
        return f"the tensor parallel degree {parts} does not divide the {heads} attention heads"
    for of in (shape.kv_heads, shape.window_kv_heads or shape.kv_heads, *shape.kv_heads_by_layer):
        if of % parts and parts % of:
            return f"neither the tensor parallel degree {parts} nor the number of KV heads ({of}) divides the other"
    if any(number % parts for number in shape.splits):
        return f"the tensor parallel degree {parts} does not divide each layer into whole blocks or heads"
    if parts > 1 and not experts and (shape.expert_splits or parts) % parts:
        return (
            f"the tensor parallel degree {parts} does not divide each expert into whole blocks; "
            "options.enable_expert_parallel: true leaves experts whole"
        )
    return ""


def _with_degree(need: Need, instance: InstanceType, degree: int, experts: bool, price: Price) -> Fit:
    if instance.gpus == 0:
        limit, graphs = cpu_limit(instance, need.usable), 0.0
    else:
        limit, graphs = need.usable * instance.gpu_gib, 1.0 if degree == 1 else 2.0
    weights = need.weight_gib / degree
    overhead = max(0.5, weights / 10) + graphs
    room = limit - weights - overhead
    tokens = need.cached(room, degree)
    problem = _problem(need, instance, degree, weights, overhead, limit, tokens)
    return Fit(
        instance=instance,
        degree=degree,
        weights=weights,
        overhead=overhead,
        limit=limit,
        room=room,
        tokens=tokens,
        sequences=tokens // need.context,
        problem=problem,
        remarks=_remarks(need, instance, degree, experts),
        price=price,
        experts=experts,
    )


def _problem(
    need: Need, instance: InstanceType, degree: int, weights: float, overhead: float, limit: float, tokens: int
) -> str:
    if problem := too_old(instance, need.built_for):
        return problem
    least = _AMPERE if need.weight_only and need.dtype in _IN_16_BITS else LEAST_CAPABILITIES.get(need.dtype)
    if instance.gpus and least is not None and instance.compute < least:
        return (
            f"{need.dtype} needs compute capability {least[0]}.{least[1]}, "
            f"but the {instance.gpu} has {instance.compute[0]}.{instance.compute[1]}"
        )
    if instance.blackwell and need.cuda is not None and need.cuda < _BLACKWELL_CUDA:
        return f"the {instance.gpu} needs CUDA 12.8, but the image has {need.cuda[0]}.{need.cuda[1]}"
    if degree > max(1, instance.gpus):
        return f"the tensor parallel degree, {degree}, exceeds the number of GPUs, {instance.gpus}"
    where = f"each of {degree} GPUs" if degree > 1 else "the GPU" if instance.gpus else "RAM"
    if tokens == 0:
        return (
            f"weights of {weights:.1f} GiB and {overhead:.1f} GiB of other memory are more than the {limit:.1f} "
            f"GiB of {where}"
        )
    if tokens < need.context:
        return (
            f"with weights of {weights:.1f} GiB and {overhead:.1f} GiB of other memory, the {limit:.1f} GiB of {where} "
            f"have room for a KV cache of {tokens} tokens, but the context has {need.context}"
        )
    return ""


def too_old(instance: InstanceType, built_for: tuple[int, int] | None) -> str:
    """Return why the GPU is too old for the image's kernels, or an empty string if it is new enough or this is unknown.

    Args:
        built_for: minimum compute capability that the image has kernels for, or None if it is unknown.
    """
    if not instance.gpus or built_for is None or instance.compute >= built_for:
        return ""
    least, has = (".".join(map(str, version)) for version in (built_for, instance.compute))
    return f"the image is built for compute capability {least} and newer, but the {instance.gpu} has {has}"


def able(built_for: tuple[int, int] | None) -> str:
    """Return the families of instance types whose GPUs an image has kernels for, as text.

    Args:
        built_for: minimum compute capability that the image has kernels for, or None if it is unknown.
    """
    families = [f"ml.{item.family}" for item in all_types() if item.gpus and not too_old(item, built_for)]
    return ", ".join(dict.fromkeys(families))


def _remarks(need: Need, instance: InstanceType, degree: int, experts: bool) -> tuple[str, ...]:
    remarks = []
    if instance.gpus and (reason := undivided(need, degree, experts=experts)):
        remarks.append(reason)
    if instance.gpus and need.stored_gib > 0.75 * instance.ram_gib:
        remarks.append(f"little host RAM ({instance.ram_gib} GiB) for a checkpoint of {need.stored_gib:.0f} GiB")
    if instance.blackwell and need.cuda is None:
        remarks.append("needs an image with CUDA 12.8 or newer (image.cuda)")
    if instance.gpus and instance.compute < _AMPERE and need.built_for is None:
        remarks.append(f"the {instance.gpu} is older than Ampere, and AWS's vLLM is built for Ampere and newer")
    if instance.gpus and need.dtype in _IN_16_BITS and instance.compute < LEAST_CAPABILITIES[need.dtype]:
        remarks.append(f"the {instance.gpu} computes {need.dtype} weights in 16 bits, so they save only memory")
    if not instance.gpus and (slow := _slow_kernels(instance)):
        remarks.append(slow)
    if not instance.gpus and instance.vcpus < 4:
        remarks.append("few cores")
    if degree > _BUS_LIMIT and not instance.nvlink:
        remarks.append(f"{degree} GPUs without NVLink")
    return tuple(remarks)


def _slow_kernels(instance: InstanceType) -> str:
    """Return which instructions a CPU type lacks, or an empty string if it has those for matrices."""
    if instance.architecture == "arm64":
        return "Graviton2 has no instructions for matrices" if instance.family.endswith("6g") else ""
    return "" if instance.family.endswith("7i") else "no AMX, so bf16 is slow"


def _bus_bound(item: Fit) -> bool:
    return item.degree > _BUS_LIMIT and not item.instance.nvlink


# -- the candidate instance types for a model, best first, and the table that `lmi deploy plan` prints -----------------


BEYOND_A_MACHINE = (
    "A SageMaker endpoint cannot split a model across machines. Dynamo on HyperPod can: put this server in front of it "
    "(lmi serve --engine openai)."
)


@dataclass(frozen=True)
class Candidates:
    """The instance types, either with or without GPUs, that a model may run on.

    Attributes:
        need: the model and its settings.
        source: source of the model's shape, for the table title.
        fits: the model's memory on each instance type, best first.
        chosen: entry for the specification's type or for the type that `auto` chose, or None if the type is unknown.
    """

    need: Need
    source: str
    fits: tuple[Fit, ...]
    chosen: Fit | None


@dataclass(frozen=True)
class Resolution:
    """The result of resolving a specification.

    Attributes:
        decision: the decision about the settings that the specification does not set.
        candidates: the candidate instance types, or None if the model size is unknown or there are several models.
        sums: resources of the inference components, or None if there are no components.
        prices: prices of the instance types.
    """

    decision: Decision
    candidates: Candidates | None
    sums: Sums | None = None
    prices: Prices = TABLE

    @property
    def chosen(self) -> Fit | None:
        """Return the model's memory on the chosen type, or None if the model size or the type is unknown."""
        return None if self.candidates is None else self.candidates.chosen


def rank(need: Need, cpu: bool = False, prices: Prices = TABLE) -> tuple[Fit, ...]:
    """Return the model's memory on every known GPU type, or with `cpu` on every known CPU type, best first.

    Types with other processors than the image are omitted. The order depends first on whether the model fits, then on
    whether there are remarks, and then on the price.

    Args:
        cpu: whether to rank CPU types rather than GPU types.
    """
    built_for = need.architecture
    types = [item for item in all_types() if (item.gpus == 0) == cpu and item.architecture == built_for]
    fits = [fit(need, instance, prices.of(instance.name)) for instance in types]
    return tuple(
        sorted(fits, key=lambda item: (not item.fits, bool(item.remarks), item.price.rank, item.instance.gpus))
    )


def cheapest(fits: Sequence[Fit]) -> Fit:
    """Return the best entry of a ranking by `rank`.

    Raises:
        DoesNotFit: the model does not fit on any instance type.
    """
    if not fits[0].fits:
        largest = max(fits, key=lambda item: item.room * item.degree)
        raise DoesNotFit(
            f"no known type has room for the model; on the largest, {largest.instance.name}, {largest.problem}",
            f"Use a shorter model.context, or a model.dtype with fewer bits. {BEYOND_A_MACHINE}",
        )
    return fits[0]


def too_small(small: Fit, fits: Sequence[Fit]) -> DoesNotFit:
    """Return the error for an instance type that is too small for the model.

    Args:
        small: the model's memory on this type.
        fits: the model's memory on other types, best first. The advice names types that are large enough.
    """
    advice = []
    if small.tokens >= 1024:
        advice.append(f"Set model.context to {small.tokens // 1024 * 1024} or less, or")
    if larger := _three_best(fits):
        advice.append(f"use {larger}, or")
    advice.append("set instance.unchecked: true to use it anyway.")
    text = " ".join(advice)
    return DoesNotFit(f"instance.type: {small.instance.name}: {small.problem}", text[0].upper() + text[1:])


def needs_gpus(
    instance: InstanceType, engine: str, fits: Sequence[Fit], built_for: tuple[int, int] | None
) -> DoesNotFit:
    """Return the error for a CPU type if the image contains only the GPU build of the engine.

    Args:
        fits: the model's memory on GPU types, best first, or () if the model size is unknown.
        built_for: minimum compute capability that the image has kernels for, or None if it is unknown.
    """
    return DoesNotFit(
        f"instance.type: {instance.name} has no GPU, but the image's engine {engine} runs on GPUs only",
        f"Use {_three_best(fits) or able(built_for)}, or set instance.unchecked: true to use it anyway.",
    )


def _three_best(fits: Sequence[Fit]) -> str:
    """Return the first three types of a ranking on which the model fits, with their prices, as text."""
    best = [item for item in fits if item.fits][:3]
    return ", ".join(f"{item.instance.name} ({item.price.text})" for item in best)


COLUMNS = (
    "type", "GPUs", "TP", "weights GiB", "KV GiB", "other GiB", "KV tokens", "requests", "cost class", "",
)  # fmt: skip


def title(candidates: Candidates) -> str:
    """Return the table title, which states the model's number of weights, precision, context and memory."""
    need = candidates.need
    whole = need.kv_gib(need.context, 1)
    a_token = whole - need.kv_gib(need.context - 1, 1)
    a_request = whole - a_token * need.context  # states and windows, which do not grow with the context
    return (
        f"{need.shape.parameters / 1e9:.3g} billion weights in {need.dtype} ({candidates.source}), "
        f"context {need.context}: {need.weight_gib:.1f} GiB, and {a_token * 1024:.3g} MiB per token"
        + (f" with {a_request:.2g} GiB per request" if a_request > _NEGLIGIBLE else "")
    )


_NEGLIGIBLE = 0.005
"""Size in GiB below which the table's title does not mention what a request caches at any length."""

_MOST_ROWS = 6


def rows(candidates: Candidates) -> tuple[tuple[str, ...], ...]:
    """Return the rows of the table, with the columns of COLUMNS: the best types, and always the chosen type.

    There is only one row for types of the same family with the same number of GPUs. Sizes are per GPU, and requests are
    concurrent requests of the full context. The last column marks the chosen type, and states its problem or remarks.
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
    notes = (["chosen"] if chosen else []) + ([item.problem] if item.problem else list(item.remarks))
    instance = item.instance
    return (
        instance.name,
        f"{instance.gpus} x {instance.gpu} {instance.gpu_gib:.0f} GiB" if instance.gpus else f"{instance.vcpus} vCPU",
        str(item.degree) if instance.gpus else "",
        f"{item.weights:.1f}",
        f"{max(0.0, item.room):.1f}",
        f"{item.overhead:.1f}",
        str(item.tokens),
        str(item.sequences),
        item.price.text,
        "; ".join(notes),
    )
