"""The three systems around vLLM."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.serving.engine import engine_spec
from proof.bench.processes import lmi_serve
from systems import vllm_settings
from systems.apis import Api
from systems.base import Start, System
from systems.served import Served
from systems.vllm_offline import offline
from systems.vllm_serve import vllm_serve

OFFLINE, OURS, PEER = "LLM.generate", "lmi serve", "vllm serve"

_DEFAULTS = {"option.max_model_len": "2048"}
_ON_CPU = {
    "option.enforce_eager": "true",  # compiling takes minutes, and gains nothing on a model as small as a CPU wants
    "option.kv_cache_gib": "1",
}
_LOADING = 900.0  # seconds


@dataclass(frozen=True)
class Devices:
    """GPUs that torch sees; none: it runs on the CPU."""

    names: Sequence[str]

    @property
    def gpu(self) -> bool:
        return bool(self.names)


def find_devices() -> Devices:
    """Asked in a process of its own: this one must not hold a GPU."""
    code = "import torch; print(*(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{sys.executable} has no vLLM: run this with the Python that has it")
    return Devices(tuple(filter(None, done.stdout.splitlines())))


def starts(model: str, options: Sequence[str], devices: Devices, api: Api, *, together: bool) -> dict[str, Start]:
    """Names of the systems -> how each is started.

    Args:
        model: what `option.model_id` names.
        api: what the servers are asked in.
        options: `KEY=VALUE` as `lmi serve` takes them; all three run on them.
        together: they will be up at the same time, and must share a GPU's memory.
    """
    os.environ.update(vllm_settings.environment(EngineConfig()))  # our server's too, which has this one's
    overrides = [*_overrides(options, devices, together=together), f"option.model_id={model}"]
    spec = engine_spec(read_config(overrides=[*overrides, "option.llm_engine=vllm"], environ={}).checked())
    config, number = spec.config, len(devices.names)

    @contextlib.contextmanager
    def ours() -> Iterator[System]:
        arguments = [part for override in overrides for part in ("-o", override)]
        loading = ["-o", f"option.model_loading_timeout={_LOADING:g}"]
        with lmi_serve(["--engine", "vllm", *arguments, *loading], timeout=_LOADING) as server:
            yield Served(server.url, server.pid, api.ours, vllm_settings.CORE)

    return {
        OFFLINE: lambda: offline(config, number, chat=api.chat),
        OURS: ours,
        PEER: lambda: vllm_serve(config, number, api.peers, _LOADING),
    }


def _overrides(options: Sequence[str], devices: Devices, *, together: bool) -> list[str]:
    """The options and, before them, those that make a fair and quick comparison."""
    chosen = dict(_DEFAULTS)
    if not devices.gpu:
        chosen |= _ON_CPU
    elif together:
        chosen["option.gpu_memory_utilization"] = "0.3"
    return [*(f"{key}={value}" for key, value in chosen.items()), *options]
