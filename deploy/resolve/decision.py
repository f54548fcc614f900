"""The decision on everything that a specification leaves open: image, instance, host and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.spec import Spec


@dataclass(frozen=True)
class Pool:
    """One instance type of several.

    Attributes:
        priority: 1 is tried first.
        instance_type: SageMaker's name.
        options: of the handler, on this type only.
        gpus, tensor_parallel: as in `Decision`.
    """

    priority: int
    instance_type: str
    gpus: int
    tensor_parallel: int | None = None
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Everything that the builders need in addition to the specification.

    Attributes:
        region: AWS region.
        account: twelve digits; from AWS if it was queried, otherwise the role's.
        image: the whole URI, by digest if AWS was queried.
        instance_type: SageMaker's name, never `auto`; with pools the first one's.
        gpus: GPUs of one such instance; 0 on a CPU type; the number needed if the tables do not know the type.
        ami: InferenceAmiVersion; None: the account's default host (CPU types, or unknown CUDA).
        model_data: the S3 prefix or archive that SageMaker puts into /opt/ml/model; None: the container loads a hub's
            model.
        download: timeout of the model data's download, 60 to 3600 seconds.
        startup: timeout until /ping answers 200, 60 to 3600 seconds.
        provision: timeout to find an instance, in seconds; None: AWS's default.
        tensor_parallel: GPUs that one copy of the model is spread over; None: a CPU type, or unknown.
        warnings: one sentence each, for the user to read before confirming.
        pools: the types by priority, if the specification has pools.
        shadow: the decision for the shadow, if the specification has one.
        components: the components' own values, by name: image, model data, timeouts, tensor parallel degree.
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
    warnings: tuple[str, ...] = ()
    pools: tuple[Pool, ...] = ()
    shadow: Decision | None = None
    components: Mapping[str, Decision] = field(default_factory=dict)

    @property
    def both(self) -> tuple[Decision, ...]:
        """Return the serving decision, and the shadow's."""
        return (self,) if self.shadow is None else (self, self.shadow)

    @property
    def start(self) -> int:
        """Seconds of the longest start: the model data's download, and until /ping answers 200."""
        return max(one.download + one.startup for one in self.both)

    def of(self, server: Spec) -> Decision:
        """Return the decision for a server (`spec/components.py`)."""
        return self.components.get(server.components[0].name, self) if server.components else self

    def on(self, pool: Pool) -> Decision:
        """Return the decision for the instances of one pool."""
        return replace(
            self,
            instance_type=pool.instance_type,
            gpus=pool.gpus,
            tensor_parallel=pool.tensor_parallel,
            pools=(),
            shadow=None,
        )


def spec_on(spec: Spec, pool: Pool) -> Spec:
    """Return the specification of one pool's type."""
    instance = spec.instance.model_copy(update={"type": pool.instance_type, "pools": ()})
    return spec.model_copy(update={"instance": instance, "options": {**spec.options, **pool.options}})
