"""Ten tutorial notebooks that deploy a model to SageMaker, and what changes in each to use this image."""

from __future__ import annotations

from typing import Any, NamedTuple

_ASYNC_MODE = {
    "OPTION_ASYNC_MODE": "true",
    "OPTION_ROLLING_BATCH": "disable",
    "OPTION_ENTRYPOINT": "djl_python.lmi_vllm.vllm_async_service",
    "OPTION_TENSOR_PARALLEL_DEGREE": "max",
}
_CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4}
_TEXT = {"inputs": "a b c", "parameters": {"max_new_tokens": 2}}


class Tutorial(NamedTuple):
    """One notebook, with this image.

    Attributes:
        change: what to change in it besides the image; empty where there is nothing, and
        note: what to know then; in Markdown.
        environment: the container's variables then.
        asked: the body of a request then,
        place: where the notebook reads the answer, and
        answer: what the engine echo says there.
        headers: of the request.
        kind: of the endpoint: real-time, async, component, or batch.
    """

    change: str
    note: str
    environment: dict[str, str]
    asked: dict[str, Any]
    place: tuple[str | int, ...]
    answer: str
    headers: dict[str, str] = {}  # noqa: RUF012
    kind: str = "real-time"


TUTORIALS = {
    "huggingface/notebooks": {
        "27_deploy_large_language_models": Tutorial(
            "add `OPTION_TGI_COMPAT=true`",
            "The text does not begin with the prompt: delete `[len(prompt):]` from the Gradio cell.",
            {
                "HF_MODEL_ID": "OpenAssistant/pythia-12b-sft-v8-7k-steps", "SM_NUM_GPUS": "4",
                "MAX_INPUT_LENGTH": "1024", "MAX_TOTAL_TOKENS": "2048", "OPTION_TGI_COMPAT": "true",
            },
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2, "do_sample": True, "stop": ["<|endoftext|>"]}},
            (0, "generated_text"), " a b",
        ),
        "31_deploy_embedding_models": Tutorial(
            'add `OPTION_TASK=text-embedding`; send `{"inputs": [text]}`',
            "A list of texts gets a list of embeddings; one text gets its embedding alone.",
            {"HF_MODEL_ID": "Snowflake/snowflake-arctic-embed-m", "OPTION_TASK": "text-embedding"},
            {"inputs": ["a text"]},
            (0, 7), "0.1145",
        ),
        "12_batch_transform_inference": Tutorial(
            "`image_uri` replaces the three versions",
            "Responses contain every label, the most probable first. Other fields of a record are ignored.",
            {"HF_MODEL_ID": "cardiffnlp/twitter-roberta-base-sentiment", "HF_TASK": "text-classification"},
            {"inputs": "a text", "id": 1},
            (0, "label"), "LABEL_1", kind="batch",
        ),
    },
    "aws/amazon-sagemaker-examples": {
        "sagemaker-core-llama-3-8B": Tutorial(
            "use the image `trtllm`; `OPTION_GPU_MEMORY_UTILIZATION` becomes `OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION`; "
            "send `max_new_tokens` and `temperature` in `parameters`",
            "Next to `inputs`, both are ignored, and the header `x-lmi-ignored-parameters` lists them.",
            {
                "HF_MODEL_ID": "meta-llama/Meta-Llama-3-8B", "HF_TOKEN": "hf_x",
                "OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION": "0.85",
            },
            {"inputs": ["a b c"], "parameters": {"max_new_tokens": 2, "temperature": 0.0}},
            ("generated_text",), " a b",
        ),
    },
    "deepjavalibrary/djl-demo": {
        "pysdk_template_with_LMI_solution": Tutorial(
            "",
            "",
            {
                "HF_MODEL_ID": "TheBloke/Llama-2-7B-Chat-fp16", "TENSOR_PARALLEL_DEGREE": "max",
                "OPTION_ROLLING_BATCH": "vllm",
            },
            _TEXT, ("generated_text",), " a b",
        ),
        "multi_lora_adapter_inference": Tutorial(
            "",
            "",
            {
                "OPTION_MODEL_ID": "huggyllama/llama-7b", "OPTION_ROLLING_BATCH": "lmi-dist",
                "OPTION_TENSOR_PARALLEL_DEGREE": "max", "OPTION_ENABLE_LORA": "true", "OPTION_MAX_LORAS": "10",
            },
            {**_TEXT, "adapters": "eng_alpaca"}, ("generated_text",), " b c",
        ),
        "stateful_inference_llama3_8b": Tutorial(
            "",
            "",
            {
                "HF_MODEL_ID": "unsloth/llama-3-8b-Instruct", **_ASYNC_MODE, "OPTION_MAX_ROLLING_BATCH_SIZE": "32",
                "OPTION_SESSIONS_EXPIRATION": "3600",
            },
            {"requestType": "NEW_SESSION"}, ("result",), "Session ",
            {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"},
        ),
        "lmi-async-inference-demo": Tutorial(
            "",
            "",
            {"HF_MODEL_ID": "meta-llama/Llama-3.1-8B-Instruct", "HF_TOKEN": "hf_x"},
            _CHAT, ("choices", 0, "message", "content"), " user: a b", kind="async",
        ),
    },
    "aws-samples/sagemaker-genai-hosting-examples": {
        "Gemma-3-4B-instruct-TGI": Tutorial(
            "add `OPTION_ALLOWED_MEDIA_DOMAINS=huggingface.co`",
            "Images are fetched only from the hosts in this option.",
            {
                "HF_MODEL_ID": "google/gemma-3-4b-it", "SM_NUM_GPUS": "1", "ENDPOINT_SERVER_TIMEOUT": "1200",
                "HUGGING_FACE_HUB_TOKEN": "hf_x", "PREFIX_CACHING": "0", "USE_PREFIX_CACHING": "0",
                "OPTION_ALLOWED_MEDIA_DOMAINS": "huggingface.co",
            },
            _CHAT, ("choices", 0, "message", "content"), " user: a b",
        ),
        "lmi-v16-intro": Tutorial(
            "",
            "",
            {
                "HF_MODEL_ID": "Qwen/Qwen3-1.7B", "HF_TOKEN": "hf_x", "SERVING_FAIL_FAST": "true", **_ASYNC_MODE,
                "OPTION_TRUST_REMOTE_CODE": "true",
            },
            _TEXT, ("generated_text",), " a b", kind="component",
        ),
    },
}  # fmt: skip
"""By repository and name."""
