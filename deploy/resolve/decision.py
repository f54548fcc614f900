"""The decision on everything that a specification leaves open: image, instance, host and timeouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Everything that the builders need beside the specification.

    Attributes:
        region: AWS region.
        account: twelve digits; AWS's answer if AWS was asked, else the account of the role.
        image: the whole URI, by digest if AWS was asked.
        instance_type: SageMaker's name, never `auto`.
        gpus: GPUs of one such instance; 0 on a CPU type; the number needed if the tables do not know the type.
        ami: InferenceAmiVersion; None: the account's default host (CPU types, or unknown CUDA).
        model_data: the S3 prefix that SageMaker mounts at /opt/ml/model; None: the container fetches from a hub.
        download: timeout of the model data's download, 60 to 3600 seconds.
        startup: timeout until /ping answers 200, 60 to 3600 seconds.
        provision: timeout to find an instance, in seconds; None: AWS's default.
        tensor_parallel: GPUs that one copy of the model is spread over; None: a CPU type, or unknown.
        vcpus: hardware threads of one such instance; None: the tables do not know the type.
        ram_gib: GiB of its memory; None: the tables do not know the type.
        warnings: one sentence each, for the user to read before confirming.
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
    vcpus: int | None = None
    ram_gib: int | None = None
    warnings: tuple[str, ...] = ()
