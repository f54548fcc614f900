"""What a specification leaves open, settled: the image, the instance, the host, the times. Made by `settling/`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settled:
    """All that the builders need beside the specification.

    Attributes:
        region: AWS region.
        account: twelve digits: AWS's answer where it was asked, else the role's.
        image: the whole URI, by digest where AWS was asked.
        instance_type: SageMaker's name, never `auto`.
        gpus: GPUs of one such instance; 0 on a CPU type; of a type that the tables do not know, as many as are wanted.
        ami: InferenceAmiVersion; None where the account's default host does (CPU types, or no CUDA known).
        model_data: the S3 prefix that SageMaker lays at /opt/ml/model; None where the container fetches from a hub.
        download: seconds for model data, 60 to 3600.
        startup: seconds until /ping answers 200, 60 to 3600.
        provision: seconds for an instance to be found; None is AWS's default.
        tensor_parallel: GPUs that one copy of the model is spread over; None on a CPU type, or where nothing says it.
        warnings: what the user should know before saying yes, a sentence each.
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
