"""Reads environment variables of SageMaker, DJL Serving and other software, and counts the GPUs for an engine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.options.names import KEY_VARIABLES, KEYS, hub_token
from handler.core.errors import ConfigError
from handler.core.numbers import is_digits
from handler.core.user_functions import INSTEAD

_SECRETS = (
    "OPENAI_API_KEY",
    *KEY_VARIABLES,
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_API_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
)

SECURE_MODE = "SAGEMAKER_SECURE_MODE"
_MAX_ADAPTERS = "SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY"


def max_adapters() -> int | None:
    """Return the maximum number of LoRA adapters that SageMaker loads at once, or None if there is no limit.

    Raises:
        ConfigError: if the variable is not a whole number of at least 1.
    """
    text = os.environ.get(_MAX_ADAPTERS)
    if text is None:
        return None
    if not is_digits(text) or not int(text):
        raise ConfigError(f"environment variable {_MAX_ADAPTERS}={text}: must be a whole number of at least 1")
    return int(text)


def secure_mode(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether SageMaker's secure mode is on, whose controls forbid what can run code of a model's publisher."""
    return environ.get(SECURE_MODE, "").strip().lower() == "true"


def name_hub_token() -> None:
    """Set HF_TOKEN for huggingface_hub from a variable that it does not read, such as TGI's HF_API_TOKEN."""
    if token := hub_token(os.environ):
        os.environ["HF_TOKEN"] = token


def mpi_world() -> tuple[str, str]:
    """Return the Open MPI world size and the rank of this process. Both are "" outside of MPI."""
    return os.environ.get("OMPI_COMM_WORLD_SIZE", ""), os.environ.get("OMPI_COMM_WORLD_RANK", "")


def download_directory() -> Path | None:
    """Return the directory for models downloaded from S3, or None if the DJL Serving variable for it is not set."""
    directory = os.environ.get("SERVING_DOWNLOAD_DIR")
    return Path(directory) if directory else None


def runtime_lora_updating() -> bool:
    """Return whether vLLM's environment variable enables the routes to load and unload LoRA adapters."""
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").strip().lower() in ("1", "true")


def aws_region() -> str | None:
    """Return the region from the SageMaker variable, which boto3 does not read, or None to let boto3 choose."""
    return os.environ.get("AWS_REGION") or None


def custom_code() -> dict[str, str]:
    """Return the non-empty variables that select user-defined handlers and middleware, as in AWS's vLLM image."""
    return {name: value for name in INSTEAD if (value := os.environ.get(name))}


def model_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the SageMaker model data."""
    return Path(environ.get("SAGEMAKER_MODEL_PATH") or "/opt/ml/model")


def netty_buffer_bytes() -> int:
    """Return the maximum size of a message from a worker to the Java side of DJL Serving, in bytes."""
    return int(os.environ.get("MAX_NETTY_BUFFER_SIZE", 20 << 20))


def of_worker() -> dict[str, str]:
    """Return the environment of a DJL worker without the variables for the Java side, which serves several models."""
    prefixes = ("SERVING_", "SAGEMAKER_MULTI_MODEL")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def restore_text() -> None:
    """Restore variables in which Java has replaced each non-ASCII byte with a question mark.

    Without a UTF-8 locale, Runtime.exec of the JDK cannot encode these variables. The environments of this process's
    ancestors still contain the original values (proc(5)).
    """
    pid = os.getppid()
    with contextlib.suppress(OSError):  # the process belongs to another user, or has ended
        while pid:
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = line.partition(b"=")
                if not value.isascii() and os.environb.get(name) == re.sub(rb"[\x80-\xff]", b"?", value):
                    os.environb[name] = value
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def exports_traces() -> bool:
    """Return whether the OpenTelemetry variables set an endpoint for traces and do not disable tracing."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("TRACES_ENDPOINT", "ENDPOINT"))


def otlp_protocol() -> str:
    """Return the trace export protocol from the OpenTelemetry variables."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next((value for name in names if (value := os.environ.get(name))), "http/protobuf")


def on_sagemaker() -> bool:
    """Return whether SageMaker runs this process, which gives containers a role, but not ECS's metadata."""
    return "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI" in os.environ and "ECS_CONTAINER_METADATA_URI_V4" not in os.environ


def key_variables() -> tuple[str, ...]:
    """Return the names of the variables with keys for clients.

    On SageMaker, only our own counts: its clients cannot send a key, and `API_KEY` is often a key that model.py needs.
    """
    return (KEYS,) if on_sagemaker() else KEY_VARIABLES


def is_loopback(host: str) -> bool:
    """Return whether the text is an IP address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def warning_without_keys(host: str, *, checks_keys: bool = True) -> str:
    """Return a warning about a server without keys, or "" if only this machine or SageMaker can reach it.

    Args:
        host: the address or host name that the server listens on.
        checks_keys: whether the server can require keys, which DJL Serving cannot.
    """
    if host == "localhost" or is_loopback(host) or on_sagemaker():
        return ""
    missing = "no API key is set" if checks_keys else "DJL Serving checks no API keys"
    remedy = f"set {KEYS}=KEY,..." if checks_keys else f"use LMI_FRONT=embedded with {KEYS}=KEY,..."
    return (
        f"{missing}, and the server listens on {host}: anyone who can reach the port can use the model; "
        f"{remedy}, or listen on 127.0.0.1. All clients share what they store, unless option.owner_header tells those "
        f"of a gateway apart"
    )


def api_key() -> str:
    """Return the first API key in `LMI_API_KEY`, or "" if it is not set."""
    return os.environ.get(KEYS, "").split(",")[0].strip()


def of_embedded_server() -> dict[str, str]:
    """Return the environment for a server that this program starts for itself, with LMI_API_KEY as the only key.

    Variables with keys of other servers would require a key that this program does not send.
    """
    return {name: value for name, value in os.environ.items() if name == KEYS or name not in KEY_VARIABLES}


def server_key() -> str:
    """Return the API key of the server at option.base_url, or "" if OPENAI_API_KEY is not set."""
    return os.environ.get("OPENAI_API_KEY", "").strip()


def secrets() -> tuple[str, ...]:
    """Return the keys and tokens in the process environment, which must not appear in any message."""
    return tuple(key for name in _SECRETS for key in re.split(r"[,\s]+", os.environ.get(name, "")) if key)


# -- the GPUs that an engine uses --------------------------------------------------------------------------------------


STAGES = ("pipeline_parallel_size", "trtllm_pipeline_parallel_size", "pipeline_parallel_degree")
CONTEXTS = ("context_parallel_size", "prefill_context_parallel_size")
"""Names of the options, in engines and deployments, that set the numbers of pipeline stages and context parts.

Other kinds of parallelism need no additional GPUs. The decode context parallel size and the expert parallel sizes of
vLLM divide the tensor parallel degree.
"""


class Spread(NamedTuple):
    """The distribution of a model over GPUs.

    Attributes:
        tensor: the number of GPUs per pipeline stage and context part, or None for all available GPUs.
        stages: the number of pipeline stages.
        contexts: the number of parts into which the context of a prompt is split.
    """

    tensor: int | None
    stages: int
    contexts: int

    @property
    def least(self) -> int:
        """The minimum number of GPUs."""
        return (self.tensor or 1) * self.stages * self.contexts

    def __str__(self) -> str:
        words = ["option.tensor_parallel_degree=" + ("max" if self.tensor is None else str(self.tensor))]
        words += [f"{self.stages} stages"] * (self.stages > 1)
        words += [f"{self.contexts} parts of the context"] * (self.contexts > 1)
        return " and ".join(words)


def spread(degree: str, options: Mapping[str, Any]) -> Spread:
    """Return the distribution of a model over GPUs that the options set.

    Args:
        degree: the tensor parallel degree, or "max".
        options: the options of the engine. For vLLM, arguments in `engine_args` override them.
    """
    arguments = options.get("engine_args")
    values = {**options, **arguments} if isinstance(arguments, Mapping) else options
    tensor = _number(values, ("tensor_parallel_size",), None if degree == "max" else int(degree))
    return Spread(tensor, _number(values, STAGES, 1) or 1, _number(values, CONTEXTS, 1) or 1)


def _number(options: Mapping[str, Any], names: tuple[str, ...], default: int | None) -> int | None:
    values = (str(options[name]) for name in names if options.get(name) is not None)
    return next((int(value) for value in values if is_digits(value) and int(value)), default)
