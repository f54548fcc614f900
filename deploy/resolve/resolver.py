"""Decide what a specification leaves open. One pass, from tables and arithmetic, with AWS's answers if AWS is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from deploy.aws import error_code
from deploy.errors import DoesNotFit, SpecError
from deploy.resolve import images
from deploy.resolve.candidates import Candidates, Resolution, cheapest, rank, too_small
from deploy.resolve.components import resolve_components
from deploy.resolve.decision import Decision
from deploy.resolve.devices import device_warnings
from deploy.resolve.fit import Fit, Need, able, fit, too_old
from deploy.resolve.instances import InstanceType, find, refuse_mistyped
from deploy.resolve.model.hub import Hub, HubError
from deploy.resolve.model.shape import known_model, read_shape, shape_in_directory, shape_in_s3
from deploy.resolve.pools import resolve_pools
from deploy.resolve.prices import TABLE, Prices
from deploy.resolve.shadow import with_shadow
from deploy.resolve.timeouts import Times, times
from handler.config.engines import ENGINES
from handler.config.gpus import CONTEXTS, STAGES

if TYPE_CHECKING:
    from deploy.aws import Aws
    from deploy.spec import Spec
    from deploy.spec.sections import Shape
    from deploy.spec.values import Precision

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
    """A model's shape, its source in a few words for the table of candidates, and what was wrong with others."""

    shape: Shape | None
    source: str
    notes: tuple[str, ...] = ()


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
        hub: asked for the model's files; None: the table of known models must do.
        prices: what instances cost.

    Raises:
        SpecError: the specification contradicts itself, or says too little.
        DoesNotFit: the model is too large for the named instance type, or for all types.
        NotThere: ECR has no such image.
    """
    account = account or (aws.account() if aws is not None else spec.role.split(":")[4])
    if spec.shadow is not None:
        return with_shadow(spec, lambda one: resolve(one, region, account=account, aws=aws, hub=hub, prices=prices))
    if spec.instance.pools:
        return resolve_pools(
            spec, lambda on_type: resolve(on_type, region, account=account, aws=aws, hub=hub, prices=prices)
        )
    asked = _Asked(region, account, aws, hub, prices)
    if spec.components:
        return resolve_components(spec, lambda server: _resolve(server, asked))
    return _resolve(spec, asked)


@dataclass(frozen=True)
class _Asked:
    """Where the endpoint is, and who is asked, as for `resolve`."""

    region: str
    account: str
    aws: Aws | None
    hub: Hub | None
    prices: Prices


def _resolve(spec: Spec, asked: _Asked) -> Resolution:
    """Decide for one server on one instance type."""
    aws, prices = asked.aws, asked.prices
    image = images.resolve_image(spec.image, asked.region, asked.account, aws)
    size = find_size(spec, aws, asked.hub)
    need, need_warnings = _need(spec, size.shape, image)
    instance = None if spec.instance.type == "auto" else find(spec.instance.type)
    fits = () if need is None else rank(need, _on_cpu(spec) if instance is None else instance.gpus == 0, prices)
    if instance is not None and not spec.instance.unchecked and (old := too_old(instance, image.built_for)):
        raise DoesNotFit(f"instance.type: {instance.name}: {old}", f"Take {able(image.built_for)}, or another image.")
    chosen, type_warnings = _choose(spec, instance, need, fits, prices)
    instance = instance if chosen is None else chosen.instance
    ami, ami_warnings = images.choose_ami(spec.instance.ami, instance, image.cuda)
    times = _times(spec, need)
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
        vcpus=None if instance is None else instance.vcpus,
        ram_gib=None if instance is None else instance.ram_gib,
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
    """Find the model's shape: in the specification, else in its files, else in the table.

    Args:
        hub: None: it is not asked.

    Raises:
        SpecError: model.path is not a directory, or its config.json is wrong.
    """
    model, notes = spec.model, list[str]()
    if model.shape is not None:
        return ModelSize(model.shape, "model.shape")
    if model.directory is not None:
        if not model.directory.is_dir():
            raise SpecError(f"model.path: {model.path} is not a directory here")
        return ModelSize(shape_in_directory(model.directory, notes), "its files", tuple(notes))
    if model.s3 is not None:
        return ModelSize(_readable_shape(aws, model.s3, notes), "its files in S3", tuple(notes))
    name = str(model.id)
    found = _on_hub(hub, name, str(spec.options.get("revision", "main")), notes) if hub is not None else None
    if found is not None and hub is not None:
        return ModelSize(found, f"its files on {hub.name}", tuple(notes))
    shape = known_model(name)
    return ModelSize(shape, "known model" if hub is None else "table of known models", tuple(notes))


def _on_hub(hub: Hub, name: str, revision: str, notes: list[str]) -> Shape | None:
    """Read the shape on the hub. What is wrong there is a note: the table may know the model, or the user."""
    owner, _, rest = name.partition("/")
    model, _, file = rest.partition("/")  # OWNER/MODEL/FILE.gguf names a file of the model
    if not model:  # "demo", or a model of the container's
        return None
    try:
        return read_shape(hub.files(f"{owner}/{model}", revision), notes, file if file.endswith(".gguf") else None)
    except HubError as error:
        notes.append(f"The model's size is not the hub's: {error}.")
    except SpecError as error:
        notes.append(f"The model's files on the hub do not tell its size: {error}.")
    return None


def _readable_shape(aws: Aws | None, prefix: str, notes: list[str]) -> Shape | None:
    """Read the shape in S3; None: there is none, or the user may not read it. Preflight reports a missing prefix."""
    if aws is None:
        return None
    try:
        return shape_in_s3(aws, prefix, notes)
    except ClientError as error:
        if error_code(error) not in _UNREADABLE:
            raise
        return None


def _need(spec: Spec, shape: Shape | None, image: images.ResolvedImage) -> tuple[Need | None, tuple[str, ...]]:
    """Return what has to fit, and the warnings about assumptions."""
    if shape is None:
        return None, ()
    warnings = []
    context = spec.model.context or _number(spec, "max_model_len", "max_seq_len", "max_num_tokens") or shape.context
    if context is None:
        context = _CONTEXT
        warnings.append(f"The model's longest context is not known: {_CONTEXT} tokens are taken; set model.context.")
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
    )
    return need, tuple(warnings)


def _frees_windows(spec: Spec) -> bool:
    """Whether the engine frees what is outside of a sliding window: vLLM does, if its option is not turned off."""
    engine = spec.options.get("llm_engine") or spec.options.get("rolling_batch", "auto")
    vllm = engine == "vllm" or (engine == "auto" and spec.image.aws == "djl-lmi")
    off = str(spec.options.get("disable_hybrid_kv_cache_manager", "false")).lower()
    return vllm and off == "false" and "kv_transfer_config" not in spec.options


def _precision(spec: Spec, shape: Shape) -> Precision:
    stored = shape.dtype or "bf16"
    if stored not in ("bf16", "fp16", "fp32"):  # quantized already
        return stored
    values = (str(spec.options.get(name, "")).lower() for name in ("quantize", "dtype"))
    return next((_PRECISIONS[value] for value in values if value in _PRECISIONS), stored)


def _choose(
    spec: Spec, instance: InstanceType | None, need: Need | None, fits: tuple[Fit, ...], prices: Prices
) -> tuple[Fit | None, tuple[str, ...]]:
    """Choose among the candidates; None: the type, or the model's size, is unknown. And warnings."""
    name = spec.instance.type
    if name == "auto":
        if need is None:
            raise SpecError(
                "instance.type: auto needs the model's size, which is not known here",
                "Name a type (instance.type: ml.g6e.xlarge), or set model.shape: {parameters: 8.03e9, layers: 32, "
                "kv_heads: 8, head_dim: 128}, which stands in the model's config.json.",
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
    """Whether the image has no CUDA: by the engine if one is named, else by the image's name."""
    engine = spec.options.get("llm_engine")
    if engine is not None:
        return engine in _CPU_ENGINES
    name = spec.image.uri or f"{spec.image.repository}:{spec.image.tag}"
    return "cpu" in re.split("[^a-z0-9]+", name.lower())


def _degree_option(spec: Spec) -> int | None:
    """Return the tensor parallel degree of the options, else the components' GPUs if all have the same."""
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
    """Return the GPUs of one copy for each of the tensor parallel degree."""
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
            f"instance.volume_gb: {instance.name} has {instance.nvme_gb} GB of NVMe and takes no other volume",
            "Leave it out.",
        )
    if spec.encryption.volume_key is not None:
        warnings.append(
            f"encryption.volume_key: {instance.name} has NVMe, which the key does not cover; the disk encrypts itself."
        )
    return tuple(warnings)


def _times(spec: Spec, need: Need | None) -> Times:
    engine = str(spec.options.get("llm_engine", "trtllm" if spec.image.aws == "djl-tensorrtllm" else ""))
    return times(
        need.stored_gib if need is not None else None,
        engine=engine,
        from_hub=spec.model.id is not None,
        builds_engine=spec.image.aws == "djl-tensorrtllm",
    )
