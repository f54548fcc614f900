"""Decide what a specification leaves open. One pass, from tables and arithmetic, with AWS's answers if AWS is
queried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code
from deploy.errors import DoesNotFit, SpecError
from deploy.resolve import images
from deploy.resolve.components import resolve_components
from deploy.resolve.decision import Decision, Pool, spec_on
from deploy.resolve.fit import Candidates, Fit, Need, Resolution, able, cheapest, fit, rank, too_old, too_small
from deploy.resolve.instances import InstanceType, device_warnings, find, num_engines, refuse_mistyped
from deploy.resolve.model.files import Hub, HubError, S3Prefix
from deploy.resolve.model.shape import known_model, read_shape, shape_in_directory, shape_in_s3
from deploy.resolve.prices import TABLE, Prices
from deploy.s3.prefix import ARCHIVE
from deploy.spec import Spec
from deploy.spec.components import shadow_of
from deploy.spec.sections import PrefixAware, Shape
from handler.config.engines import ENGINES
from handler.config.environment import CONTEXTS, STAGES
from handler.core.command_line import human

T = TypeVar("T")

if TYPE_CHECKING:
    from deploy.spec.values import Precision


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
        pool = replace(pool, gpus=decision.gpus, tensor_parallel=decision.tensor_parallel)
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
        SpecError: CPU and GPU types are mixed, or types need different InferenceAmiVersions.
    """
    if len({decision.ami for decision in decisions}) > 1 or len({decision.gpus == 0 for decision in decisions}) > 1:
        hosts = "; ".join(f"{decision.instance_type}: {decision.ami or 'the default'}" for decision in decisions)
        raise SpecError(
            f"instance.pools: the types need different hosts ({hosts}), but an endpoint has one",
            "Use types of one kind, with or without GPUs; an image with CUDA 13 runs on all NVIDIA types.",
        )


# -- decide what serves, and its shadow: each by itself, as a specification of its own ---------------------------------


def with_shadow(spec: Spec, resolve: Callable[[Spec], Resolution]) -> Resolution:
    """Return the serving variant's resolution, with the shadow's decision and warnings.

    Raises:
        SpecError, DoesNotFit: as `resolve`; messages about the shadow name it.
    """
    serving = resolve(spec.model_copy(update={"shadow": None}))
    try:
        shadow = resolve(shadow_of(spec)).decision
    except (SpecError, DoesNotFit) as error:
        raise type(error)(f"shadow: {error}", error.advice) from None
    own = [f"shadow: {warning}" for warning in shadow.warnings if warning not in serving.decision.warnings]
    warnings = (*serving.decision.warnings, *own)
    return replace(serving, decision=replace(serving.decision, shadow=shadow, warnings=warnings))


# -- derive timeouts of a start from the model's size ------------------------------------------------------------------
# SageMaker's default (eight minutes) is too short to load tens of GiB. A timeout that is too long costs nothing when
# the start succeeds, so each rate is at the slow end of the usual:
#
#     download      50 MiB/s from S3 to the instance (usual: 100 and more), and 300 s for the image and the disk
#     unpack        50 MiB/s of an archive, by one thread; it counts as download
#     from a hub    40 MiB/s, in the container, so it counts as startup
#     load          200 MiB/s from disk to the GPUs
#     ready         600 s: the process, CUDA, the choice of kernels, CUDA graphs, the first token
#     TensorRT-LLM  900 s more: autotuning, and kernels that are compiled at the first start
#     djl-tensorrtllm  AWS's image compiles the whole engine at its start: all of the 3600 s
#
# SageMaker accepts 60 to 3600 seconds for each.

_LONGEST = 3600
_UNKNOWN_GIB = 20.0
_DOWNLOAD, _UNPACK, _HUB, _LOAD = 50, 50, 40, 200  # MiB/s


class Times(NamedTuple):
    """Timeouts in seconds, and warnings if SageMaker's maximum may be too short."""

    download: int
    startup: int
    warnings: tuple[str, ...] = ()


def times(
    gib: float | None,
    *,
    engine: str = "",
    from_hub: bool = False,
    is_archive: bool = False,
    builds_engine: bool = False,
) -> Times:
    """Return the timeouts of a start.

    Args:
        gib: size of the checkpoint; None: unknown, 20 GiB are assumed.
        engine: option.llm_engine.
        from_hub: whether the container downloads the model.
        is_archive: whether SageMaker unpacks it.
        builds_engine: whether the image compiles the model at its start.
    """
    mib = (_UNKNOWN_GIB if gib is None else gib) * 1024
    download = 300 + (0 if from_hub else mib / _DOWNLOAD) + (mib / _UNPACK if is_archive else 0)
    startup = 600 + mib / _LOAD + (900 if engine == "trtllm" else 0) + (mib / _HUB if from_hub else 0)
    if builds_engine:
        startup = max(startup, _LONGEST)
    warnings = []
    if download > _LONGEST:
        warnings.append(
            f"Model data of {mib / 1024:.0f} GiB may take longer than the {_LONGEST} s that SageMaker waits."
        )
    if startup > _LONGEST:
        advice = "; put it into S3 (model.path), whose download has its own time limit" if from_hub else ""
        warnings.append(
            f"Loading {mib / 1024:.0f} GiB may take longer than the {_LONGEST} s that SageMaker waits{advice}."
        )
    return Times(_rounded(download), _rounded(startup), tuple(warnings))


def _rounded(seconds: float) -> int:
    """Round up to whole minutes, within SageMaker's limits."""
    return min(_LONGEST, -(-int(seconds) // 60) * 60)


_CONTEXT = 4096
"""Tokens, if neither the specification nor the model gives a context."""

_UNREADABLE = ("AccessDenied", "AllAccessDisabled", "NoSuchBucket", "403")

_CPU_ENGINES = [name for name, engine in ENGINES.items() if not engine.spreads]

_PRECISIONS: dict[str, Precision] = {
    "fp8": "fp8",
    "bitsandbytes": "int4",
    "int4": "int4",
    "int8": "int8",
    "awq": "int4",  # option.quantize: what it makes of the weights
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",  # option.dtype
}
"""Values of options that set the weights' precision if model.dtype is `auto`."""


@dataclass(frozen=True)
class ModelSize:
    """A model's shape, its source in a few words for the table of candidates, and the problems of other sources.

    Attributes:
        packed: GiB of its archive.
    """

    shape: Shape | None
    source: str
    notes: tuple[str, ...] = ()
    packed: float | None = None


def resolve(
    spec: Spec,
    region: str,
    *,
    account: str | None = None,
    aws: Aws | None = None,
    hub: Hub | None = None,
    prices: Prices = TABLE,
) -> Resolution:
    """Decide everything that the specification leaves open.

    Args:
        region: the endpoint's region.
        account: twelve digits; None: ask AWS, else take the role's account, in which SageMaker creates the endpoint.
        aws: asked for the account, the image's digest and the model's files in S3; None: ask nothing.
        hub: asked for the model's files; None: the table of known models is used.
        prices: prices of instances.

    Raises:
        SpecError: the specification contradicts itself, or is incomplete.
        DoesNotFit: the model is too large for the named instance type, or for all types.
        NotThere: ECR has no such image.
    """
    account = account or (aws.account() if aws is not None else spec.role.split(":")[4])
    return _resolve(spec, _Asked(region, account, aws, hub, prices))


@dataclass(frozen=True)
class _Asked:
    """The endpoint's region and account, and the sources to query, as in `resolve`."""

    region: str
    account: str
    aws: Aws | None
    hub: Hub | None
    prices: Prices


def _resolve(spec: Spec, asked: _Asked) -> Resolution:
    if spec.shadow is not None:
        return with_shadow(spec, lambda one: _resolve(one, asked))
    if spec.instance.pools:
        return resolve_pools(spec, lambda on_type: _resolve(on_type, asked))
    if spec.components:
        return resolve_components(spec, lambda server: _of_server(server, asked))
    return _of_server(spec, asked)


def _of_server(spec: Spec, asked: _Asked) -> Resolution:
    """Decide for one server on one instance type."""
    aws, prices = asked.aws, asked.prices
    image = images.resolve_image(spec.image, asked.region, asked.account, aws)
    size = find_size(spec, aws, asked.hub)
    need, need_warnings = _need(spec, size.shape, image)
    instance = None if spec.instance.type == "auto" else find(spec.instance.type)
    fits = () if need is None else rank(need, _on_cpu(spec) if instance is None else instance.gpus == 0, prices)
    if instance is not None and not spec.instance.unchecked and (old := too_old(instance, image.built_for)):
        raise DoesNotFit(f"instance.type: {instance.name}: {old}", f"Use {able(image.built_for)}, or another image.")
    chosen, type_warnings = _choose(spec, instance, need, fits, prices)
    instance = instance if chosen is None else chosen.instance
    ami, ami_warnings = images.choose_ami(spec.instance.ami, instance, image.cuda)
    times = _times(spec, need.stored_gib if need is not None else size.packed)
    decision = Decision(
        region=asked.region,
        account=asked.account,
        image=image.uri,
        instance_type=spec.instance.type if instance is None else instance.name,
        gpus=_min_gpus(spec) if instance is None else instance.gpus,
        ami=ami,
        model_data=spec.model.s3 or spec.model.upload,
        download=spec.timeouts.download or times.download,
        startup=spec.timeouts.startup or times.startup,
        provision=spec.timeouts.provision,
        tensor_parallel=_degree(spec, chosen, instance),
        warnings=(
            *image.warnings,
            *size.notes,
            *need_warnings,
            *type_warnings,
            *ami_warnings,
            *_volume_warnings(spec, instance),
            *device_warnings(spec, instance, _engine_gpus(spec, chosen, instance)),
            *times.warnings,
        ),
    )
    candidates = None if need is None else Candidates(need, size.source, fits, chosen)
    return Resolution(decision, candidates, prices=prices)


def find_size(spec: Spec, aws: Aws | None = None, hub: Hub | None = None) -> ModelSize:
    """Find the model's shape: in the specification, otherwise in its files, otherwise in the table.

    Args:
        hub: None: it is not queried.

    Raises:
        SpecError: model.path is not a directory, or its config.json is wrong.
    """
    model, notes = spec.model, list[str]()
    if model.shape is not None:
        return ModelSize(model.shape, "model.shape")
    if model.directory is not None:
        if not model.directory.is_dir():
            raise SpecError(f"model.path: {model.path} is not a directory on this machine")
        return ModelSize(shape_in_directory(model.directory, notes), "its files", tuple(notes))
    if model.s3 is not None and model.s3.endswith(ARCHIVE):
        return _packed(model.s3, aws)
    if model.s3 is not None:
        prefix = model.s3
        return ModelSize(_readable(aws, lambda aws: shape_in_s3(aws, prefix, notes)), "its files in S3", tuple(notes))
    name = str(model.id)
    found = _on_hub(hub, name, str(spec.options.get("revision", "main")), notes) if hub is not None else None
    if found is not None and hub is not None:
        return ModelSize(found, f"its files on {hub.name}", tuple(notes))
    shape = known_model(name)
    return ModelSize(shape, "known model" if hub is None else "table of known models", tuple(notes))


def _on_hub(hub: Hub, name: str, revision: str, notes: list[str]) -> Shape | None:
    """Read the shape on the hub. Errors there are notes: the table or the specification may have the model."""
    owner, _, rest = name.partition("/")
    model, _, file = rest.partition("/")  # OWNER/MODEL/FILE.gguf names a file of the model
    if not model:  # "demo", or a model of the container's
        return None
    try:
        return read_shape(hub.files(f"{owner}/{model}", revision), notes, file if file.endswith(".gguf") else None)
    except HubError as error:
        notes.append(f"The model's size does not come from the hub: {error}.")
    except SpecError as error:
        notes.append(f"The model's files on the hub do not give its size: {error}.")
    return None


def _packed(uri: str, aws: Aws | None) -> ModelSize:
    """Return the size of an archive, whose content is not read."""
    size = _readable(aws, lambda aws: S3Prefix(aws, uri).sizes.get(""))
    of = "" if size is None else f" of {human(size)}"
    note = f"model.s3 is an archive{of}, which each instance unpacks at its start: its content's size is not known."
    return ModelSize(None, "", (note,), None if size is None else size / 2**30)


def _readable(aws: Aws | None, read: Callable[[Aws], T | None]) -> T | None:
    """Read in S3; None: it does not exist, or the user may not read it. Preflight reports missing model data."""
    if aws is None:
        return None
    try:
        return read(aws)
    except ClientError as error:
        if error_code(error) not in _UNREADABLE:
            raise
        return None


def _need(spec: Spec, shape: Shape | None, image: images.ResolvedImage) -> tuple[Need | None, tuple[str, ...]]:
    """Return the model's need, and warnings about assumptions."""
    if shape is None:
        return None, ()
    warnings = []
    context = spec.model.context or _number(spec, "max_model_len", "max_seq_len", "max_num_tokens") or shape.context
    if context is None:
        context = _CONTEXT
        warnings.append(f"The model's longest context is not known: {_CONTEXT} tokens are assumed; set model.context.")
    dtype = spec.model.dtype if spec.model.dtype != "auto" else _precision(spec, shape)
    kv = str(spec.options.get("kv_cache_dtype", "auto")).lower()
    usable = spec.options.get("gpu_memory_utilization")
    need = Need(
        shape,
        dtype,
        context,
        kv_bytes=1 if kv.startswith(("fp8", "nvfp4", "int8")) else 2,
        degree=_gpus_per_copy(spec),
        usable=float(usable) if isinstance(usable, int | float) and 0 < usable < 1 else Need.usable,
        cuda=image.cuda,
        built_for=image.built_for,
        windows=_frees_windows(spec),
        weight_only=_is_vllm(spec),
    )
    return need, tuple(warnings)


def _frees_windows(spec: Spec) -> bool:
    """Return whether the engine frees the cache outside of a sliding window: vLLM does, if its option is not turned
    off.
    """
    off = str(spec.options.get("disable_hybrid_kv_cache_manager", "false")).lower()
    return _is_vllm(spec) and off == "false" and "kv_transfer_config" not in spec.options


def _is_vllm(spec: Spec) -> bool:
    engine = spec.options.get("llm_engine") or spec.options.get("rolling_batch", "auto")
    return engine == "vllm" or (engine == "auto" and spec.image.aws == "djl-lmi")


def _precision(spec: Spec, shape: Shape) -> Precision:
    stored = shape.dtype or "bf16"
    if stored not in ("bf16", "fp16", "fp32"):  # quantized already
        return stored
    values = (str(spec.options.get(name, "")).lower() for name in ("quantize", "dtype"))
    return next((_PRECISIONS[value] for value in values if value in _PRECISIONS), stored)


def _choose(
    spec: Spec, instance: InstanceType | None, need: Need | None, fits: tuple[Fit, ...], prices: Prices
) -> tuple[Fit | None, tuple[str, ...]]:
    """Choose among the candidates; None: the type, or the model's size, is unknown. Also return warnings."""
    name = spec.instance.type
    if name == "auto":
        if need is None:
            raise SpecError(
                "instance.type: auto needs the model's size, which is not known here",
                "Name a type (instance.type: ml.g6e.xlarge), or set model.shape: {parameters: 8.03e9, layers: 32, "
                "kv_heads: 8, head_dim: 128}, as in the model's config.json.",
            )
        chosen = cheapest(fits)
        return chosen, _remarks(chosen)
    if instance is None:
        if not spec.instance.unchecked:
            refuse_mistyped(name)
        return None, (f"{name} is not in the tables (of 2026), so it is not checked whether the model fits.",)
    if need is None:
        return None, ("The model's size is not known, so it is not checked whether it fits (model.shape).",)
    chosen = fit(need, instance, prices.of(instance.name, spec.instance.price))
    if chosen.fits:
        return chosen, _remarks(chosen)
    if not spec.instance.unchecked:
        raise too_small(chosen, fits)
    return chosen, (f"{name}: {chosen.problem} (instance.unchecked).", *_remarks(chosen))


def _remarks(chosen: Fit) -> tuple[str, ...]:
    return tuple(f"{chosen.instance.name}: {remark}." for remark in chosen.remarks)


def _on_cpu(spec: Spec) -> bool:
    """Return whether the image has no CUDA: by the engine if one is named, otherwise by the image's name."""
    engine = spec.options.get("llm_engine")
    if engine is not None:
        return engine in _CPU_ENGINES
    name = spec.image.uri or f"{spec.image.repository}:{spec.image.tag}"
    return "cpu" in re.split("[^a-z0-9]+", name.lower())


def _degree_option(spec: Spec) -> int | None:
    """Return the tensor parallel degree of the options, otherwise the components' GPUs if all have the same."""
    degree = _number(spec, "tensor_parallel_degree")
    if degree is not None:
        return degree
    if "replicas" in spec.options and "tensor_parallel_degree" not in spec.options:
        return 1  # the server's own default; the GPUs beside are for other engines
    accelerators = {component.accelerators for component in spec.components}
    return accelerators.pop() if len(accelerators) == 1 else None


def _gpus_per_copy(spec: Spec) -> int | None:
    """Return the GPUs of one copy: the degree, times the stages of its layers and the parts of the context."""
    others = _others(spec)
    return others * (_degree_option(spec) or 1) if others > 1 else _degree_option(spec)


def _others(spec: Spec) -> int:
    """Return the factor of a copy's GPUs besides the tensor parallel degree."""
    return (_number(spec, *STAGES) or 1) * (_number(spec, *CONTEXTS) or 1)


def _min_gpus(spec: Spec) -> int:
    """Return how many GPUs an unknown instance type must have at least."""
    return max(_gpus_per_copy(spec) or 1, *(component.accelerators for component in spec.components), 1)


def _number(spec: Spec, *names: str) -> int | None:
    for name in names:
        value = spec.options.get(name)
        if value is not None and str(value).isdigit():
            return int(value)
    return None


def _degree(spec: Spec, chosen: Fit | None, instance: InstanceType | None) -> int | None:
    if instance is not None and instance.gpus == 0:
        return None
    if chosen is None or _others(spec) > 1:
        return _degree_option(spec)
    return chosen.degree


def _engine_gpus(spec: Spec, chosen: Fit | None, instance: InstanceType | None) -> int:
    """Return the GPUs of one engine."""
    return (_degree(spec, chosen, instance) or 1) * _others(spec)


def _volume_warnings(spec: Spec, instance: InstanceType | None) -> tuple[str, ...]:
    if instance is None or not instance.nvme_gb:
        return ()
    warnings = []
    if spec.instance.volume_gb is not None:
        raise SpecError(
            f"instance.volume_gb: {instance.name} has {instance.nvme_gb} GB of NVMe and cannot have another volume",
            "Leave it out.",
        )
    if spec.encryption.volume_key is not None:
        warnings.append(
            f"encryption.volume_key: {instance.name} has NVMe, which the key does not cover; the disk encrypts itself."
        )
    return tuple(warnings)


def _times(spec: Spec, gib: float | None) -> Times:
    engine = str(spec.options.get("llm_engine", "trtllm" if spec.image.aws == "djl-tensorrtllm" else ""))
    return times(
        gib,
        engine=engine,
        from_hub=spec.model.id is not None,
        is_archive=(spec.model.s3 or "").endswith(ARCHIVE),
        builds_engine=spec.image.aws == "djl-tensorrtllm",
    )


# -- advice on growth: a bigger instance, more instances, or HyperPod with Dynamo. A sentence or two each --------------


_FEW = 4
"""Concurrent requests of the full context, below which a larger cache helps more than another instance."""

_MANY = 4
"""Instances from which on the routing decides how much of the caches is used."""


def advice(spec: Spec, decision: Decision, candidates: Candidates | None) -> tuple[str, ...]:
    """Return the advice that follows from the specification and from what fits.

    Args:
        candidates: None: the model's size is not known, and only the number of instances gives advice.
    """
    chosen = None if candidates is None else candidates.chosen
    found = [] if chosen is None or candidates is None else [*_size(spec, chosen, candidates.fits)]
    return (*found, *_advised_number(spec, decision), *_routing(spec))


def _size(spec: Spec, chosen: Fit, fits: Sequence[Fit]) -> Iterator[str]:
    """Compare the requests that a server on the chosen type has room for with those wanted."""
    if not chosen.fits:
        return
    wanted = _FEW if spec.scaling is None else max(_FEW, round(spec.scaling.concurrency))
    server = f"A copy on {chosen.instance.name}" if spec.components else chosen.instance.name
    gpus = spec.components[0].accelerators if spec.components else chosen.instance.gpus
    sequences = chosen.sequences * num_engines(spec, gpus, chosen.degree)
    held = f"{server} has room for {sequences} concurrent requests of the full context"
    if sequences >= wanted:
        yield f"{held}: for more, use more instances (instance.count, scaling.max), not a bigger one."
        return
    bigger = next((item for item in fits if item.fits and item.sequences >= wanted), None)
    name = "a bigger instance"
    if bigger is not None:
        name = f"{bigger.instance.name} ({bigger.price.text}) for {bigger.sequences}"
    yield (
        f"{held}: for {wanted}, use {name}, or a shorter model.context. More instances share the requests, but "
        "make no room for longer ones."
    )


def _advised_number(spec: Spec, decision: Decision) -> Iterator[str]:
    if spec.instance.count == 1 and spec.scaling is None and spec.instance.managed is None and not spec.components:
        yield (
            "One instance has no spare: a second (instance.count: 2) keeps serving while one fails or is "
            "replaced, even where one bigger instance would be fast enough."
        )


def _routing(spec: Spec) -> Iterator[str]:
    most = max(spec.instance.count, spec.scaling.max if spec.scaling is not None else 0)
    if most >= _MANY and isinstance(spec.routing, PrefixAware):
        yield (
            f"With up to {most} instances, prefix-aware routing looks at the beginning of a text, not at the caches. "
            "Dynamo on HyperPod routes by what each worker holds: compare both for long shared prompts."
        )
