"""Endpoints as public notebooks and examples of AWS's configure them: names and values, in our own form.

docs/adopt.md has a table of what becomes of them; a test holds it to these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

_ECR = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
ROLE = "arn:aws:iam::123456789012:role/model"
_ASYNC = {
    "OPTION_ASYNC_MODE": "true",
    "OPTION_ROLLING_BATCH": "disable",
    "OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service",
    "SERVING_FAIL_FAST": "true",
}
_TOOLS = {"SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true"}
_NEWEST = "al2023-ami-sagemaker-inference-gpu-4-1"
_OLDER = "al2-ami-sagemaker-inference-gpu-3-1"


@dataclass(frozen=True)
class Public:
    """One endpoint.

    Attributes:
        image: repository and tag in AWS's account.
        type: of its instances.
        environment: of its container.
        variant: further fields of its variant.
        container: further fields of its container.
        components: each component's compute requirements; none: the endpoint has the model itself.
        config: further fields of its configuration.
    """

    image: str
    type: str
    environment: dict[str, str]
    variant: dict[str, Any] = field(default_factory=dict)
    container: dict[str, Any] = field(default_factory=dict)
    components: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Public:
        return replace(self, **changes)

    @property
    def model(self) -> dict[str, Any]:
        """What CreateModel takes."""
        image = f"{_ECR}/{self.image}"
        container = {"Image": image, "Environment": self.environment, **self.container}
        return {"ModelName": "by-hand-model", "ExecutionRoleArn": ROLE, "PrimaryContainer": container}

    @property
    def endpoint_config(self) -> dict[str, Any]:
        """What CreateEndpointConfig takes."""
        own: dict[str, Any] = {"VariantName": "AllTraffic", "InstanceType": self.type, "InitialInstanceCount": 1}
        held = {"ExecutionRoleArn": ROLE} if self.components else {}
        if not self.components:
            own["ModelName"] = "by-hand-model"
        variant = {**own, **self.variant}
        return {"EndpointConfigName": "by-hand-config", "ProductionVariants": [variant], **held, **self.config}


def _start(seconds: int, **more: Any) -> dict[str, Any]:
    return {"ContainerStartupHealthCheckTimeoutInSeconds": seconds, **more}


def _managed(most: int, least: int = 0) -> dict[str, Any]:
    return {
        "ModelDataDownloadTimeoutInSeconds": 3600,
        "ContainerStartupHealthCheckTimeoutInSeconds": 3600,
        "ManagedInstanceScaling": {"Status": "ENABLED", "MinInstanceCount": least, "MaxInstanceCount": most},
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }


def _prefix(uri: str) -> dict[str, Any]:
    data = {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
    return {"ModelDataSource": {"S3DataSource": data}}


def _gpus(number: int, memory: int) -> dict[str, Any]:
    return {"NumberOfAcceleratorDevicesRequired": number, "MinMemoryRequiredInMb": memory}


LMI = "djl-inference:"
TGI = "huggingface-pytorch-tgi-inference:"

PUBLIC: dict[str, Public] = {
    "SGLang, AWS's test": Public(  # aws/deep-learning-containers, test/sglang/sagemaker
        "sglang:server-sagemaker-cuda-v1.3", "ml.g6.xlarge",
        {"SM_SGLANG_MODEL_PATH": "Qwen/Qwen3-0.6B", "HF_TOKEN": "hf_0123456789abcdefghijklmn"},
        _start(900, InferenceAmiVersion=_NEWEST),
    ),
    "gpt-oss-20b, SGLang": Public(  # aws/deep-learning-containers, docs/sglang/deployment/sagemaker.md
        "sglang:server-sagemaker-cuda-v1", "ml.g5.2xlarge",
        {"SM_SGLANG_MODEL_PATH": "openai/gpt-oss-20b"},
        {"InferenceAmiVersion": _OLDER},
    ),
    "Llama-3.1-70B, SGLang": Public(  # aws/deep-learning-containers, docs/sglang/deployment.md
        "sglang:server-amzn2023-sagemaker-cuda", "ml.p4d.24xlarge",
        {
            "SM_SGLANG_MODEL_PATH": "meta-llama/Llama-3.1-70B-Instruct", "HF_TOKEN": "hf_0123456789abcdefghijklmn",
            "SM_SGLANG_TENSOR_PARALLEL_SIZE": "8", "SM_SGLANG_CONTEXT_LENGTH": "8192",
        },
        {"InferenceAmiVersion": _OLDER},
    ),
    "Llama-3-8B, SGLang": Public(  # a boto3 notebook with SGLang's image and a model on S3
        "sglang:0.5.10-gpu-py312-cu129-ubuntu24.04-sagemaker", "ml.g6e.2xlarge",
        {"SM_SGLANG_TP_SIZE": "1", "SM_SGLANG_CONTEXT_LENGTH": "4096", "SM_SGLANG_DTYPE": "float16"},
        {"InferenceAmiVersion": _OLDER}, _prefix("s3://by-hand/models/llama3-8b/"),
    ),
    "Gemma-4, SGLang": Public(  # a fine-tuning kit: serving_env() of its SGLang image
        "sglang:0.5.15-gpu-py312-cu130-ubuntu24.04-sagemaker", "ml.g6.2xlarge",
        {
            "SM_SGLANG_MODEL_PATH": "/opt/ml/model", "SM_SGLANG_TP_SIZE": "1", "SM_SGLANG_CONTEXT_LENGTH": "4096",
            "SM_SGLANG_MAX_RUNNING_REQUESTS": "32", "SM_SGLANG_MEM_FRACTION_STATIC": "0.90",
        },
        {"InferenceAmiVersion": _NEWEST}, _prefix("s3://by-hand/gemma-4/"),
    ),
    "Qwen3.6-27B, SGLang": Public(  # a blog's benchmark with EAGLE
        "sglang:0.5.10-gpu-py312-cu129-ubuntu24.04-sagemaker-v1.4", "ml.g7e.2xlarge",
        {
            "SM_SGLANG_MODEL_PATH": "Qwen/Qwen3.6-27B",
            "SM_SGLANG_MAMBA_SCHEDULER_STRATEGY": "extra_buffer", "SGLANG_ENABLE_SPEC_V2": "1",
        },
        _start(900),
    ),
    "llm_model_hub, SGLang": Public(  # aws-samples/llm_model_hub, endpoint_management.py
        "sglang:0.5.9-gpu-py312-cu129-ubuntu24.04-sagemaker", "ml.g5.12xlarge",
        {
            "SM_SGLANG_SERVED_MODEL_NAME": "Qwen/Qwen3-8B", "SM_SGLANG_TP_SIZE": "4",
            "SM_SGLANG_MEM_FRACTION_STATIC": "0.9", "HF_TOKEN": "hf_0123456789abcdefghijklmn",
            "SM_SGLANG_MODEL_PATH": "/opt/ml/model", "SM_SGLANG_TOOL_CALL_PARSER": "qwen25",
        },
        _start(900, InferenceAmiVersion=_OLDER), _prefix("s3://by-hand/finetuned_model_merged/"),
    ),
    "Qwen3.5, SGLang": Public(
        "sglang:0.5.9-gpu-py312-cu129-ubuntu24.04-sagemaker", "ml.p5en.48xlarge",
        {"SM_SGLANG_MODEL_PATH": "Qwen/Qwen3.5-397B-A17B-FP8"},
    ),
    "llama.cpp, AWS's test": Public(  # aws/deep-learning-containers, docs/llama-cpp and test/llama_cpp/sagemaker
        "llama-cpp:server-sagemaker-cpu-v1", "ml.c6i.2xlarge",
        {
            "SM_LLAMA_CPP_HF_REPO": "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
            "SM_LLAMA_CPP_HF_FILE": "qwen2.5-0.5b-instruct-q4_0.gguf", "SM_LLAMA_CPP_CTX_SIZE": "4096",
        },
        _start(600),
    ),
    "llama.cpp on a GPU, AWS's guide": Public(  # aws/deep-learning-containers, docs/llama-cpp/deployment/sagemaker.md
        "llama-cpp:server-sagemaker-cuda-v1", "ml.g6.2xlarge",
        {
            "SM_LLAMA_CPP_HF_REPO": "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
            "SM_LLAMA_CPP_HF_FILE": "qwen2.5-0.5b-instruct-q4_0.gguf", "SM_LLAMA_CPP_CTX_SIZE": "4096",
            "SM_LLAMA_CPP_N_GPU_LAYERS": "999",
        },
        _start(600, InferenceAmiVersion=_OLDER),
    ),
    "llama.cpp, archive": Public(  # a semantic router's standard deployment, by digest
        "llama-cpp@sha256:" + "a" * 64, "ml.c6i.2xlarge",
        {"SM_LLAMA_CPP_CTX_SIZE": "4096"},
        _start(900, ModelDataDownloadTimeoutInSeconds=900),
        {"ModelDataUrl": "s3://by-hand/llamacpp/model.tar.gz"},
    ),
    "Qwen3.5-4B, agent": Public(  # a router's deploy script
        "vllm:0.29.0-gpu-py312-cu130-ubuntu24.04-sagemaker", "ml.g6.2xlarge",
        {
            "SM_VLLM_MODEL": "Qwen/Qwen3.5-4B", "SM_VLLM_SERVED_MODEL_NAME": "Qwen/Qwen3.5-4B",
            "SM_VLLM_HOST": "0.0.0.0", "SM_VLLM_DTYPE": "bfloat16", "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
            "SM_VLLM_MAX_MODEL_LEN": "8192", "SM_VLLM_MAX_NUM_SEQS": "4", "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.89",
            "SM_VLLM_REASONING_PARSER": "qwen3", "SM_VLLM_TOOL_CALL_PARSER": "qwen3_coder", **_TOOLS,
        },
        _start(1800, InferenceAmiVersion=_NEWEST),
    ),
    "Research agent, vLLM 2": Public(  # a reinforcement-learning example's deploy_model.py
        "vllm:server-sagemaker-cuda-v2", "ml.g5.2xlarge",
        {
            "SM_VLLM_MODEL": "Qwen/Qwen3.6-27B", "SM_VLLM_TENSOR_PARALLEL_SIZE": "1", "SM_VLLM_MAX_MODEL_LEN": "4096",
            "SM_VLLM_ENABLE_LOG_REQUESTS": "true", "SM_VLLM_QUANTIZATION": "bitsandbytes", **_TOOLS,
        },
        {"InferenceAmiVersion": _OLDER},
    ),
    "Qwen3-ASR, JumpStart": Public(
        "vllm:server-sagemaker-cuda-v1", "ml.g6.2xlarge",
        {
            "HF_MODEL_ID": "/opt/ml/model", "SM_VLLM_MAX_MODEL_LEN": "32768", "SAGEMAKER_MODEL_SERVER_TIMEOUT": "3600",
        },
        container=_prefix("s3://by-hand/qwen3-asr/"),
    ),
    "Llama-3.1-70B, vLLM": Public(  # aws/deep-learning-containers, docs/vllm
        "vllm:server-sagemaker-cuda", "ml.p4d.24xlarge",
        {
            "SM_VLLM_MODEL": "meta-llama/Llama-3.1-70B-Instruct", "HF_TOKEN": "hf_0123456789abcdefghijklmn",
            "SM_VLLM_TENSOR_PARALLEL_SIZE": "8", "SM_VLLM_MAX_MODEL_LEN": "8192",
        },
        {"InferenceAmiVersion": _OLDER},
    ),
    "DeepSeek-V4": Public(
        "vllm:0.20.1-gpu-py312-cu130-ubuntu22.04-sagemaker", "ml.p5en.48xlarge",
        {
            "HF_TOKEN": "hf_0123456789abcdefghijklmn", "SM_NUM_GPUS": "8",
            "SM_VLLM_MODEL": "deepseek-ai/DeepSeek-V4-Flash",
            "SM_VLLM_TENSOR_PARALLEL_SIZE": "8", "SM_VLLM_MAX_MODEL_LEN": "65536", "SM_VLLM_TRUST_REMOTE_CODE": "true",
            "SM_VLLM_NO_ENABLE_FLASHINFER_AUTOTUNE": "true", "SM_VLLM_KV_CACHE_DTYPE": "fp8",
            "SM_VLLM_BLOCK_SIZE": "256", "SM_VLLM_TOKENIZER_MODE": "deepseek_v4",
            "SM_VLLM_TOOL_CALL_PARSER": "deepseek_v4", "SM_VLLM_REASONING_PARSER": "deepseek_v4",
            "SM_VLLM_SPECULATIVE_CONFIG": '{"method": "mtp", "num_speculative_tokens": 3}', **_TOOLS,
        },
        _start(3600, InferenceAmiVersion=_NEWEST),
    ),
    "GLM-5.2": Public(
        "vllm:0.23.0-gpu-py312-cu130-ubuntu22.04-sagemaker", "ml.p5en.48xlarge",
        {
            "SM_NUM_GPUS": "8", "SM_VLLM_MODEL": "zai-org/GLM-5.2-FP8", "SM_VLLM_TENSOR_PARALLEL_SIZE": "8",
            "SM_VLLM_MAX_MODEL_LEN": "65535", "SM_VLLM_KV_CACHE_DTYPE": "fp8", "SM_VLLM_TOOL_CALL_PARSER": "glm47",
            "SM_VLLM_REASONING_PARSER": "glm45", **_TOOLS,
        },
        _start(3600, InferenceAmiVersion=_NEWEST),
    ),
    "GLM-5.2-NVFP4, component": Public(
        "vllm:0.26.0-gpu-py312-cu130-ubuntu22.04-sagemaker", "ml.p6-b200.48xlarge",
        {
            "SM_NUM_GPUS": "8", "SM_VLLM_MODEL": "nvidia/GLM-5.2-NVFP4", "SM_VLLM_TENSOR_PARALLEL_SIZE": "8",
            "SM_VLLM_MAX_MODEL_LEN": "16384", "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.92",
            "SM_VLLM_TOOL_CALL_PARSER": "glm47", "SM_VLLM_REASONING_PARSER": "glm45", **_TOOLS,
        },
        {
            "ManagedInstanceScaling": {"Status": "ENABLED", "MinInstanceCount": 1, "MaxInstanceCount": 1},
            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        },
        components={"ic-glm": {**_gpus(8, 1_000_000), "NumberOfCpuCoresRequired": 100}},
    ),
    "Zephyr-7B": Public(
        TGI + "2.1.1-tgi1.4.2-gpu-py310-cu121-ubuntu22.04", "ml.g5.2xlarge",
        {
            "HF_MODEL_ID": "HuggingFaceH4/zephyr-7b-beta", "SM_NUM_GPUS": "1", "MAX_INPUT_LENGTH": "1024",
            "MAX_TOTAL_TOKENS": "2048",
        },
    ),
    "SmolLM3-3B": Public(
        LMI + "0.34.0-lmi16.0.0-cu128", "ml.g5.2xlarge",
        {
            "HF_MODEL_ID": "HuggingFaceTB/SmolLM3-3B", "OPTION_MAX_MODEL_LEN": "16384", "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true", "OPTION_TOOL_CALL_PARSER": "hermes",
        },
    ),
    "Kimi-K2.5, component": Public(
        LMI + "0.36.0-lmi20.0.0-cu128-v1.0", "ml.p5e.48xlarge",
        {
            **_ASYNC, "HF_MODEL_ID": "moonshotai/Kimi-K2.5", "OPTION_TENSOR_PARALLEL_DEGREE": "8",
            "OPTION_MAX_MODEL_LEN": "262000", "OPTION_TRUST_REMOTE_CODE": "true",
            "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true", "OPTION_TOOL_CALL_PARSER": "kimi_k2",
        },
        components={"ic-kimi": _gpus(8, 10240)},
    ),
    "Nemotron-3-Super": Public(
        LMI + "0.36.0-lmi22.0.0-cu129", "ml.p5.48xlarge",
        {
            "HF_MODEL_ID": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "SERVING_FAIL_FAST": "true",
            "OPTION_ASYNC_MODE": "true", "OPTION_TENSOR_PARALLEL_DEGREE": "8", "OPTION_MAX_MODEL_LEN": "16384",
            "OPTION_KV_CACHE_DTYPE": "fp8", "OPTION_TRUST_REMOTE_CODE": "true",
            "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true", "OPTION_TOOL_CALL_PARSER": "qwen3_coder",
            "OPTION_REASONING_PARSER": "deepseek_r1",
        },
        _start(3600, InferenceAmiVersion=_NEWEST),
    ),
    "QwQ-32B, component": Public(
        TGI + "2.4.0-tgi2.3.1-gpu-py311-cu124-ubuntu22.04", "ml.g5.12xlarge",
        {
            "HF_MODEL_ID": "Qwen/QwQ-32B", "ENDPOINT_SERVER_TIMEOUT": "3600", "MESSAGES_API_ENABLED": "true",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "1", "SM_NUM_GPUS": "4", "MAX_TOTAL_TOKENS": "8192",
            "MAX_INPUT_TOKENS": "4096", "HF_HUB_ENABLE_HF_TRANSFER": "1", "PORT": "8080",
        },
        _managed(3),
        components={"ic-qwen": {**_gpus(4, 1024), "NumberOfCpuCoresRequired": 1}},
    ),
    "Qwen3-30B-A3B, component": Public(
        LMI + "0.33.0-lmi15.0.0-cu128", "ml.g5.24xlarge",
        {
            **_ASYNC, "SAGEMAKER_MODEL_SERVER_WORKERS": "1", "MESSAGES_API_ENABLED": "true",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "8", "OPTION_MODEL_LOADING_TIMEOUT": "1500",
            "OPTION_ENABLE_STREAMING": "true",
        },
        _managed(3), _prefix("s3://by-hand/hf-large-models/model_qwen3/"),
        {"ic-qwen": {**_gpus(4, 1024), "NumberOfCpuCoresRequired": 1}},
    ),
    "Qwen3-30B-A3B-FP8": Public(
        LMI + "0.36.0-lmi26.0.0-cu130", "ml.g7e.2xlarge",
        {
            "HF_MODEL_ID": "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "HF_HOME": "/tmp/hf", "HF_HUB_CACHE": "/tmp/hf/hub",
            "HUGGINGFACE_HUB_CACHE": "/tmp/hf/hub", "TRANSFORMERS_CACHE": "/tmp/hf",
            "OPTION_TENSOR_PARALLEL_DEGREE": "max", "OPTION_DTYPE": "bf16", "OPTION_MAX_MODEL_LEN": "8192",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "64", "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS": "8192",
            "OPTION_GPU_MEMORY_UTILIZATION": "0.95", "OPTION_MODEL_LOADING_TIMEOUT": "900",
            "OPTION_PREDICT_TIMEOUT": "180", "OPTION_TRUST_REMOTE_CODE": "true", "OPTION_KV_CACHE_DTYPE": "fp8",
        },
    ),
    "Qwen3-VL-2B": Public(
        LMI + "0.34.0-lmi16.0.0-cu128-v1.2", "ml.g5.4xlarge",
        {
            "HF_MODEL_ID": "Qwen/Qwen3-VL-2B-Instruct", "HF_TASK": "image-text-to-text", "SM_NUM_GPUS": "1",
            "OPTION_TRUST_REMOTE_CODE": "true", "OPTION_MODEL_LOADING_TIMEOUT": "3600",
            "OPTION_ROLLING_BATCH": "disable", "OPTION_TENSOR_PARALLEL_DEGREE": "1", "OPTION_MAX_MODEL_LEN": "5000",
            "OPTION_ASYNC_MODE": "true", "SERVING_FAIL_FAST": "true",
        },
    ),
    "Qwen3.5-397B-FP8": Public(
        "vllm:0.17.1-gpu-py312-cu129-ubuntu22.04-sagemaker", "ml.p5en.48xlarge",
        {
            "HF_MODEL_ID": "Qwen/Qwen3.5-397B-A17B-FP8", "SM_VLLM_MODEL": "Qwen/Qwen3.5-397B-A17B-FP8",
            "SM_VLLM_TENSOR_PARALLEL_SIZE": "8", "SM_VLLM_MAX_MODEL_LEN": "32768",
            "SM_VLLM_TOOL_CALL_PARSER": "qwen3_coder", "SM_VLLM_REASONING_PARSER": "qwen3",
            "SM_VLLM_SPECULATIVE_CONFIG": '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', **_TOOLS,
        },
        _start(3600),
    ),
    "Qwen3.6-27B": Public(
        LMI + "0.36.0-lmi24.0.0-cu129", "ml.g6e.12xlarge",
        {
            "HF_MODEL_ID": "Qwen/Qwen3.6-27B", "SERVING_FAIL_FAST": "true", "OPTION_ASYNC_MODE": "true",
            "OPTION_TENSOR_PARALLEL_DEGREE": "4", "OPTION_MAX_MODEL_LEN": "32768",
            "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true", "OPTION_TOOL_CALL_PARSER": "qwen3_coder",
            "OPTION_REASONING_PARSER": "qwen3",
            "OPTION_SPECULATIVE_CONFIG": '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}',
        },
        _start(1800),
    ),
    "Falcon-40B, component": Public(
        LMI + "0.26.0-deepspeed0.12.6-cu121", "ml.g5.48xlarge",
        {
            "SERVING_LOAD_MODELS": "test::Python=/opt/ml/model", "OPTION_MODEL_ID": "tiiuae/falcon-40b",
            "OPTION_ROLLING_BATCH": "vllm", "OPTION_TENSOR_PARALLEL_DEGREE": "8",
        },
        _managed(1, 1), components={"ic-falcon": _gpus(8, 1024)},
    ),
    "Falcon-40B, TensorRT-LLM": Public(
        LMI + "0.26.0-tensorrtllm0.7.1-cu122", "ml.g5.48xlarge",
        {
            "SERVING_LOAD_MODELS": "test::MPI=/opt/ml/model", "OPTION_MODEL_ID": "tiiuae/falcon-40b",
            "OPTION_TENSOR_PARALLEL_DEGREE": "8", "OPTION_MAX_ROLLING_BATCH": "32", "OPTION_MAX_INPUT_LEN": "512",
            "OPTION_MAX_OUTPUT_LEN": "256",
        },
        _start(1800),
    ),
    "Falcon-7B": Public(
        TGI + "2.1.1-tgi1.4.0-gpu-py310-cu121-ubuntu20.04", "ml.g5.2xlarge",
        {
            "HF_MODEL_ID": "tiiuae/falcon-7b", "SM_NUM_GPUS": "1", "MAX_INPUT_LENGTH": "1024",
            "MAX_TOTAL_TOKENS": "2048",
        },
        _start(600),
    ),
    "Gemma-4-31B": Public(
        "vllm:0.19.1-gpu-py312-cu129-ubuntu22.04-sagemaker", "ml.g6e.12xlarge",
        {
            "VLLM_USE_V2_MODEL_RUNNER": "1", "SM_VLLM_MODEL": "google/gemma-4-31B-it",
            "SM_VLLM_TENSOR_PARALLEL_SIZE": "4", "SM_VLLM_MAX_MODEL_LEN": "32768",
            "SM_VLLM_TOOL_CALL_PARSER": "gemma4", "SM_VLLM_REASONING_PARSER": "gemma4", **_TOOLS,
        },
        _start(1800),
    ),
    "Vault-Gemma-1B": Public(
        LMI + "0.34.0-lmi16.0.0-cu128-v1.2", "ml.g5.4xlarge",
        {
            "HF_MODEL_ID": "google/vaultgemma-1b", "HF_TOKEN": "hf_0123456789abcdefghijklmn",
            "HF_TASK": "image-text-to-text", "SM_NUM_GPUS": "1", "OPTION_TRUST_REMOTE_CODE": "true",
            "OPTION_MODEL_LOADING_TIMEOUT": "3600", "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_TENSOR_PARALLEL_DEGREE": "1", "OPTION_MAX_MODEL_LEN": "5000", "OPTION_ASYNC_MODE": "true",
            "SERVING_FAIL_FAST": "true",
        },
    ),
    "EmbeddingGemma": Public(
        "vllm:0.11.2-gpu-py312-cu129-ubuntu22.04-sagemaker", "ml.g5.xlarge",
        {
            "HF_MODEL_ID": "google/embeddinggemma-300m", "HF_TOKEN": "hf_0123456789abcdefghijklmn",
            "SM_VLLM_RUNNER": "pooling", "SM_VLLM_MAX_MODEL_LEN": "2048", "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.85",
            "SM_VLLM_DTYPE": "bfloat16",
        },
        _start(600, InferenceAmiVersion="al2-ami-sagemaker-inference-gpu-3-1"),
    ),
    "Llama-2-7B": Public(
        LMI + "0.26.0-deepspeed0.12.6-cu121", "ml.g5.2xlarge",
        {
            "SERVING_LOAD_MODELS": "test::Python=/opt/ml/model", "OPTION_MODEL_ID": "TheBloke/Llama-2-7B-Chat-fp16",
            "OPTION_TRUST_REMOTE_CODE": "true", "OPTION_TENSOR_PARALLEL_DEGREE": "max", "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "32", "OPTION_DTYPE": "fp16",
        },
        _start(2400, RoutingConfig={"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}),
    ),
    "Llama-2-7B, TensorRT-LLM": Public(
        LMI + "0.26.0-tensorrtllm0.7.1-cu122", "ml.g5.2xlarge",
        {
            "SERVING_LOAD_MODELS": "test::MPI=/opt/ml/model", "OPTION_MODEL_ID": "TheBloke/Llama-2-7b-fp16",
            "OPTION_TENSOR_PARALLEL_DEGREE": "max", "OPTION_ROLLING_BATCH": "trtllm",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "64",
        },
        _start(2400, RoutingConfig={"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}),
    ),
    "Phi-3-mini": Public(
        LMI + "0.32.0-lmi14.0.0-cu126", "ml.g5.2xlarge",
        {
            "HF_MODEL_ID": "microsoft/Phi-3-mini-4k-instruct", "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "8", "OPTION_TENSOR_PARALLEL_DEGREE": "1", "OPTION_MAX_MODEL_LEN": "4096",
            "OPTION_MAX_INPUT_LEN": "3072", "OPTION_DTYPE": "fp16", "OPTION_GPU_MEMORY_UTILIZATION": "0.9",
        },
        _start(600, ModelDataDownloadTimeoutInSeconds=900),
    ),
    "DeepSeek-R1-0528": Public(
        LMI + "0.33.0-lmi15.0.0-cu128", "ml.p5en.48xlarge",
        {
            **_ASYNC, "HF_MODEL_ID": "deepseek-ai/DeepSeek-R1-0528", "OPTION_TRUST_REMOTE_CODE": "True",
            "OPTION_GPU_MEMORY_UTILIZATION": "0.87", "OPTION_MAX_ROLLING_BATCH_SIZE": "16",
            "OPTION_MAX_MODEL_LEN": "32768", "OPTION_TENSOR_PARALLEL_DEGREE": "max",
        },
        _start(3600),
    ),
    "DeepSeek-R1-Distill, TensorRT-LLM": Public(
        LMI + "0.30.0-tensorrtllm0.12.0-cu125", "ml.p4d.24xlarge",
        {
            "HF_MODEL_ID": "s3://by-hand/deepseek-r1-distill", "OPTION_ROLLING_BATCH": "trtllm",
            "OPTION_MAX_INPUT_LEN": "4096", "OPTION_MAX_OUTPUT_LEN": "4096", "OPTION_MAX_ROLLING_BATCH_SIZE": "16",
            "OPTION_TENSOR_PARALLEL_DEGREE": "8",
        },
        _start(3600),
    ),
    "DeepSeek-R1-Distill-8B": Public(
        LMI + "0.31.0-lmi13.0.0-cu124", "ml.g5.2xlarge",
        {
            "HF_MODEL_ID": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "OPTION_MAX_MODEL_LEN": "10000",
            "OPTION_GPU_MEMORY_UTILIZATION": "0.95", "OPTION_ENABLE_STREAMING": "false",
            "OPTION_ROLLING_BATCH": "auto", "OPTION_MODEL_LOADING_TIMEOUT": "3600", "OPTION_PAGED_ATTENTION": "false",
            "OPTION_DTYPE": "fp16",
        },
    ),
    "DeepSeek-R1-Distill-8B, TGI": Public(
        TGI + "2.4.0-tgi2.3.1-gpu-py311-cu124-ubuntu22.04", "ml.g5.2xlarge",
        {
            "HF_MODEL_ID": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "ENDPOINT_SERVER_TIMEOUT": "3600",
            "MESSAGES_API_ENABLED": "true", "OPTION_ENTRYPOINT": "inference.py", "SAGEMAKER_ENV": "1",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "1", "SAGEMAKER_PROGRAM": "inference.py", "SM_NUM_GPUS": "1",
            "MAX_TOTAL_TOKENS": "8192", "MAX_INPUT_TOKENS": "7168", "MAX_BATCH_PREFILL_TOKENS": "7168",
            "DTYPE": "bfloat16",
        },
    ),
    "Llama-3.1-8B, benchmark": Public(
        LMI + "0.32.0-lmi14.0.0-cu124", "ml.g6e.2xlarge",
        {
            "HF_MODEL_ID": "meta-llama/Llama-3.1-8B-Instruct", "HF_TOKEN": "hf_0123456789abcdefghijklmn",
            "OPTION_TRUST_REMOTE_CODE": "true", "SERVING_ENGINE": "Python", "OPTION_TENSOR_PARALLEL_DEGREE": "1",
            "OPTION_MAX_ROLLING_BATCH_SIZE": "64", "OPTION_ROLLING_BATCH": "vllm",
            "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS": "16384", "OPTION_MAX_MODEL_LEN": "16384",
            "OPTION_ENABLE_PREFIX_CACHING": "False",
        },
    ),
    "Llama-3.3-70B-FP8": Public(
        "vllm:0.19.0-gpu-py312-cu129-ubuntu22.04-sagemaker", "ml.g7e.12xlarge",
        {
            "HF_MODEL_ID": "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "SM_VLLM_TENSOR_PARALLEL_SIZE": "2",
            "SM_VLLM_MAX_MODEL_LEN": "8192", "SM_VLLM_GPU_MEMORY_UTILIZATION": "0.90",
        },
        _start(3600),
    ),
    "Llama-4-Scout": Public(
        TGI + "2.6.0-tgi3.2.3-gpu-py311-cu124-ubuntu22.04-v2.0", "ml.p4d.24xlarge",
        {
            "HF_MODEL_ID": "meta-llama/Llama-4-Scout-17B-16E-Instruct", "SM_NUM_GPUS": "8", "MAX_INPUT_LENGTH": "4096",
            "MAX_TOTAL_TOKENS": "8192",
        },
        _start(1800),
    ),
    "gpt-oss": Public(
        LMI + "0.0.0.dev1-lmi0.0.0-cu128", "ml.p5en.48xlarge",
        {"OPTION_MODEL_ID": "/opt/ml/model", "OPTION_TENSOR_PARALLEL_SIZE": "8"},
        _start(600), _prefix("s3://by-hand/gpt-oss-120b/"),
    ),
    "Llama-3.1-8B, LoRA": Public(
        LMI + "0.32.0-lmi14.0.0-cu124", "ml.g5.2xlarge",
        {
            "HF_MODEL_ID": "/opt/ml/model", "OPTION_ROLLING_BATCH": "lmi-dist", "OPTION_MAX_ROLLING_BATCH_SIZE": "16",
            "OPTION_TENSOR_PARALLEL_DEGREE": "max", "OPTION_ENABLE_LORA": "true", "OPTION_MAX_LORAS": "1",
            "OPTION_MAX_CPU_LORAS": "2", "OPTION_DTYPE": "fp16", "OPTION_MAX_MODEL_LEN": "6000",
        },
        _start(900), _prefix("s3://by-hand/llama-3-1-8b/"),
    ),
    "Gemma-3-27B, archive": Public(
        LMI + "0.33.0-lmi15.0.0-cu128", "ml.g5.24xlarge",
        {"HF_TASK": "Image-Text-to-Text", "OPTION_LIMIT_MM_PER_PROMPT": "image=2"},
        container={"ModelDataUrl": "s3://by-hand/gemma-3/mymodel.tar.gz"},
    ),
    "Qwen3-4B-Thinking": Public(
        LMI + "0.34.0-lmi16.0.0-cu128", "ml.g5.2xlarge",
        {
            **_ASYNC, "HF_MODEL_ID": "Qwen/Qwen3-4B-Thinking-2507", "OPTION_MAX_MODEL_LEN": "16384",
            "OPTION_TENSOR_PARALLEL_DEGREE": "max", "OPTION_TRUST_REMOTE_CODE": "true",
        },
        _start(600),
        config={
            "AsyncInferenceConfig": {
                "OutputConfig": {"S3OutputPath": "s3://by-hand/answers/"},
                "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 4},
            }
        },
    ),
}  # fmt: skip
"""By what docs/adopt.md calls them."""

GRAVITON = PUBLIC["llama.cpp, AWS's test"].but(image="llama-cpp-arm64:server-sagemaker-cpu-v1", type="ml.c7g.2xlarge")
"""AWS's test of llama.cpp on an instance for which our image must be built."""

OTHERS: dict[str, tuple[Public, str]] = {
    "OWLv2": (
        Public(
            "huggingface-pytorch-inference:2.6.0-transformers4.49.0-cpu-py312-ubuntu22.04", "ml.m5.xlarge",
            {"HF_MODEL_ID": "google/owlv2-base-patch16", "HF_TASK": "zero-shot-object-detection"},
        ),
        "cannot be replaced by lmi deploy",
    ),
    "DeepSeek-R1-Distill-8B, Inferentia": (
        Public(
            LMI + "0.30.0-neuronx-sdk2.20.1", "ml.inf2.24xlarge",
            {"HF_MODEL_ID": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"},
        ),
        "is for AWS Neuron",
    ),
}  # fmt: skip
"""Endpoints of the same places that are refused, and with which words."""
