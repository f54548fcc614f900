"""Specifications of every kind with decisions made by hand, for the tests of builders, exports and permissions."""

from __future__ import annotations

from typing import Any

from deploy.iam.policies import Policy, policies
from deploy.resolve.decision import Decision, InstancePool
from deploy.spec import Spec

ROLE = "arn:aws:iam::123456789012:role/lmi"
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/lmi-handler@sha256:" + "ab" * 32
KEY = "arn:aws:kms:eu-west-1:123456789012:key/11111111-2222-3333-4444-555555555555"
TOPIC = "arn:aws:sns:eu-west-1:123456789012:lmi"
SECRET = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hugging-face-AbCdEf"

_PLAIN: dict[str, Any] = {
    "name": "llama",
    "role": ROLE,
    "image": {"repository": "lmi-handler", "tag": "0.1.0"},
    "model": {"id": "meta-llama/Meta-Llama-3-8B-Instruct", "context": 8192, "token_secret": SECRET},
    "options": {"llm_engine": "trtllm", "job_queue_size": 200, "kv_cache_free_gpu_mem_fraction": 0.85},
    "instance": {"type": "ml.g6e.xlarge", "count": 2},
}

_SPECS: dict[str, dict[str, Any]] = {
    "plain": {**_PLAIN, "tags": {"team": "search"}, "alarms": {"latency_p95_ms": 20_000, "notify": TOPIC}},
    "single": {**_PLAIN, "instance": {"type": "ml.g6e.xlarge"}, "alarms": None},
    "components": {
        **_PLAIN,
        "model": {"s3": "s3://models/llama-3-8b/"},
        "instance": {"type": "ml.g6e.12xlarge", "managed": {"min": 0, "max": 4}},
        "components": [
            {
                "name": "llama-chat",
                "copies": 4,
                "memory_mb": 24_576,
                "cpus": 4,
                "adapters": [
                    {"name": "llama-french", "artifact": "s3://models/adapters/french.tar.gz"},
                    {"name": "llama-legal", "artifact": "s3://models/adapters/legal.tar.gz"},
                ],
            },
            {"name": "llama-batch", "cache": False},
        ],
        "scaling": {"min": 0, "max": 8, "concurrency": 12.5},
    },
    "asynchronous": {
        **_PLAIN,
        "async": {
            "output": "s3://answers/llama/",
            "failures": "s3://answers/failed/",
            "concurrency": 8,
            "notify_success": TOPIC,
            "notify_error": TOPIC,
        },
        "encryption": {"output_key": KEY},
        "scaling": {"max": 3, "concurrency": 5},
    },
    "asynchronous-asleep": {
        **_PLAIN,
        "async": {"output": "s3://answers/llama/"},
        "instance": {"type": "ml.g6e.xlarge"},
        "scaling": {"min": 0, "max": 3, "concurrency": 5},
    },
    "isolated": {
        **_PLAIN,
        "model": {"path": "models/llama", "upload": "s3://models/llama/"},
        "network": {
            "isolated": True,
            "subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"],
            "security_groups": ["sg-0123456789abcdef2"],
        },
        "encryption": {"volume_key": KEY},
        "update": {"policy": "blue_green", "batch_percent": 10, "wait": 300},
        "timeouts": {"provision": 1800},
    },
    "isolated-components": {
        **_PLAIN,
        "model": {"s3": "s3://models/llama/"},
        "network": {
            "isolated": True,
            "subnets": ["subnet-0123456789abcdef0"],
            "security_groups": ["sg-0123456789abcdef2"],
        },
        "components": [{"name": "llama-chat"}],
    },
    "own-models": {
        **_PLAIN,
        "model": {"s3": "s3://models/llama-3-8b/"},
        "instance": {"type": "ml.g6e.12xlarge", "count": 1},
        "components": [
            {
                "name": "chat",
                "accelerators": 2,
                "memory_mb": 32_768,
                "adapters": [
                    {"name": "chat-french", "artifact": "s3://models/adapters/french.tar.gz"},
                ],
            },
            {
                "name": "embed",
                "model": {"id": "Qwen/Qwen3-Embedding-0.6B", "token_secret": SECRET},
                "options": {"llm_engine": "vllm", "kv_cache_free_gpu_mem_fraction": None},
                "environment": {"VLLM_LOGGING_LEVEL": "DEBUG"},
            },
            {"name": "old", "image": {"aws": "djl-lmi"}, "options": {"rolling_batch": "disable", "llm_engine": None}},
        ],
        "scaling": {"min": 1, "max": 2, "concurrency": 8},
    },
    "guest": {
        **_PLAIN,
        "name": "team-b",
        "endpoint": "llama",
        "instance": {"type": "ml.g6e.12xlarge"},
        "components": [{"name": "rank", "copies": 2}],
        "scaling": {"min": 0, "max": 2, "concurrency": 8},
    },
    "aws-image": {
        **_PLAIN,
        "image": {"aws": "djl-lmi"},
        "model": {"id": "Qwen/Qwen3-8B"},
        "options": {
            "rolling_batch": "disable",
            "async_mode": True,
            "entryPoint": "djl_python.lmi_vllm.vllm_async_service",
        },
    },
    "prefix-aware": {
        **_PLAIN,
        "routing": {"prefix_length": 4096, "concurrency_threshold": 32},
        "instance": {"type": "ml.g6e.xlarge", "count": 4, "volume_gb": 200},
        "scaling": {"min": 2, "max": 6, "concurrency": 40},
        "update": {"batch_percent": 25},
    },
    "pools": {
        **_PLAIN,
        "instance": {
            "count": 2,
            "pools": [
                {"type": "ml.g6e.xlarge"},
                {"type": "ml.g6.12xlarge"},
                {"type": "ml.g5.2xlarge", "priority": 5, "options": {"max_rolling_batch_size": 32}},
            ],
        },
        "timeouts": {"provision": 900},
    },
    "cpu": {
        **_PLAIN,
        "name": "smollm2",
        "model": {"s3": "s3://models/smollm2/"},
        "options": {"llm_engine": "openvino"},
        "instance": {"type": "ml.c7i.2xlarge"},
    },
}


_POOLS = (
    InstancePool(1, "ml.g6e.xlarge", gpus=1, tensor_parallel=1),
    InstancePool(2, "ml.g6.12xlarge", gpus=4, tensor_parallel=4),
    InstancePool(5, "ml.g5.2xlarge", gpus=1, tensor_parallel=1, options={"max_rolling_batch_size": 32}),
)


def spec(case: str, **changes: Any) -> Spec:
    return Spec.model_validate({**_SPECS[case], **changes})


def decision(case: str, **changes: Any) -> Decision:
    """As `resolve` would decide, with figures that are easy to read."""
    said = spec(case)
    cpu = case == "cpu"
    return Decision(
        **{
            "region": "eu-west-1",
            "account": "123456789012",
            "image": "763104351884.dkr.ecr.eu-west-1.amazonaws.com/djl-inference:0.38.0-lmi29.0.0-cu130"
            if said.image.aws
            else IMAGE,
            "instance_type": said.instance.pools[0].type if said.instance.pools else said.instance.type,
            "gpus": 0 if cpu else 4 if said.instance.type == "ml.g6e.12xlarge" else 1,
            "ami": None if cpu else "al2023-ami-sagemaker-inference-gpu-4-1",
            "model_data": said.model.s3 or said.model.upload,
            "download": 600,
            "startup": 900,
            "provision": said.timeouts.provision,
            "tensor_parallel": None if cpu else 1,
            "pools": _POOLS if said.instance.pools else (),
            "components": _of_components(said) if case == "own-models" else {},
            **changes,
        }
    )


def _of_components(said: Spec) -> dict[str, Decision]:
    """Decisions of components that differ: the accelerators are the tensor parallel degree."""
    return {
        item.name: decision(
            "components",
            image="763104351884.dkr.ecr.eu-west-1.amazonaws.com/djl-inference:0.38.0-lmi29.0.0-cu130"
            if item.image is not None
            else IMAGE,
            model_data=None if item.model is not None and item.model.id else "s3://models/llama-3-8b/",
            tensor_parallel=item.accelerators,
            startup=900 + 60 * place,
        )
        for place, item in enumerate(said.components)
    }


CASES = tuple(_SPECS)


def execution_role(said: Spec, decided: Decision) -> Policy:
    return policies(said, decided)["execution-role"]


def deployer(said: Spec, decided: Decision) -> Policy:
    return policies(said, decided)["deployer"]


def invoker(said: Spec, decided: Decision) -> Policy:
    return policies(said, decided)["invoker"]


LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""config.json of Meta-Llama-3-8B, as far as its size is computed from it."""
