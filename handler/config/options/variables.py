"""Environment variables of TGI, Hugging Face and AWS's vLLM image, translated into the handler's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from handler.config.options import KNOWN
from handler.config.options.option import Gone, is_secret, read_json, shown
from handler.core.custom_handlers import HANDLERS, MIDDLEWARE, PING, THROTTLE
from handler.core.errors import Problem

SM_VLLM = "SM_VLLM_"
"""AWS's vLLM image makes `SM_VLLM_X_Y=V` into `--x-y V` (aws/deep-learning-containers, sagemaker_args.py)."""


class Own(NamedTuple):
    """A variable of the handler's with the value that a foreign one gives it."""

    foreign: str
    name: str
    value: str


class Note(NamedTuple):
    """A foreign variable without effect here."""

    foreign: str
    message: str


class Variable(NamedTuple):
    """One foreign variable.

    Attributes:
        own: the handler's variable for it; "" where it has none.
        help: why it has no effect or is refused, and what to write instead.
        by_engine: the handler's variable, where engines have different ones; the others have none.
        convert: makes the handler's value; raises ValueError for a wrong one. None says that nothing is to be set.
        unless: values that ask for nothing; another one is refused.
    """

    own: str = ""
    help: str = ""
    by_engine: Mapping[str, str] = {}
    convert: Callable[[str, str], str | None] = lambda value, engine: value
    unless: tuple[str, ...] | None = None


def _truth(value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise ValueError("must be true or false")
    return value.lower() in ("true", "1")


def _graphs(value: str, engine: str) -> str | None:
    if value.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    on = value.lower() == "true"
    return json.dumps(not on if engine == "vllm" else on)


def _graph_sizes(value: str, engine: str) -> str | None:
    sizes = [int(size) for size in value.split(",")]
    return None if sizes == [0] else json.dumps(sizes)


def _shards(value: str, engine: str) -> str | None:
    return "max" if _truth(value) else "1"


def _idle(help: str) -> Variable:
    return Variable(help=help)


def _refused(help: str, *unless: str) -> Variable:
    return Variable(help=help, unless=unless)


_LIMITS = "a request may ask for as much as the engine can do"
_SCHEDULING = "requests join a running batch at its next step"
_ADAPTERS = "put adapters into adapters/ beside the model, or register them (documents: adapters)"
_ROPE = "write OPTION_HF_OVERRIDES={...} (vllm), or change the model's config.json"
_SPECULATE = 'write OPTION_SPECULATIVE_CONFIG={"method": "ngram", "num_speculative_tokens": N} (vllm)'
_TRACES = "write OPTION_OTLP_TRACES_ENDPOINT"

_MULTI_MODEL = "this server holds one model, and no multi-model endpoint's; take inference components, or LoRA adapters"
_SUPERVISED = "the container restarts a lost engine itself"
_INSTALLED = "nothing is installed at the start: build what model.py imports into the image"

OF_VLLMS_IMAGE: dict[str, Variable] = {
    "CUSTOM_FASTAPI_INVOCATION_HANDLER": _refused(HANDLERS),
    "CUSTOM_FASTAPI_PING_HANDLER": _refused(PING),
    "CUSTOM_PRE_PROCESS": _refused(MIDDLEWARE),
    "CUSTOM_POST_PROCESS": _refused(MIDDLEWARE),
    "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS": _refused(MIDDLEWARE),
    "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": _refused(THROTTLE),
    "CUSTOM_SCRIPT_FILENAME": _refused("name the file model.py", "model.py"),
    **dict.fromkeys(("PROCESS_AUTO_RECOVERY", "PROCESS_MAX_START_RETRIES"), _idle(_SUPERVISED)),
    **dict.fromkeys(("STANDARD_AUTO_INSTALL_REQ", "STANDARD_PIP_ARGS"), _idle(_INSTALLED)),
}
"""Those of AWS's vLLM image beside `SM_VLLM_*`, of its package model-hosting-container-standards."""

VARIABLES: dict[str, Variable] = {
    **OF_VLLMS_IMAGE,
    # Hugging Face's images, and SageMaker's SDK
    "HF_MODEL_REVISION": Variable("OPTION_REVISION"),
    "HF_MODEL_QUANTIZE": Variable("OPTION_QUANTIZE"),
    "HF_MODEL_TRUST_REMOTE_CODE": Variable("OPTION_TRUST_REMOTE_CODE"),
    "HF_TRUST_REMOTE_CODE": Variable("OPTION_TRUST_REMOTE_CODE"),
    "HF_TASK": Variable("OPTION_TASK"),
    "HUGGING_FACE_HUB_TOKEN": Variable("HF_TOKEN"),
    "HUGGINGFACE_HUB_TOKEN": Variable("HF_TOKEN"),
    "HF_API_TOKEN": Variable("HF_TOKEN"),
    "SM_NUM_GPUS": Variable("TENSOR_PARALLEL_DEGREE"),
    "SAGEMAKER_MULTI_MODEL": _refused(_MULTI_MODEL, "false", "0"),
    "MESSAGES_API_ENABLED": Variable("OPTION_OPENAI_COMPAT", convert=lambda value, _: json.dumps(_truth(value))),
    # TGI's launcher
    "MODEL_ID": Variable("OPTION_MODEL_ID"),
    "REVISION": Variable("OPTION_REVISION"),
    "NUM_SHARD": Variable("TENSOR_PARALLEL_DEGREE"),
    "SHARDED": Variable("TENSOR_PARALLEL_DEGREE", convert=_shards),
    "QUANTIZE": Variable("OPTION_QUANTIZE"),
    "DTYPE": Variable("OPTION_DTYPE"),
    "KV_CACHE_DTYPE": Variable("OPTION_KV_CACHE_DTYPE", convert=lambda value, _: value.replace("e4m3fn", "e4m3")),
    "TRUST_REMOTE_CODE": Variable("OPTION_TRUST_REMOTE_CODE", convert=lambda value, _: json.dumps(_truth(value))),
    "MAX_CONCURRENT_REQUESTS": Variable("SERVING_JOB_QUEUE_SIZE"),
    "MAX_INPUT_TOKENS": Variable("OPTION_MAX_INPUT_LEN"),
    "MAX_INPUT_LENGTH": Variable("OPTION_MAX_INPUT_LEN"),
    "MAX_TOTAL_TOKENS": Variable("OPTION_MAX_MODEL_LEN"),
    "MAX_BATCH_PREFILL_TOKENS": Variable("OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS"),
    "MAX_BATCH_SIZE": Variable("OPTION_MAX_ROLLING_BATCH_SIZE"),
    "PAYLOAD_LIMIT": Variable("SERVING_MAX_REQUEST_SIZE"),
    "CUDA_MEMORY_FRACTION": Variable(
        help="the engine sizes its memory itself",
        by_engine={"trtllm": "OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION", "vllm": "OPTION_GPU_MEMORY_UTILIZATION"},
    ),
    "CUDA_GRAPHS": Variable(
        help="OPTION_ENFORCE_EAGER=true (vllm) and OPTION_USE_CUDA_GRAPH=false (trtllm) do without CUDA graphs",
        by_engine={"trtllm": "OPTION_CUDA_GRAPH_BATCH_SIZES", "vllm": "OPTION_CUDAGRAPH_CAPTURE_SIZES"},
        convert=_graph_sizes,
    ),
    "ENABLE_CUDA_GRAPHS": Variable(
        help="the engine has no CUDA graphs",
        by_engine={"trtllm": "OPTION_USE_CUDA_GRAPH", "vllm": "OPTION_ENFORCE_EAGER"},
        convert=_graphs,
    ),
    "MAX_BATCH_TOTAL_TOKENS": _idle("OPTION_KV_CACHE_GIB limits the KV cache"),
    "MAX_CLIENT_BATCH_SIZE": _idle("SERVING_BATCH_SIZE is for dynamic batching"),
    **dict.fromkeys(("MAX_BEST_OF", "MAX_STOP_SEQUENCES", "MAX_TOP_N_TOKENS", "ENABLE_PREFILL_LOGPROBS"), _idle(_LIMITS)),
    **dict.fromkeys(("WAITING_SERVED_RATIO", "MAX_WAITING_TOKENS"), _idle(_SCHEDULING)),
    "VALIDATION_WORKERS": _idle("the handler tokenizes on threads of its own"),
    "SPECULATE": _idle(_SPECULATE),
    "DISABLE_CUSTOM_KERNELS": _idle("the engine chooses its kernels"),
    "DISABLE_GRAMMAR_SUPPORT": _idle("OPTION_GUIDED_DECODING=false refuses guides (vllm)"),
    **dict.fromkeys(("ROPE_SCALING", "ROPE_FACTOR"), _refused(_ROPE)),
    "TOKENIZER_CONFIG_PATH": _refused("the tokenizer's configuration is the one in the model's directory"),
    "LORA_ADAPTERS": _refused(_ADAPTERS),
    "API_KEY": _idle("LMI_API_KEY=KEY,... asks clients for a key"),
    "CORS_ALLOW_ORIGIN": _idle("`lmi serve --allow-origin` says it"),
    "PORT": _idle("`lmi serve --port` and SAGEMAKER_BIND_TO_PORT say it"),
    "PROMETHEUS_PORT": _idle("/metrics is on the server's own port"),
    "WEIGHTS_CACHE_OVERRIDE": _idle("HF_HUB_CACHE says where the hub's files lie"),
    "JSON_OUTPUT": _idle("the log is text"),
    **dict.fromkeys(("OTLP_ENDPOINT", "OTLP_SERVICE_NAME"), _idle(_TRACES)),
    **dict.fromkeys(("WATERMARK_GAMMA", "WATERMARK_DELTA"), _idle("answers have no watermark")),
    **dict.fromkeys(("NGROK", "NGROK_AUTHTOKEN", "NGROK_EDGE"), _idle("the server opens no tunnel")),
    "USAGE_STATS": _idle("nothing is reported"),
    "SHARD_UDS_PATH": _idle("the engine's process has a socket without a name"),
}  # fmt: skip
"""By name; TGI's are those of its launcher (docs/source/reference/launcher.md)."""

UNREAD = {
    "HF_TOKEN": "huggingface_hub reads it",
    "HF_HUB_CACHE": "huggingface_hub reads it",
    "HUGGINGFACE_HUB_CACHE": "huggingface_hub reads it",
    "HOSTNAME": "every container has it; `lmi serve --host` and LMI_HOST say it",
    "MASTER_ADDR": "torch reads it",
    "MASTER_PORT": "torch reads it",
}
"""Variables that others set or read too: nothing is said of them."""

SECRET = frozenset({"HF_TOKEN"})


def answer(name: str) -> str:
    """Say what a foreign variable does here."""
    if name in UNREAD:
        return f"left alone: {UNREAD[name]}"
    variable = VARIABLES[name]
    if variable.unless is not None:
        return Gone(variable.help, variable.unless).answer
    names = [f"`{own}` ({engine})" for engine, own in sorted(variable.by_engine.items())]
    if variable.own:
        names.append(f"`{variable.own}`")
    return f"same: {', '.join(names)}" if names else f"no effect: {variable.help}"


def hub_token(environ: Mapping[str, str]) -> str | None:
    """Return the token for the Hugging Face hub from the first variable that has one, HF_TOKEN first."""
    names = ["HF_TOKEN", *(name for name, variable in VARIABLES.items() if variable.own == "HF_TOKEN")]
    return next((value for name in names if (value := environ.get(name))), None)


def translate(environ: Mapping[str, str], engine: str) -> Iterator[Own | Note | Problem]:
    """Translate foreign variables; an empty value counts as unset. Two values of one own variable are a problem.

    Args:
        engine: the one that options name; "" where they name none, which `SM_VLLM_*` then do.
    """
    given = {name: (name, value) for name, value in environ.items() if value}
    for item in (*_of_vllms_image(environ, engine), *_of_tables(environ, engine)):
        if isinstance(item, Own):
            first, value = given.setdefault(item.name, (item.foreign, item.value))
            if value != item.value:
                yield contradiction(item.foreign, item.value, first, value)
                continue
        yield item


def _of_tables(environ: Mapping[str, str], engine: str) -> Iterator[Own | Note | Problem]:
    for name, variable in VARIABLES.items():
        value = environ.get(name)
        if not value:
            continue
        own = variable.by_engine.get(engine, variable.own)
        try:
            if variable.unless is not None and value.lower() not in variable.unless:
                raise ValueError(variable.help)
            made = variable.convert(value, engine)
        except ValueError as error:
            yield Problem(f"environment variable {name}", name, f"{shown(f'{name}={value}')}: {error}")
            continue
        if own and made is not None:
            yield Own(name, own, made)
        elif variable.unless is None:
            yield Note(name, variable.help)


def contradiction(first: str, value: str, second: str, other: str) -> Problem:
    """Two variables of one option have two values; those of secrets are not shown."""
    secret = is_secret(f"{first}={value}") or is_secret(f"{second}={other}")
    values = "" if secret else f" ({value} and {other})"
    return Problem(
        "", first, f"environment variables {first} and {second} contradict each other{values}: leave one out"
    )


def _of_vllms_image(environ: Mapping[str, str], engine: str) -> Iterator[Own]:
    names = sorted(name for name in environ if name.startswith(SM_VLLM))
    if names and not engine:
        yield Own(names[0], "OPTION_LLM_ENGINE", "vllm")
    if names and not environ.get("OPTION_OPENAI_COMPAT"):
        yield Own(names[0], "OPTION_OPENAI_COMPAT", "true")  # its /invocations is vLLM's /v1/chat/completions
    for name in names:
        key, value = name.removeprefix(SM_VLLM).lower(), environ[name] or "true"
        if key.startswith("no_") and f"option.{key}" not in KNOWN and value.lower() in ("true", "false"):
            key, value = key.removeprefix("no_"), json.dumps(value.lower() == "false")
        for option in KNOWN.get(f"option.{key}", ()):
            if not option.engines or "vllm" in option.engines:
                key, value = option.key.removeprefix("option."), _joined(value)
        yield Own(name, f"OPTION_{key.upper()}", value)


def _joined(value: str) -> str:
    """Write a JSON array of texts as our own options take it, with commas between."""
    try:
        found = read_json(value) if value.startswith("[") else None
    except ValueError:
        return value
    return ",".join(found) if found and all(isinstance(one, str) for one in found) else value
