"""Log lines and advice: each message of an engine gives the advice for its cause, and no other.

The messages stand in the engines' sources. Here are short fragments of them; the whole texts are read from the packages
that are installed, and by `make test-templates` from vLLM's source distribution. So a message that changes there fails
here.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.diagnostics import advice, all_causes, causes
from handler.config.options import KNOWN

VALUE = "7"
"""Stands for the values in a message."""


class Message(NamedTuple):
    """A message of another project.

    Attributes:
        package: vllm and what is installed here are read; torch, NCCL, CUDA and tensorrt_llm come as binaries only.
        file: below the package; "" where it is not read.
        fragment: a part of it without values.
    """

    package: str
    file: str
    fragment: str
    cause: str


_HUB = "utils/_http.py"
_MOE = "model_executor/layers/fused_moe/moe_permute_unpermute.py"
MESSAGES = [
    Message("vllm", "v1/core/kv_cache_planning.py", "No available memory for the cache", "out of GPU memory"),
    Message("vllm", "v1/core/kv_cache_planning.py", "larger than the available KV cache memory", "out of GPU memory"),
    Message("vllm", "v1/core/kv_cache_planning.py", "Cannot auto-fit max_model_len", "out of GPU memory"),
    Message("vllm", "v1/worker/gpu_model_runner.py", "Failed to load model - not enough GPU", "out of GPU memory"),
    Message("vllm", "v1/worker/gpu_model_runner.py", "CUDA out of memory occurred when warming", "out of GPU memory"),
    Message("vllm", "v1/worker/utils.py", "on startup is less than desired GPU memory", "taken GPU memory"),
    Message("vllm", "v1/worker/utils.py", "on startup is less than the engine's budget", "taken GPU memory"),
    Message("vllm", "config/model.py", "is greater than the derived max_model_len", "context of the model"),
    Message("vllm", "config/scheduler.py", "is smaller than max_model_len", "context of the model"),
    Message("vllm", "config/scheduler.py", "must be greater than or equal to max_num_seqs", "batch in a step"),
    Message("vllm", "config/model.py", "Total number of attention heads", "number of GPUs"),
    Message("vllm", "config/parallel.py", "is larger than the number of available GPUs", "number of GPUs"),
    Message("vllm", "platforms/cuda.py", "Bfloat16 is only supported on GPUs", "generation of the GPU"),
    Message("vllm", "config/vllm.py", "is not supported for the current GPU", "generation of the GPU"),
    Message("vllm", "model_executor/models/registry.py", "are not supported for now", "family unknown to the engine"),
    Message("vllm", "model_executor/models/registry.py", "was supported in vLLM until", "family unknown to the engine"),
    Message("vllm", "model_executor/models/registry.py", "not supported in-tree", "family unknown to the engine"),
    Message("vllm", "model_executor/models/registry.py", "is not compatible with vLLM", "family unknown to the engine"),
    Message("vllm", "config/model.py", "does not match the quantization method specified", "quantization"),
    Message("vllm", "config/model.py", "Unknown quantization method", "quantization"),
    Message("vllm", "config/vllm.py", "is not supported for quantization method", "quantization"),
    Message("vllm", "model_executor/model_loader/weight_utils.py", "Cannot find the config file for", "quantization"),
    Message("vllm", "model_executor/model_loader/weight_utils.py", "Weight files referenced", "weights incomplete"),
    Message("vllm", "model_executor/model_loader/default_loader.py", "Cannot find any model", "weights incomplete"),
    Message("vllm", "model_executor/model_loader/default_loader.py", "not initialized from", "weights incomplete"),
    Message("vllm", "transformers_utils/config.py", "no config file found", "tokenizer missing"),
    Message("vllm", "transformers_utils/config.py", "Invalid repository ID or local", "no such model on the hub"),
    Message("vllm", "transformers_utils/config.py", "a custom model not yet available", "code of the model is missing"),
    Message("vllm", "config/model.py", "does not support float16", "precision"),
    Message("vllm", "config/model.py", "This model does not support `--runner generate`", "task"),
    Message("vllm", "config/model.py", "Embedding models do not support `--runner", "task"),
    Message("vllm", "v1/worker/gpu_model_runner.py", "does not support any pooling tasks", "task"),
    Message("vllm", "config/speculative.py", "num_speculative_tokens must be provided", "draft model"),
    Message("vllm", "config/model.py", "Pipeline parallelism is not supported", "not for this family"),
    Message("vllm", "config/lora.py", "LoRA is not supported for", "not for this family"),
    Message("vllm", "v1/worker/lora_model_runner_mixin.py", "does not support LoRA yet", "not for this family"),
    Message("vllm", "v1/worker/cpu_worker.py", "less than requested memory for kv", "out of host memory"),
    Message("vllm", "lora/peft_helper.py", "is greater than max_lora_rank", "adapter's rank"),
    Message("vllm", "config/speculative.py", "draft model should have the same vocabulary", "draft model"),
    Message("vllm", "config/speculative.py", "`num_speculative_tokens` was not provided", "draft model"),
    Message("vllm", "config/device.py", "Failed to infer device type", "no GPU"),
    Message("vllm", "v1/engine/core_client.py", "Timed out waiting for engine core", "health-check timeout"),
    Message("vllm", "v1/engine/core_client.py", "Timed out waiting for new engine core", "health-check timeout"),
    Message("vllm", "v1/engine/core.py", "EngineCore failed to start", "engine did not start"),
    Message("vllm", "v1/engine/utils.py", "Engine core initialization failed", "engine did not start"),
    Message("vllm", "v1/executor/multiproc_executor.py", "WorkerProc failed to start", "engine did not start"),
    Message("vllm", "v1/executor/multiproc_executor.py", "died unexpectedly (exit code", "engine did not start"),
    Message("vllm", "model_executor/models/registry.py", "failed to be inspected", "engine did not start"),
    Message("vllm", "platforms/cuda.py", "No valid attention backend found", "attention kernel"),
    Message("vllm", "config/cache.py", "Invalid kv_cache_dtype", "precision of the KV cache"),
    Message("vllm", "config/lora.py", "must be >= max_loras", "adapters in memory"),
    Message("vllm", "v1/worker/utils.py", "NaNs detected in logits", "not a number"),
    Message("vllm", "v1/worker/workspace.py", "was not allocated during warmup", "scratch memory"),
    Message("vllm", "v1/worker/workspace.py", "Workspace growth is not allowed after", "scratch memory"),
    Message("vllm", _MOE, "Workspace is locked but MoE permute", "scratch memory"),
    Message("vllm", "v1/executor/multiproc_executor.py", "RPC call to", "engine hangs"),
    Message("vllm", "v1/executor/multiproc_executor.py", "One or more workers failed", "engine did not start"),
    Message("vllm", "v1/executor/multiproc_executor.py", "Worker failed with error", "engine did not start"),
    Message("vllm", "v1/executor/multiproc_executor.py", "Worker failed with KV connector", "engine did not start"),
    Message("vllm", "v1/executor/multiproc_executor.py", "Executor failed.", "engine did not start"),
    Message("transformers", "utils/hub.py", "You are trying to access a gated repo", "gated model"),
    Message("transformers", "utils/hub.py", "is a gated repository", "gated model"),
    Message("transformers", "utils/hub.py", "is not a valid model identifier", "no such model on the hub"),
    Message("transformers", "utils/hub.py", "is not a valid git identifier", "revision"),
    Message("transformers", "utils/hub.py", "couldn't find them in the cached files", "no internet"),
    Message("transformers", "dynamic_module_utils.py", "allow custom code to be run", "code of the model is missing"),
    Message("transformers", "dynamic_module_utils.py", "packages that were not found in your", "package missing"),
    Message("transformers", "dynamic_module_utils.py", "Missing requirements in your local", "package missing"),
    Message("transformers", "utils/import_utils.py", "requires the SentencePiece library but it", "package missing"),
    Message("transformers", "models/auto/configuration_auto.py", "Should have a `model_type` key", "tokenizer missing"),
    Message("transformers", "models/auto/configuration_auto.py", "does not recognize", "family unknown to the engine"),
    Message("transformers", "models/auto/tokenization_auto.py", "was not found", "family unknown to the engine"),
    Message("huggingface_hub", _HUB, "Cannot access gated repo for url", "gated model"),
    Message("huggingface_hub", _HUB, "Repository Not Found for url", "no such model on the hub"),
    Message("huggingface_hub", _HUB, "Revision Not Found for url", "revision"),
    Message("huggingface_hub", _HUB, "offline mode is enabled. To disable it", "no internet"),
    Message("huggingface_hub", "file_download.py", "we cannot find the requested files", "no internet"),
    Message("huggingface_hub", "", "429 Client Error: Too Many Requests for url", "too many requests to the hub"),
    Message("safetensors", "", "SafetensorError: Error while deserializing header", "weights incomplete"),
    Message("pydantic", "", "Extra inputs are not permitted [type=extra_forbidden", "unknown option"),
    Message("torch", "", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out of GPU memory"),
    Message("torch", "", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate", "out of GPU memory"),
    Message("torch", "", "DefaultCPUAllocator: can't allocate memory", "out of host memory"),
    Message("torch", "", "The NVIDIA driver on your system is too old (found version 12040)", "driver"),
    Message("torch", "", "Error 803: system has unsupported display driver / cuda driver combination", "driver"),
    Message("torch", "", "Error 802: system not yet initialized", "broken GPU"),
    Message("torch", "", "Found no NVIDIA driver on your system", "no GPU"),
    Message("torch", "", "Torch not compiled with CUDA enabled", "no GPU"),
    Message("torch", "", "ImportError: libcuda.so.1: cannot open shared object file", "no GPU"),
    Message("torch", "", "CUDA error: invalid device ordinal", "number of GPUs"),
    Message("torch", "", "CUDA error: no kernel image is available for execution", "generation of the GPU"),
    Message("torch", "", "CUDA error: uncorrectable ECC error encountered", "broken GPU"),
    Message("torch", "", "unable to allocate shared memory(shm) for file: No space left on device", "shared memory"),
    Message("torch", "", "This might be caused by insufficient shared memory (shm).", "shared memory"),
    Message("torch", "", "Watchdog caught collective operation timeout", "GPUs do not reach one another"),
    Message("torch", "", "CUDA error: an illegal memory access was encountered", "kernel fault"),
    Message("torch", "", "CUDA error: device-side assert triggered", "kernel fault"),
    Message("torch", "", "CUDA error: unspecified launch failure", "kernel fault"),
    Message("torch", "", "CUDA error: misaligned address", "kernel fault"),
    Message("torch", "", "libtorch_cuda.so: undefined symbol: ncclCommWindowRegister", "libraries of two versions"),
    Message("torch", "", "_C.abi3.so: undefined symbol: _ZN3c106ivalue14ConstantString", "libraries of two versions"),
    Message("torch", "", "ImportError: libcudart.so.12: cannot open shared object file", "libraries of two versions"),
    Message("triton", "", "Failed to find C compiler", "compiler missing"),
    Message("NCCL", "", "shared memory segment /dev/shm/nccl-x, error: No space left on device", "shared memory"),
    Message("NCCL", "", "NCCL WARN Cuda failure 2 'out of memory'", "out of GPU memory"),
    Message("NCCL", "", "ncclUnhandledCudaError: Call to CUDA function failed.", "GPUs do not reach one another"),
    Message("tensorrt_llm", "", "Executor creation failed due to insufficient GPU memory", "out of GPU memory"),
    Message("tensorrt_llm", "", "Unknown architecture for AutoModelForCausalLM: X", "family unknown to the engine"),
    Message("tensorrt_llm", "", "RuntimeError: Executor worker returned error", "engine did not start"),
    Message("Open MPI", "", "mpirun noticed that process rank 0 exited on signal 9 (Killed)", "out of host memory"),
    Message("multiprocessing", "", "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)", "out of host memory"),
]  # fmt: skip

WRAPPED = """\
(EngineCore pid=7) ERROR 11-25 07:00:00 [core.py:1584] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-25 07:00:00 [core.py:1584] ValueError: {}
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore_0': 1}}"""
"""A cause as it stands in vLLM's log, between lines that only say that there is one."""


@pytest.fixture
def sources(request: pytest.FixtureRequest) -> Path:
    found = request.config.getoption("--templates")
    if not found:
        pytest.skip("vLLM's source is not here: make test-templates")
    return Path(found) / "vllm-source" / "vllm"


def installed(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


@functools.cache
def texts(file: Path) -> tuple[str, ...]:
    """The texts in a Python file, VALUE for the values in them."""
    return tuple(text for node in ast.walk(ast.parse(file.read_bytes())) if (text := _text(node)))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]|\{\w*\}", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return VALUE
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def whole(message: Message, package: Path) -> str:
    """The longest text that has the fragment."""
    found = [text for text in texts(package / message.file) if message.fragment in text]
    assert found, f"{message.package} no longer says {message.fragment!r} in {message.file}"
    return max(found, key=len)


def names(text: str) -> list[str]:
    return [cause.name for cause in causes("", text.splitlines())]


INSTALLED = ("transformers", "huggingface_hub")
READ = [one for one in MESSAGES if one.file and one.package in INSTALLED]
VLLM = [one for one in MESSAGES if one.package == "vllm"]
SAID = [one for one in MESSAGES if not one.file]


def check(message: Message, text: str) -> None:
    assert names(text) == [message.cause], text
    if not next(cause for cause in all_causes() if cause.name == message.cause).symptom:
        assert names(WRAPPED.format(text)) == [message.cause], text
    assert advice("", [text])


@pytest.mark.parametrize("message", SAID, ids=lambda one: one.fragment[:40])
def test_a_line_of_a_binary_gives_its_advice(message: Message) -> None:
    check(message, message.fragment)


@pytest.mark.parametrize("message", READ, ids=lambda one: one.fragment[:40])
def test_a_message_of_an_installed_package_gives_its_advice(message: Message) -> None:
    check(message, whole(message, installed(message.package)))


@pytest.mark.parametrize("message", VLLM, ids=lambda one: one.fragment[:40])
def test_a_message_of_vllm_gives_its_advice(message: Message, sources: Path) -> None:
    check(message, whole(message, sources))


_TOLD = ("info", "info_once", "debug", "debug_once", "warning", "warning_once")


@pytest.mark.nightly
def test_what_vllm_logs_of_a_start_that_goes_well_gives_none(sources: Path) -> None:
    def told(code: bytes) -> Iterator[str]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TOLD:
                yield from map(_text, node.args[:1])

    logging = [code for file in sources.rglob("*.py") if b"logger." in (code := file.read_bytes())]
    texts = {text for code in logging for text in told(code)}
    assert len(texts) > 1000
    assert not [(text, found) for text in texts if (found := names(text))]


def test_the_advice_names_options_that_there_are() -> None:
    named = {name for cause in all_causes() for name in re.findall(r"\boptions\.(\w+)", cause.says)}
    assert not [name for name in named if f"option.{name}" not in KNOWN]
