"""Public sources of the rules."""

from __future__ import annotations

from proof.conform.rule import Source

_AWS = "https://docs.aws.amazon.com/sagemaker/latest"
_DJL = "https://docs.djl.ai/master/docs/serving/serving/docs/lmi"
_DJL_CODE = "https://github.com/deepjavalibrary/djl-serving/blob/v0.36.0/engines/python/setup/djl_python"
_TGI = "https://github.com/huggingface/text-generation-inference/blob/main"
_TRITON = "https://github.com/triton-inference-server/server/blob/main/docs"

CONTAINER = Source("SageMaker: custom inference code with hosting", f"{_AWS}/dg/your-algorithms-inference-code.html")
FAQ = Source("SageMaker: hosting FAQ", f"{_AWS}/dg/hosting-faqs.html")
INVOKE = Source("SageMaker: InvokeEndpoint", f"{_AWS}/APIReference/API_runtime_InvokeEndpoint.html")
STREAM = Source(
    "SageMaker: InvokeEndpointWithResponseStream",
    f"{_AWS}/APIReference/API_runtime_InvokeEndpointWithResponseStream.html",
)
OPENAI_ROUTE = Source("SageMaker: OpenAI-compatible endpoints", f"{_AWS}/dg/realtime-endpoints-openai-compatible.html")
METRICS = Source("SageMaker: MetricsConfig", f"{_AWS}/APIReference/API_MetricsConfig.html")
SESSIONS = Source("SageMaker: stateful sessions", f"{_AWS}/dg/stateful-sessions.html")
ADAPTERS = Source("SageMaker: adapter inference components", f"{_AWS}/dg/realtime-endpoints-adapt.html")
STANDARDS = Source("AWS: model hosting container standards", "https://github.com/aws/model-hosting-container-standards")

LMI_SCHEMA = Source("LMI: inference API schema", f"{_DJL}/user_guides/lmi_input_output_schema.html")
LMI_CHAT = Source("LMI: chat completions schema", f"{_DJL}/user_guides/chat_input_output_schema.html")
LMI_ASYNC = Source("LMI: async handler", f"{_DJL_CODE}/lmi_vllm/request_response_utils.py")
LMI_SERVICE = Source("LMI: async service", f"{_DJL_CODE}/lmi_vllm/vllm_async_service.py")
DJL_HTTP = Source(
    "DJL Serving: inference API", "https://docs.djl.ai/master/docs/serving/serving/docs/inference_api.html"
)

TGI = Source("TGI: API", "https://huggingface.co/docs/text-generation-inference/reference/api_reference")
TGI_ROUTER = Source("TGI: router", f"{_TGI}/router/src/server.rs")
TGI_SAGEMAKER = Source("TGI: SageMaker's route", f"{_TGI}/router/src/sagemaker.rs")
TGI_TYPES = Source("TGI: types", f"{_TGI}/router/src/lib.rs")
TGI_METRICS = Source("TGI: metrics", "https://huggingface.co/docs/text-generation-inference/reference/metrics")

OPENAI_CHAT = Source("OpenAI: chat completions", "https://platform.openai.com/docs/api-reference/chat")
OPENAI_STREAM = Source("OpenAI: chat streaming", "https://platform.openai.com/docs/api-reference/chat-streaming")
OPENAI_COMPLETIONS = Source("OpenAI: completions", "https://platform.openai.com/docs/api-reference/completions")
OPENAI_MODELS = Source("OpenAI: models", "https://platform.openai.com/docs/api-reference/models")
OPENAI_ERRORS = Source("OpenAI: error codes", "https://platform.openai.com/docs/guides/error-codes")

ANTHROPIC = Source("Anthropic: messages", "https://docs.anthropic.com/en/api/messages")
ANTHROPIC_STREAM = Source("Anthropic: streaming", "https://docs.anthropic.com/en/docs/build-with-claude/streaming")
ANTHROPIC_ERRORS = Source("Anthropic: errors", "https://docs.anthropic.com/en/api/errors")
ANTHROPIC_COUNT = Source("Anthropic: count tokens", "https://docs.anthropic.com/en/api/messages-count-tokens")

TRITON = Source("Triton: generate extension", f"{_TRITON}/protocol/extension_generate.md")
BINARY = Source("Triton: binary data extension", f"{_TRITON}/protocol/extension_binary_data.md")
KSERVE = Source(
    "KServe: open inference protocol",
    "https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md",
)

SYSTEMONE = Source(
    "TypeSafe: System One, as in typesafe-sdk 0.7.5 and vLLM 0.33",
    "https://github.com/vllm-project/vllm/tree/main/vllm/entrypoints/generate/structured_decisions",
)
CONFIDENCE = Source(
    "llama.cpp: server-decision.cpp, TypeSafe's formulas",
    "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/server-decision.cpp",
)
OPENAI_DECISIONS = Source(
    "OpenAI: openai-python, types/decision_create_params.py",
    "https://github.com/openai/openai-python/blob/main/src/openai/types/decision_create_params.py",
)

BIDIRECTIONAL = Source(
    "SageMaker: custom inference code, bidirectional streaming",
    f"{_AWS}/dg/your-algorithms-inference-code.html#your-algorithms-inference-algo-bidi",
)
OPENAI_WEBSOCKET = Source("OpenAI: WebSocket mode", "https://developers.openai.com/api/docs/guides/websocket-mode")
OPENAI_REALTIME = Source("OpenAI: realtime", "https://platform.openai.com/docs/api-reference/realtime")
WEBSOCKET = Source("RFC 6455: WebSocket", "https://www.rfc-editor.org/rfc/rfc6455")

OURS = Source("this project: no standard requires this behaviour, but clients need it", "")
HTTP_1_1 = Source("RFC 9112: HTTP/1.1", "https://www.rfc-editor.org/rfc/rfc9112")
JSON = Source("RFC 8259: JSON", "https://www.rfc-editor.org/rfc/rfc8259")
SSE = Source("WHATWG: server-sent events", "https://html.spec.whatwg.org/multipage/server-sent-events.html")
