"""The decision about the settings that a specification does not set: image, instance type, host AMI and timeouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.spec import Spec


@dataclass(frozen=True)
class InstancePool:
    """An instance pool, one of several instance types that an endpoint may use.

    Attributes:
        priority: number from 1 to 5. SageMaker tries the pools in ascending order.
        instance_type: name of the instance type.
        gpus: number of GPUs, as in `Decision`.
        tensor_parallel: tensor parallel degree, as in `Decision`.
        expert_parallel: expert parallelism, as in `Decision`.
        options: the handler's options that apply only to this instance type.
    """

    priority: int
    instance_type: str
    gpus: int
    tensor_parallel: int | None = None
    expert_parallel: bool = False
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The values that resources are built from, in addition to the specification.

    Attributes:
        region: the AWS region of the endpoint.
        account: twelve-digit account ID, from AWS if it was queried, otherwise from the role ARN.
        image: full URI of the image, with its digest if AWS was queried.
        instance_type: name of the instance type, never `auto`. With pools, the type of the first pool.
        gpus: number of GPUs of one instance. If the instance type is unknown, the number of GPUs needed.
        ami: the InferenceAmiVersion, or None to use SageMaker's default host (for CPU types and unknown CUDA versions).
        model_data: prefix or archive in S3 that SageMaker downloads to /opt/ml/model, or None if the container loads
            the model from the hub.
        download: timeout for downloading the model data, 60 to 3600 seconds.
        startup: timeout until /ping responds with 200, 60 to 3600 seconds.
        provision: timeout for finding an instance, in seconds, or None for AWS's default.
        tensor_parallel: number of GPUs for one copy of the model, or None for CPU types or if it is unknown.
        expert_parallel: whether each GPU has whole experts, due to an option or because they cannot be divided.
        warnings: sentences for the user to read before confirming.
        pools: the instance pools by priority, or () if the specification has no pools.
        shadow: decision for the shadow variant, or None if the specification has no shadow.
        components: decisions for inference components by name. They may differ in image, model data, timeouts and
            tensor parallel degree.
    """

    region: str
    account: str | None
    image: str
    instance_type: str
    gpus: int
    ami: str | None
    model_data: str | None
    download: int
    startup: int
    provision: int | None = None
    tensor_parallel: int | None = None
    expert_parallel: bool = False
    warnings: tuple[str, ...] = ()
    pools: tuple[InstancePool, ...] = ()
    shadow: Decision | None = None
    components: Mapping[str, Decision] = field(default_factory=dict)

    @property
    def both(self) -> tuple[Decision, ...]:
        """Return this decision, followed by the decision for the shadow variant if there is one."""
        return (self,) if self.shadow is None else (self, self.shadow)

    @property
    def start(self) -> int:
        """Return the sum of the timeouts `download` and `startup` in seconds, for the variant where it is largest."""
        return max(decision.download + decision.startup for decision in self.both)

    def of(self, server: Spec) -> Decision:
        """Return the decision for one of the specification's servers (`spec/components.py`)."""
        return self.components.get(server.components[0].name, self) if server.components else self

    def on(self, pool: InstancePool) -> Decision:
        """Return the decision for the instances of one pool."""
        return replace(
            self,
            instance_type=pool.instance_type,
            gpus=pool.gpus,
            tensor_parallel=pool.tensor_parallel,
            expert_parallel=pool.expert_parallel,
            pools=(),
            shadow=None,
        )


def joined(decisions: Sequence[Decision], warnings: Iterable[str], **changes: Any) -> Decision:
    """Return the first of several decisions for one endpoint, with the longest timeouts of all, and with `warnings`.

    Args:
        warnings: the warnings of all decisions. Duplicates are removed.
        changes: other attributes to replace.
    """
    return replace(
        decisions[0],
        download=max(decision.download for decision in decisions),
        startup=max(decision.startup for decision in decisions),
        warnings=tuple(dict.fromkeys(warnings)),
        **changes,
    )


def spec_on(spec: Spec, pool: InstancePool) -> Spec:
    """Return the specification with the instance type and options of one pool, and without pools."""
    instance = spec.instance.model_copy(update={"type": pool.instance_type, "pools": ()})
    return spec.model_copy(update={"instance": instance, "options": {**spec.options, **pool.options}})
