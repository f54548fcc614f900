"""Resolve the settings that a specification does not set, from tables, and from AWS and the hub if they are queried."""

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
from deploy.resolve.decision import Decision, InstancePool, joined, spec_on
from deploy.resolve.fit import (
    Candidates,
    Fit,
    Need,
    Resolution,
    able,
    cheapest,
    fit,
    needs_gpus,
    rank,
    too_old,
    too_small,
)
from deploy.resolve.instances import (
    LLAMACPP,
    InstanceType,
    architecture,
    device_warnings,
    find,
    num_engines,
    refuse_mistyped,
    without_gpus,
)
from deploy.resolve.model.files import Hub, HubError, S3Prefix
from deploy.resolve.model.shape import read_shape, shape_from_table, shape_in_directory, shape_in_s3
from deploy.resolve.prices import TABLE, Prices
from deploy.s3.prefix import ARCHIVE
from deploy.spec import Spec
from deploy.spec.components import shadow_of
from deploy.spec.sections import PrefixAware, Shape
from handler.config.environment import CONTEXTS, STAGES
from handler.config.implied import selected_engine
from handler.config.sources import Setting
from handler.core.numbers import is_digits
from handler.core.sizes import format_size

T = TypeVar("T")

if TYPE_CHECKING:
    from deploy.spec.values import Precision


def resolve_pools(spec: Spec, resolve: Callable[[Spec], Resolution]) -> Resolution:
    """Resolve the specification for the instance type of each pool separately, and merge the decisions.

    Args:
        resolve: function that resolves a specification with a single instance type.

    Raises:
        DoesNotFit: the model does not fit on a pool's type.
        SpecError: the settings for a pool's type are invalid, or the types need different host AMIs.
    """
    resolutions = [_on_pool(spec, index, resolve) for index in range(len(spec.instance.pools))]
    resolutions.sort(key=lambda resolution: resolution.decision.pools[0].priority)
    decisions = [resolution.decision for resolution in resolutions]
    _check_hosts(decisions)
    pools = tuple(decision.pools[0] for decision in decisions)
    decision = joined(
        decisions,
        (warning for decision in decisions for warning in decision.warnings),
        pools=pools,
        components={name: replace(decision, pools=pools) for name, decision in decisions[0].components.items()},
    )
    return replace(resolutions[0], decision=decision)


def _on_pool(spec: Spec, index: int, resolve: Callable[[Spec], Resolution]) -> Resolution:
    """Resolve the specification for one of its pools. The decision's `pools` contains only that pool."""
    item = spec.instance.pools[index]
    pool = InstancePool(item.priority or index + 1, item.type, 0, options=item.options)
    try:
        resolution = resolve(spec_on(spec, pool))
    except (DoesNotFit, SpecError) as error:
        raise type(error)(f"instance.pools[{index}]: {error}", error.advice) from error
    decision = resolution.decision
    pool = replace(
        pool, gpus=decision.gpus, tensor_parallel=decision.tensor_parallel, expert_parallel=decision.expert_parallel
    )
    return replace(resolution, decision=replace(decision, pools=(pool,)))


def _check_hosts(decisions: list[Decision]) -> None:
    """Check that all instance types can use the same host AMI, as an endpoint configuration has only one AMI.

    Raises:
        SpecError: the pools mix CPU and GPU types, or the types need different values of InferenceAmiVersion.
    """
    if len({decision.ami for decision in decisions}) > 1 or len({decision.gpus == 0 for decision in decisions}) > 1:
        hosts = "; ".join(f"{decision.instance_type}: {decision.ami or 'the default'}" for decision in decisions)
        raise SpecError(
            f"instance.pools: the types need different host AMIs ({hosts}), but an endpoint has only one",
            "Use either GPU types or CPU types. An image with CUDA 13 runs on all types with NVIDIA GPUs.",
        )


# -- the serving variant and its shadow variant, which are resolved separately -----------------------------------------


def with_shadow(spec: Spec, resolve: Callable[[Spec], Resolution]) -> Resolution:
    """Resolve the serving variant and its shadow variant. Return the serving variant's resolution with both decisions.

    Args:
        resolve: function that resolves a specification without a shadow variant.

    Raises:
        SpecError: the settings of one of the variants are invalid.
        DoesNotFit: the model of one of the variants does not fit.
    """
    serving = resolve(spec.model_copy(update={"shadow": None}))
    try:
        shadow = resolve(shadow_of(spec)).decision
    except (SpecError, DoesNotFit) as error:
        raise type(error)(f"shadow: {error}", error.advice) from None
    shadow_warnings = [f"shadow: {warning}" for warning in shadow.warnings if warning not in serving.decision.warnings]
    warnings = (*serving.decision.warnings, *shadow_warnings)
    return replace(serving, decision=replace(serving.decision, shadow=shadow, warnings=warnings))


# -- timeouts of a start, which depend on the model's size -------------------------------------------------------------
# SageMaker's default of eight minutes is too short to load tens of GiB. A long timeout costs nothing if the start
# succeeds, so these are slow rates:
#
#     download      50 MiB/s from S3 to the instance (usually 100 or more), plus 300 s for the image and the disk
#     unpack        50 MiB/s of an archive, in one thread (part of the download)
#     hub           40 MiB/s in the container (part of the startup)
#     load          200 MiB/s from disk to the GPUs
#     ready         600 s for the process, CUDA, the choice of kernels, CUDA graphs and the first token
#     TensorRT-LLM  900 s in addition, for autotuning, and to compile kernels at the first start
#     djl-tensorrtllm  the maximum of 3600 s, as AWS's image compiles the whole engine at its start
#
# SageMaker accepts 60 to 3600 seconds for each timeout.

_LONGEST = 3600
_UNKNOWN_GIB = 20.0
_DOWNLOAD, _UNPACK, _HUB, _LOAD = 50, 50, 40, 200  # MiB/s


class StartTimeouts(NamedTuple):
    """The timeouts for starting, in seconds, and warnings if SageMaker's maximum may be too short."""

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
) -> StartTimeouts:
    """Return the timeouts for starting.

    Args:
        gib: size of the checkpoint in GiB, or None if it is unknown, in which case 20 GiB are assumed.
        engine: the value of option.llm_engine.
        from_hub: whether the container downloads the model from the hub.
        is_archive: whether the model is an archive, which SageMaker unpacks.
        builds_engine: whether the image compiles the model at startup.
    """
    mib = (_UNKNOWN_GIB if gib is None else gib) * 1024
    download = 300 + (0 if from_hub else mib / _DOWNLOAD) + (mib / _UNPACK if is_archive else 0)
    startup = 600 + mib / _LOAD + (900 if engine == "trtllm" else 0) + (mib / _HUB if from_hub else 0)
    if builds_engine:
        startup = max(startup, _LONGEST)
    warnings = []
    if download > _LONGEST:
        warnings.append(
            f"Downloading {mib / 1024:.0f} GiB of model data may take longer than SageMaker's maximum of {_LONGEST} s."
        )
    if startup > _LONGEST:
        advice = " Upload the model to S3 (model.path): the download from S3 has its own timeout." if from_hub else ""
        warnings.append(
            f"Loading {mib / 1024:.0f} GiB may take longer than SageMaker's maximum of {_LONGEST} s.{advice}"
        )
    return StartTimeouts(_rounded(download), _rounded(startup), tuple(warnings))


def _rounded(seconds: float) -> int:
    """Drop fractions of a second, and round up to whole minutes, but not above SageMaker's maximum."""
    return min(_LONGEST, -(-int(seconds) // 60) * 60)


_CONTEXT = 4096
"""Number of tokens to assume if neither the specification nor the model states the context."""
_UNKNOWN_CONTEXT = f"The model's maximum context is unknown; {_CONTEXT} tokens are assumed. Set model.context."

_UNREADABLE = ("AccessDenied", "AllAccessDisabled", "NoSuchBucket", "403")

_FOR_GPUS = re.compile("/(djl-inference|lmi-handler(-[a-z0-9]+)?)[:@]")
"""Matches AWS's images and this project's images, whose vLLM is for GPUs only. Others may contain a CPU build."""

_FOR_VLLM = (
    "the tensor parallel degree {} does not divide the experts, so OPTION_ENABLE_EXPERT_PARALLEL leaves them whole if "
    "the image has vLLM; for another engine, set options.llm_engine"
)

_PRECISIONS: dict[str, Precision] = {
    "fp8": "fp8",
    "bitsandbytes": "int4",
    "int4": "int4",
    "int8": "int8",
    "awq": "int4",  # the values up to this line are for option.quantize, the others for option.dtype
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}
"""Maps the value of an option to the precision that the weights have if model.dtype is `auto`."""


@dataclass(frozen=True)
class ModelSize:
    """The size of a model.

    Attributes:
        shape: the model's shape, or None if it is unknown.
        source: source of the shape, as text for the table of candidates.
        notes: problems with other sources, each as a sentence.
        packed: size of the model archive in GiB, or None if it is unknown or the model is not an archive.
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
    """Determine the settings that a specification does not set.

    Args:
        region: region of the endpoint.
        account: twelve-digit account ID, or None to query AWS or else use the account of the role.
        aws: client to query for the account, the image digest and the model files in S3, or None not to query AWS.
        hub: client to query for the model files on the hub, or None to use the table of known models.
        prices: prices of the instance types.

    Raises:
        SpecError: the specification is incomplete or contradictory.
        DoesNotFit: the model is too large for the specification's instance type, or for all types.
        NotThere: the image is not in ECR.
    """
    account = account or (aws.account() if aws is not None else spec.role.split(":")[4])
    return _resolve(spec, _Inputs(region, account, aws, hub, prices))


@dataclass(frozen=True)
class _Inputs:
    """The arguments of `resolve` other than the specification."""

    region: str
    account: str
    aws: Aws | None
    hub: Hub | None
    prices: Prices


def _resolve(spec: Spec, inputs: _Inputs) -> Resolution:
    if spec.shadow is not None:
        return with_shadow(spec, lambda shadow_spec: _resolve(shadow_spec, inputs))
    if spec.instance.pools:
        return resolve_pools(spec, lambda on_type: _resolve(on_type, inputs))
    if spec.components:
        return resolve_components(spec, lambda server: _of_server(server, inputs))
    return _of_server(spec, inputs)


def _of_server(spec: Spec, inputs: _Inputs) -> Resolution:
    """Resolve a specification that has one server and at most one instance type.

    There are five decisions: the image, the model size and needs, the instance type, the host AMI and the timeouts.
    """
    image = images.resolve_image(spec.image, inputs.region, inputs.account, inputs.aws)
    size = find_size(spec, inputs.aws, inputs.hub)
    need = None if size.shape is None else _need(spec, size.shape, image)
    choice = _choose(spec, image, need, inputs.prices)
    ami = images.choose_ami(spec.instance.ami, choice.instance, image.cuda)
    times = _times(spec, need.stored_gib if need is not None else size.packed)
    decision = Decision(
        region=inputs.region,
        account=inputs.account,
        image=image.uri,
        instance_type=spec.instance.type if choice.instance is None else choice.instance.name,
        gpus=_min_gpus(spec) if choice.instance is None else choice.instance.gpus,
        ami=ami.name,
        model_data=spec.model.s3 or spec.model.upload,
        download=spec.timeouts.download or times.download,
        startup=spec.timeouts.startup or times.startup,
        provision=spec.timeouts.provision,
        tensor_parallel=_degree(spec, choice),
        expert_parallel=choice.fit is not None and choice.fit.experts,
        warnings=(
            *image.warnings,
            *size.notes,
            *([_UNKNOWN_CONTEXT] if size.shape is not None and _context(spec, size.shape) is None else []),
            *choice.warnings,
            *ami.warnings,
            *_volume_warnings(spec, choice.instance),
            *device_warnings(spec, choice.instance, (_degree(spec, choice) or 1) * _stages(spec), image.cuda),
            *times.warnings,
        ),
    )
    candidates = None if need is None else Candidates(need, size.source, choice.fits, choice.fit)
    return Resolution(decision, candidates, prices=inputs.prices)


def find_size(spec: Spec, aws: Aws | None = None, hub: Hub | None = None) -> ModelSize:
    """Return the size of the specification's model, from `model.shape`, its files, or the table of known models.

    Args:
        aws: client to query for files in S3, or None not to query AWS.
        hub: client to query for files on the hub, or None not to query it.

    Raises:
        SpecError: model.path is not a directory, or the model files are invalid.
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
    size = _on_hub(hub, name, str(spec.options.get("revision", "main")), notes) if hub is not None else None
    if size is not None and hub is not None:
        return ModelSize(size, f"its files on {hub.name}", tuple(notes))
    shape = shape_from_table(name)
    return ModelSize(shape, "known model" if hub is None else "table of known models", tuple(notes))


def _on_hub(hub: Hub, name: str, revision: str, notes: list[str]) -> Shape | None:
    """Return the shape of a model from its files on the hub, or None if that fails.

    Errors are only added to `notes`, because the shape may be known from another source.
    """
    owner, _, path = name.partition("/")
    model, _, file = path.partition("/")  # OWNER/MODEL/FILE.gguf names a file of the model
    if not model:  # "demo", or a model inside the container
        return None
    try:
        return read_shape(hub.files(f"{owner}/{model}", revision), notes, file if file.endswith(".gguf") else None)
    except HubError as error:
        notes.append(f"The model's size could not be read from the hub: {error}.")
    except SpecError as error:
        notes.append(f"The model's size could not be read from its files on the hub: {error}.")
    return None


def _packed(uri: str, aws: Aws | None) -> ModelSize:
    """Return the size of a model archive in S3. Its content, and therefore the model's shape, is not read."""
    size = _readable(aws, lambda aws: S3Prefix(aws, uri).sizes.get(""))
    of = "" if size is None else f" of {format_size(size)}"
    note = f"model.s3 is an archive{of}, which each instance unpacks at its start, so the model's size is unknown."
    return ModelSize(None, "", (note,), None if size is None else size / 2**30)


def _readable(aws: Aws | None, read: Callable[[Aws], T | None]) -> T | None:
    """Return the result of `read`, or None if the data in S3 does not exist or may not be read.

    A preflight check reports missing model data.
    """
    if aws is None:
        return None
    try:
        return read(aws)
    except ClientError as error:
        if error_code(error) not in _UNREADABLE:
            raise
        return None


def _need(spec: Spec, shape: Shape, image: images.ResolvedImage) -> Need:
    """Return the model's shape and the settings that determine how much memory it needs."""
    kv = str(spec.options.get("kv_cache_dtype", "auto")).lower()
    usable = spec.options.get("gpu_memory_utilization")
    return Need(
        shape,
        spec.model.dtype if spec.model.dtype != "auto" else _precision(spec, shape),
        _context(spec, shape) or _CONTEXT,
        kv_bytes=1 if kv.startswith(("fp8", "nvfp4", "int8")) else 2,
        degree=_gpus_per_copy(spec),
        usable=float(usable) if isinstance(usable, int | float) and 0 < usable < 1 else Need.usable,
        cuda=image.cuda,
        built_for=image.built_for,
        windows=_frees_windows(spec),
        weight_only=_engine(spec) == "vllm",
        stages=_stages(spec),
        experts=_expert_parallel(spec),
        layered=_engine(spec) == LLAMACPP,
        architecture=image.architecture,
    )


def _context(spec: Spec, shape: Shape) -> int | None:
    return spec.model.context or _number(spec, "max_model_len", "max_seq_len", "max_num_tokens") or shape.context


def _frees_windows(spec: Spec) -> bool:
    """Return whether the engine frees the cache outside of a sliding window, as vLLM and llama.cpp do by default."""
    off = str(spec.options.get("disable_hybrid_kv_cache_manager", "false")).lower()
    if _engine(spec) == LLAMACPP:
        return "--swa-full" not in str(spec.options.get("llama_server_args", ""))
    return _engine(spec) == "vllm" and off == "false" and "kv_transfer_config" not in spec.options


def _expert_parallel(spec: Spec) -> bool | None:
    """Return whether each GPU has whole experts, or None if vLLM is used and the options do not decide this.

    If the specification does not state which engine the image contains, vLLM is assumed, and `_remarks` reports that.
    """
    value = spec.options.get("enable_expert_parallel")
    return (None if _engine(spec) in ("", "vllm") else False) if value is None else str(value).lower() == "true"


def _engine(spec: Spec) -> str:
    """Return the engine that the options or AWS's image select, or "" if neither does."""
    by_image = {"djl-lmi": "vllm", "djl-tensorrtllm": "trtllm"}.get(spec.image.aws or "", "")
    names = [name for name in ("llm_engine", "rolling_batch") if name in spec.options]
    return selected_engine([Setting(f"option.{name}", str(spec.options[name]), "options") for name in names], by_image)


def _needs_gpus(spec: Spec, image: str) -> bool:
    """Return whether the image contains only the GPU build of the engine. TensorRT-LLM has no CPU build."""
    engine = _engine(spec)
    return engine == "trtllm" or (engine == "vllm" and _FOR_GPUS.search(image) is not None)


def _precision(spec: Spec, shape: Shape) -> Precision:
    stored = shape.dtype or "bf16"
    if stored not in ("bf16", "fp16", "fp32"):  # quantized already
        return stored
    values = (str(spec.options.get(name, "")).lower() for name in ("quantize", "dtype"))
    return next((_PRECISIONS[value] for value in values if value in _PRECISIONS), stored)


class Choice(NamedTuple):
    """The choice of an instance type.

    Attributes:
        instance: the instance type, or None if it is not in the tables.
        fit: the model's memory on that type, or None if the type or the model size is unknown.
        fits: all candidates, best first, or () if the model size is unknown.
        warnings: warnings about the choice, each as a sentence.
    """

    instance: InstanceType | None
    fit: Fit | None
    fits: tuple[Fit, ...]
    warnings: tuple[str, ...]


def _choose(spec: Spec, image: images.ResolvedImage, need: Need | None, prices: Prices) -> Choice:
    """Choose the instance type, or check the specification's type.

    Raises:
        SpecError: `auto` cannot choose a type, or the type is not supported, is probably a typo, or has other
            processors than the image.
        DoesNotFit: the image or the model does not fit.
    """
    if spec.instance.type == "auto":
        return _cheapest(spec, need, () if need is None else rank(need, _on_cpu(spec, image), prices))
    instance = find(spec.instance.type)
    _check_architecture(spec.instance.type, image)
    if instance is None:
        if not spec.instance.unchecked:
            refuse_mistyped(spec.instance.type)
        fits = () if need is None else rank(need, _on_cpu(spec, image), prices)
        text = f"{spec.instance.type} is not in the tables (of 2026), so the model's fit was not checked."
        return Choice(None, None, fits, (text,))
    if not spec.instance.unchecked:
        _check_host(spec, instance, image, need, prices)
    if need is None:
        text = "The model's size is unknown, so its fit was not checked. Set model.shape."
        return Choice(instance, None, (), (text,))
    fits = rank(need, instance.gpus == 0, prices)
    chosen = fit(need, instance, prices.of(instance.name, spec.instance.price))
    if not chosen.fits and not spec.instance.unchecked:
        raise too_small(chosen, fits)
    problem = () if chosen.fits else (f"{instance.name}: {chosen.problem} (instance.unchecked).",)
    return Choice(instance, chosen, fits, (*problem, *_remarks(spec, chosen)))


def _cheapest(spec: Spec, need: Need | None, fits: tuple[Fit, ...]) -> Choice:
    if need is None:
        raise SpecError(
            "instance.type: auto needs the model's size, which is unknown",
            "Set instance.type to a type, e.g. ml.g6e.xlarge, or set model.shape: {parameters: 8.03e9, layers: 32, "
            "kv_heads: 8, head_dim: 128}, with the values in the model's config.json.",
        )
    chosen = cheapest(fits)
    return Choice(chosen.instance, chosen, fits, _remarks(spec, chosen))


def _check_architecture(name: str, image: images.ResolvedImage) -> None:
    """Check that the image is built for the processors of an instance type.

    Raises:
        SpecError: it is built for others.
    """
    host = architecture(name)
    if host == image.architecture:
        return
    types = "ml.c8g.* or ml.m8g.*" if image.architecture == "arm64" else "ml.c7i.* or ml.g6e.*"
    raise SpecError(
        f"instance.type: {name} is an {host} host, but the image is built for {image.architecture}",
        f"Use a type such as {types}, or build the image with --platform linux/{host} and set "
        f"image.architecture: {host} (the default unless the image's name contains arm64 is amd64).",
    )


def _check_host(
    spec: Spec, instance: InstanceType, image: images.ResolvedImage, need: Need | None, prices: Prices
) -> None:
    """Check that the image can run on the instance type.

    Raises:
        DoesNotFit: the image needs a GPU, or a newer GPU.
    """
    if not instance.gpus and _needs_gpus(spec, image.uri):
        on_gpus = () if need is None else rank(need, prices=prices)
        raise needs_gpus(instance, _engine(spec), on_gpus, image.built_for)
    if old := too_old(instance, image.built_for):
        raise DoesNotFit(f"instance.type: {instance.name}: {old}", f"Use {able(image.built_for)}, or another image.")


def _remarks(spec: Spec, chosen: Fit) -> tuple[str, ...]:
    remarks = chosen.remarks
    if chosen.experts and not _engine(spec) and "enable_expert_parallel" not in spec.options:
        remarks += (_FOR_VLLM.format(chosen.degree),)
    return tuple(f"{chosen.instance.name}: {remark}." for remark in remarks)


def _on_cpu(spec: Spec, image: images.ResolvedImage) -> bool:
    """Return whether the image runs on CPU types, according to option.llm_engine or else to the image's processors and
    name. SageMaker has no arm64 types with GPUs that the images can use."""
    engine = spec.options.get("llm_engine")
    if engine is not None:
        return image.architecture == "arm64" or without_gpus(engine, image.cuda)
    return image.architecture == "arm64" or images.has_word(spec.image, "cpu")


def _degree_option(spec: Spec) -> int | None:
    """Return the tensor parallel degree that the specification determines, or None if it determines none.
    It is the number in the options, or else 1 if options.replicas is set without the degree, or else the number of
    GPUs of the components if all have the same number."""
    degree = _number(spec, "tensor_parallel_degree")
    if degree is not None:
        return degree
    if "replicas" in spec.options and "tensor_parallel_degree" not in spec.options:
        return 1  # the server's default; the other GPUs are for other engines
    accelerators = {component.accelerators for component in spec.components}
    return accelerators.pop() if len(accelerators) == 1 else None


def _gpus_per_copy(spec: Spec) -> int | None:
    """Return the number of GPUs per copy (tensor x pipeline x context parallel degree), or None if it is unknown."""
    stages = _stages(spec)
    return stages * (_degree_option(spec) or 1) if stages > 1 else _degree_option(spec)


def _stages(spec: Spec) -> int:
    """Return the pipeline parallel degree times the context parallel degree."""
    return (_number(spec, *STAGES) or 1) * (_number(spec, *CONTEXTS) or 1)


def _min_gpus(spec: Spec) -> int:
    """Return the minimum number of GPUs that an unknown instance type must have."""
    return max(_gpus_per_copy(spec) or 1, *(component.accelerators for component in spec.components), 1)


def _number(spec: Spec, *names: str) -> int | None:
    for name in names:
        value = spec.options.get(name)
        if value is not None and is_digits(str(value)):
            return int(value)
    return None


def _degree(spec: Spec, choice: Choice) -> int | None:
    if (choice.instance is not None and choice.instance.gpus == 0) or _engine(spec) == LLAMACPP:
        return None
    if choice.fit is None or _stages(spec) > 1:
        return _degree_option(spec)
    return choice.fit.degree


def _volume_warnings(spec: Spec, instance: InstanceType | None) -> Iterator[str]:
    if instance is None or not instance.nvme_gb:
        return
    if spec.instance.volume_gb is not None:
        raise SpecError(
            f"instance.volume_gb: {instance.name} has {instance.nvme_gb} GB of NVMe, and cannot have an EBS volume",
            "Omit instance.volume_gb.",
        )
    if spec.encryption.volume_key is not None:
        yield f"encryption.volume_key does not apply to the NVMe disk of {instance.name}, which encrypts itself."


def _times(spec: Spec, gib: float | None) -> StartTimeouts:
    engine = str(spec.options.get("llm_engine", "trtllm" if spec.image.aws == "djl-tensorrtllm" else ""))
    return times(
        gib,
        engine=engine,
        from_hub=spec.model.id is not None,
        is_archive=(spec.model.s3 or "").endswith(ARCHIVE),
        builds_engine=spec.image.aws == "djl-tensorrtllm",
    )


# -- advice on growth: a larger instance, more instances, or HyperPod with Dynamo --------------------------------------


_FEW = 4
"""Number of concurrent requests of the full context below which a larger cache helps more than another instance."""

_MANY = 4
"""Minimum number of instances at which request routing determines how well the caches are used."""


def advice(spec: Spec, decision: Decision, candidates: Candidates | None) -> tuple[str, ...]:
    """Return advice for the user on the size and number of instances and on routing, each in one or two sentences.

    Args:
        candidates: the candidate instance types, or None for no advice on size.
    """
    chosen = None if candidates is None else candidates.chosen
    lines = [] if chosen is None or candidates is None else [*_size(spec, chosen, candidates.fits)]
    return (*lines, *_advised_number(spec, decision), *_routing(spec))


def _size(spec: Spec, chosen: Fit, fits: Sequence[Fit]) -> Iterator[str]:
    """Yield advice on the size of instances, which depends on the number of concurrent requests that fit."""
    if not chosen.fits:
        return
    requests = _FEW if spec.scaling is None else max(_FEW, round(spec.scaling.concurrency))
    server = f"A copy on {chosen.instance.name}" if spec.components else chosen.instance.name
    gpus = spec.components[0].accelerators if spec.components else chosen.instance.gpus
    sequences = chosen.sequences * num_engines(spec, gpus, chosen.degree)
    held = f"{server} has room for {sequences} concurrent requests of the full context"
    if sequences >= requests:
        yield f"{held}. For more, use more instances (instance.count, scaling.max), not larger instances."
        return
    bigger = next((item for item in fits if item.fits and item.sequences >= requests), None)
    name = "a larger instance"
    if bigger is not None:
        name = f"{bigger.instance.name} ({bigger.price.text}), which has room for {bigger.sequences}"
    yield (
        f"{held}. For {requests} requests, use {name}, or set a shorter model.context. More instances serve more "
        "requests, but not longer requests."
    )


def _advised_number(spec: Spec, decision: Decision) -> Iterator[str]:
    if spec.instance.count == 1 and spec.scaling is None and spec.instance.managed is None and not spec.components:
        yield (
            "A single instance has no spare. With two instances (instance.count: 2), one keeps serving while the other "
            "fails or is replaced."
        )


def _routing(spec: Spec) -> Iterator[str]:
    count = max(spec.instance.count, spec.scaling.max if spec.scaling is not None else 0)
    if count >= _MANY and isinstance(spec.routing, PrefixAware):
        yield (
            f"With up to {count} instances, prefix-aware routing compares prompts, but does not know what is cached. "
            "Dynamo on HyperPod routes by each worker's cache. Try both if many prompts begin with the same text."
        )
