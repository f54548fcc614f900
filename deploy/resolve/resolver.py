"""What a specification leaves open, decided: by arithmetic and tables without an `Aws`, with one by its answers too.

`settle` decides; `advise_on` shows the candidates that it decided among; `find_shape` reads the model's size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from deploy.aws import error_code
from deploy.errors import SpecError
from deploy.resolve import images
from deploy.resolve.decision import Settled
from deploy.resolve.fit import Advice, Fit, Need, advise, best, fit, refuse
from deploy.resolve.instances import InstanceType, find, refuse_mistyped
from deploy.resolve.model_shape import known_model, shape_in_directory, shape_in_s3
from deploy.resolve.timeouts import Times, times

if TYPE_CHECKING:
    from deploy.aws import Aws
    from deploy.spec import Spec
    from deploy.spec.sections import Shape
    from deploy.spec.values import Precision

_CONTEXT = 4096
"""Where neither the specification nor the model says one."""

_UNREADABLE = ("AccessDenied", "AllAccessDisabled", "NoSuchBucket", "403")

_CPU_ENGINES = ("openvino", "echo")

_PRECISIONS: dict[str, Precision] = {
    "fp8": "fp8", "bitsandbytes": "int4", "awq": "int4",  # option.quantize: what it makes of the weights
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32", "float32": "fp32",  # option.dtype
}  # fmt: skip
"""Options that decide the weights' precision, where model.dtype leaves it open."""


@dataclass(frozen=True)
class Found:
    """A model's shape, and where it was found: for the advice's title."""

    shape: Shape
    source: str


def settle(
    spec: Spec, region: str, *, account: str | None = None, shape: Shape | None = None, aws: Aws | None = None
) -> Settled:
    """All that the builders need.

    Args:
        region: of the endpoint.
        account: twelve digits; None: AWS is asked where there is one, else it is the role's, whose account SageMaker
            makes the endpoint in.
        shape: the model's; None: it is looked for (`find_shape`).
        aws: asked for the account, the image's digest and a config.json in S3; None: nothing is asked.

    Raises:
        SpecError: something that cannot be decided, or cannot be.
        DoesNotFit: the model is too large for the instance that is named, or for all.
        NotThere: ECR has no such image.
    """
    account = account or (aws.account() if aws is not None else spec.role.split(":")[4])
    image = images.resolve(spec.image, region, account, aws)
    found = Found(shape, "given") if shape is not None else find_shape(spec, aws)
    need, warnings = _need(spec, found, image.cuda)
    chosen, name, more = _choose(spec, need)
    instance = chosen.instance if chosen is not None else find(name)
    ami, ami_warnings = images.choose_ami(spec.instance.ami, instance, image.cuda)
    times = _times(spec, need)
    return Settled(
        region=region,
        account=account,
        image=image.uri,
        instance_type=name,
        gpus=instance.gpus if instance is not None else _gpus_wanted(spec),
        ami=ami,
        model_data=spec.model.s3 or spec.model.upload,
        download=spec.timeouts.download or times.download,
        startup=spec.timeouts.startup or times.startup,
        provision=spec.timeouts.provision,
        tensor_parallel=_degree(spec, chosen, instance),
        warnings=(*image.warnings, *warnings, *more, *ami_warnings, *_volume(spec, instance), *times.warnings),
    )


def advise_on(spec: Spec, *, shape: Shape | None = None, aws: Aws | None = None) -> Advice | None:
    """The candidates for the specification's model; None: its size is not known.

    Raises:
        DoesNotFit: `auto` finds none.
    """
    found = Found(shape, "given") if shape is not None else find_shape(spec, aws)
    need, _ = _need(spec, found, images.image_cuda(spec.image))
    if need is None or found is None:
        return None
    taken: Fit | None
    if spec.instance.type == "auto":
        taken = best(need, _on_cpu(spec))
    else:
        instance = find(spec.instance.type)
        taken = fit(need, instance, spec.instance.price) if instance is not None else None
    on_cpu = taken.instance.gpus == 0 if taken is not None else _on_cpu(spec)
    return Advice(need, found.source, advise(need, on_cpu), taken)


def find_shape(spec: Spec, aws: Aws | None = None) -> Found | None:
    """The model's shape: the specification's, else out of its files, else the table's; None: none knows it.

    Raises:
        SpecError: model.path is no directory, or its config.json is wrong.
    """
    model = spec.model
    if model.shape is not None:
        return Found(model.shape, "model.shape")
    if model.directory is not None:
        if not model.directory.is_dir():
            raise SpecError(f"model.path: {model.path} is no directory here")
        shape = shape_in_directory(model.directory)
        return None if shape is None else Found(shape, "its files")
    if model.s3 is not None and aws is not None:
        try:
            shape = shape_in_s3(aws, model.s3)
        except ClientError as error:
            if error_code(error) not in _UNREADABLE:
                raise
            return None  # who deploys need not be allowed to read it; whether it is there, preflight says
        return None if shape is None else Found(shape, "its config.json in S3")
    if model.id is not None and (shape := known_model(model.id)) is not None:
        return Found(shape, "known model")
    return None


def _need(spec: Spec, found: Found | None, cuda: tuple[int, int] | None) -> tuple[Need | None, tuple[str, ...]]:
    """What has to fit, and what had to be supposed for it."""
    if found is None:
        return None, ()
    shape = found.shape
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
        degree=_asked_gpus(spec),
        usable=float(usable) if isinstance(usable, int | float) and 0 < usable < 1 else Need.usable,
        cuda=cuda,
    )
    return need, tuple(warnings)


def _precision(spec: Spec, shape: Shape) -> Precision:
    stored = shape.dtype or "bf16"
    if stored not in ("bf16", "fp16", "fp32"):  # quantized already
        return stored
    said = (str(spec.options.get(name, "")).lower() for name in ("quantize", "dtype"))
    return next((_PRECISIONS[one] for one in said if one in _PRECISIONS), stored)


def _choose(spec: Spec, need: Need | None) -> tuple[Fit | None, str, tuple[str, ...]]:
    """How the model lies on the instance type, the type, and warnings."""
    name = spec.instance.type
    if name == "auto":
        if need is None:
            raise SpecError(
                "instance.type: auto needs the model's size, which is not known here",
                "Name a type (instance.type: ml.g6e.xlarge), or say model.shape: {parameters: 8.03e9, layers: 32, "
                "kv_heads: 8, head_dim: 128}, which stands in the model's config.json.",
            )
        chosen = best(need, _on_cpu(spec))
        return chosen, chosen.instance.name, _remarks(chosen)
    instance = find(name)
    if instance is None:
        if not spec.instance.unchecked:
            refuse_mistyped(name)
        return None, name, (f"{name} is not in the tables (of 2026), so it is not checked whether the model fits.",)
    if need is None:
        return None, name, ("The model's size is not known, so it is not checked whether it fits (model.shape).",)
    chosen = fit(need, instance, spec.instance.price)
    if not chosen.fits and not spec.instance.unchecked:
        raise refuse(need, chosen)
    said = (f"{name}: {chosen.problem} (instance.unchecked).",) if not chosen.fits else ()
    return chosen, name, (*said, *_remarks(chosen))


def _remarks(chosen: Fit) -> tuple[str, ...]:
    return tuple(f"{chosen.instance.name}: {remark}." for remark in chosen.remarks)


def _on_cpu(spec: Spec) -> bool:
    """Whether the image is the one without CUDA: by the engine that is named, else by the image's name."""
    engine = spec.options.get("llm_engine")
    if engine is not None:
        return engine in _CPU_ENGINES
    name = spec.image.uri or f"{spec.image.repository}:{spec.image.tag}"
    return "cpu" in re.split("[^a-z0-9]+", name.lower())


def _asked_degree(spec: Spec) -> int | None:
    """Of the options; else a component's GPUs, where all components have the same."""
    asked = _number(spec, "tensor_parallel_degree")
    if asked is not None:
        return asked
    accelerators = {component.accelerators for component in spec.components}
    return accelerators.pop() if len(accelerators) == 1 else None


def _asked_gpus(spec: Spec) -> int | None:
    """Of a copy: with pipeline parallelism each stage has as many as the degree says."""
    stages = _number(spec, "pipeline_parallel_degree") or 1
    return stages * (_asked_degree(spec) or 1) if stages > 1 else _asked_degree(spec)


def _gpus_wanted(spec: Spec) -> int:
    """What a type that the tables do not know must have at least."""
    return max(_asked_gpus(spec) or 1, *(component.accelerators for component in spec.components), 1)


def _number(spec: Spec, *names: str) -> int | None:
    for name in names:
        value = spec.options.get(name)
        if value is not None and str(value).isdigit():
            return int(value)
    return None


def _degree(spec: Spec, chosen: Fit | None, instance: InstanceType | None) -> int | None:
    if instance is not None and instance.gpus == 0:
        return None
    if chosen is None or (_number(spec, "pipeline_parallel_degree") or 1) > 1:
        return _asked_degree(spec)
    return chosen.degree


def _volume(spec: Spec, instance: InstanceType | None) -> tuple[str, ...]:
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
