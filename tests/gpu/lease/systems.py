"""The systems that are compared: our server in process and by gRPC, vLLM's own server, and `LLM.generate`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError
from proof.bench.client import prompt
from proof.bench.processes import Run, Server, Work, Worker
from tests.compare.processes import descendants, free_port

OURS, BY_GRPC, VLLM, OFFLINE = "lmi serve", "lmi serve, gRPC", "vllm serve", "LLM.generate"

_GRACE = 40.0  # seconds; our server drains for up to 20 s


@dataclass(frozen=True)
class Device:
    """What is computed on a kind of device.

    Args:
        shape: fields of the model's configuration.
        flags: arguments of vLLM's server, without the dashes. Ours and `LLM` get the same ones.
        variables: environment variables of all systems.
        clients: the numbers of clients of the comparison.
        tokens: tokens in each response.
        streams: number of streams at once.
        seconds: time limits of the steps, by their names.
    """

    shape: Mapping[str, int]
    flags: Mapping[str, Any]
    variables: Mapping[str, str]
    clients: tuple[int, ...]
    tokens: int
    streams: int
    seconds: Mapping[str, float]


_LIMITS = {"model": 120.0, "start": 330.0, "ratio": 160.0, "streams": 60.0, "acceptance": 150.0, "ends": 90.0}
_COMMON = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
DEVICES = {
    "cuda": Device(
        shape={
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 8192,
        },
        flags={
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 8 << 30,
        },
        variables=_COMMON,
        clients=(1, 32, 128, 256),
        tokens=256,
        streams=1024,
        seconds=_LIMITS,
    ),
    "cpu": Device(
        shape={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 2048,
        },
        flags={
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "enforce_eager": True,
        },
        variables={**_COMMON, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        clients=(1, 8),
        tokens=32,
        streams=64,
        seconds={name: 4 * seconds for name, seconds in _LIMITS.items()},
    ),
}


def write_model(directory: Path, demo: Path, device: str) -> int:
    """Write a Llama with random bf16 weights and the demo model's tokenizer, and return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = LlamaConfig.from_pretrained(demo, **DEVICES[device].shape)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return int(model.num_parameters())


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return arguments of vLLM's servers."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def options(flags: Mapping[str, Any]) -> list[str]:
    """Return the same settings as options of `lmi serve --engine vllm`."""
    ours = {"dtype": "dtype", "max_model_len": "max_model_len", "max_num_seqs": "max_rolling_batch_size"}
    words = [f"option.{ours[name]}={value}" for name, value in flags.items() if name in ours]
    words.append("option.engine_args=" + json.dumps({k: v for k, v in flags.items() if k not in ours}))
    return [part for word in words for part in ("-o", word)]


@contextlib.contextmanager
def serving(
    command: list[str], health: str, log: Path, variables: Mapping[str, str], seconds: float
) -> Iterator[tuple[Server, float]]:
    """Start a server, and yield it and its seconds until it was ready. Its output goes to `log`.

    Args:
        command: the command, with `{port}` for the port.
        health: the path that answers 200 when the server is ready.
        seconds: time until it must be ready.

    Raises:
        ConfigError: the server is not ready in time, or ends. The message has the end of its output.
    """
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    begin = time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n== {' '.join(words)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            words,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not responds(url + health):
            if process.poll() is not None or time.monotonic() - begin > seconds:
                state = f"ended with status {process.returncode}" if process.returncode is not None else "is not ready"
                raise ConfigError(f"{words[:4]} {state}:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        yield Server(url, process.pid), time.monotonic() - begin
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it has started."""
    started = [*descendants(process.pid)]
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def our_command(model: Path, device: Device) -> list[str]:
    serve = [sys.executable, "-m", "handler", "serve", str(model), "--port", "{port}"]
    return [*serve, "--engine", "vllm", *options(device.flags), "-o", "option.model_loading_timeout=600"]


def grpc_command(model: Path, device: Device) -> list[str]:
    serve = [sys.executable, "-m", "handler", "serve", str(model), "--port", "{port}", "--engine", "grpc"]
    settings = {
        "engine_python": sys.executable,
        "base_url_kind": "vllm",
        "engine_flags": " ".join(arguments(device.flags)),
        "max_rolling_batch_size": device.flags["max_num_seqs"],
        "model_loading_timeout": 600,
    }
    return [*serve, *(part for name, value in settings.items() for part in ("-o", f"option.{name}={value}"))]


def vllm_command(model: Path, device: Device) -> list[str]:
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [*serve, "--served-model-name", "model", "--host", "127.0.0.1", "--port", "{port}", *arguments(device.flags)]


class Offline:
    """`LLM.generate` in a process of its own, which is idle between measurements."""

    def __init__(self, model: Path, device: Device, log: Path) -> None:
        self._worker = Worker(OFFLINE, _generate, str(model), device, str(log), daemon=False)
        self.close: Callable[[], None] = self._worker.close

    def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: the process has ended. Its output is in the log.
        """
        self._worker.receive()

    def measure(self, work: Work) -> Run:
        self._worker.send(work)
        run = self._worker.receive()
        assert isinstance(run, Run)
        return run


def _generate(pipe: Connection, model: str, device: Device, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(device.variables)
    from vllm import LLM, SamplingParams

    llm = LLM(model, **device.flags)
    encode = llm.get_tokenizer().encode
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            work = pipe.recv()
            numbers = range(work.first, work.first + work.clients * work.requests)
            prompts: Any = [{"prompt_token_ids": encode(prompt(number, work.prompt_words))} for number in numbers]
            params = SamplingParams(max_tokens=work.tokens, ignore_eos=True, temperature=0)
            began, tokens = time.monotonic(), 0
            for first in range(0, len(prompts), work.clients):  # as a closed loop: each client's next request
                responses = llm.generate(prompts[first : first + work.clients], params, use_tqdm=False)
                tokens += sum(len(response.outputs[0].token_ids) for response in responses)
            pipe.send(Run(tokens, time.monotonic() - began))
