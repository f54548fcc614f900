"""The real tritonserver on loopback, with a double of TensorRT-LLM's `ensemble` that answers as engine echo does."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.clients import toolchains
from tests.servers import free_port, http, wait_for

_MODEL = Path(__file__).parent / "scripts" / "triton" / "echo_model.py"
_INPUTS = {
    "text_input": ("STRING", 1),
    "max_tokens": ("INT32", 1),
    "stream": ("BOOL", 1),
    "stop_words": ("STRING", -1),
    "exclude_input_in_output": ("BOOL", 1),
    "temperature": ("FP32", 1),
    "random_seed": ("UINT64", 1),
    "return_log_probs": ("BOOL", 1),
}
"""Datatypes and dimensions of the model's inputs."""

_REQUIRED = ("text_input", "max_tokens")
_OUTPUTS = {"text_output": ("STRING", "-1"), "cum_log_probs": ("FP32", "-1"), "output_log_probs": ("FP32", "-1, -1")}
PLAIN, DECOUPLED = "plain", "decoupled"
"""Names of the model that answers whole and of the one that streams. Triton's are not both."""


class Tritonserver(NamedTuple):
    url: str
    grpc_port: int


def _config(name: str) -> str:
    """The model's config.pbtxt."""
    lines = [f'name: "{name}"', 'backend: "python"', "max_batch_size: 1", "instance_group [ { kind: KIND_CPU } ]"]
    for tensor, (datatype, dims) in _INPUTS.items():
        optional = str(tensor not in _REQUIRED).lower()
        lines.append(f'input {{ name: "{tensor}" data_type: TYPE_{datatype} dims: [ {dims} ] optional: {optional} }}')
    for tensor, (datatype, sizes) in _OUTPUTS.items():
        lines.append(f'output {{ name: "{tensor}" data_type: TYPE_{datatype} dims: [ {sizes} ] }}')
    if name == DECOUPLED:
        lines.append("model_transaction_policy { decoupled: true }")
    return "\n".join(lines)


def _prepare(directory: Path, packages: Path, server: Path) -> None:
    """Write the repository of models, and the Python backend with this Python's stub, which finds numpy there."""
    for name in (PLAIN, DECOUPLED):
        version = directory / "models" / name / "1"
        version.mkdir(parents=True)
        shutil.copy(_MODEL, version / "model.py")
        (version.parent / "config.pbtxt").write_text(_config(name))
    backend = directory / "backends" / "python"
    shutil.copytree(server / "backends" / "python", backend)
    stub = backend / "triton_python_backend_stub"
    shutil.copy(server / "python_backend_stubs" / sysconfig.get_python_version() / stub.name, stub)
    stub.chmod(0o755)
    for name in ("numpy", "numpy.libs"):
        (backend / name).symlink_to(packages / name)


@contextlib.contextmanager
def tritonserver(directory: Path) -> Iterator[Tritonserver]:
    """The server, ready. What it writes stands in `directory`/log."""
    packages = next(toolchains.python("pytriton").parents[1].glob("lib/python*/site-packages"))
    program = packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    program.chmod(0o755)  # pip and uv keep no modes of a wheel's data
    _prepare(directory, packages, program.parents[1])
    ports = {door: free_port() for door in ("http", "grpc")}
    flags = [
        f"--{door}-{name}={value}"
        for door, port in ports.items()
        for name, value in (("port", port), ("address", "127.0.0.1"))
    ]
    libraries = f"{packages / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": libraries,
        "PYTHONHOME": sys.base_prefix,
    }
    command = [
        str(program),
        f"--backend-directory={directory / 'backends'}",
        f"--model-repository={directory / 'models'}",
    ]
    more = ["--allow-metrics=false", "--pinned-memory-pool-byte-size=0"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([*command, *flags, *more], stdout=log, stderr=log, env=environment)
    url = f"http://127.0.0.1:{ports['http']}"

    def is_ready() -> bool:
        assert process.poll() is None, (directory / "log").read_text()[-4000:]
        with contextlib.suppress(httpx.TransportError):
            return http.get(f"{url}/v2/health/ready").status_code == 200
        return False

    try:
        wait_for(is_ready, 60, "tritonserver is not ready")
        yield Tritonserver(url, ports["grpc"])
    finally:
        process.terminate()
        process.wait(30)
