"""Options of all engines: the fields of `Options`, and what their values may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from handler.config.engines import LLM_ENGINES
from handler.config.lmi_version import OLDEST, LmiVersion, read_lmi_version
from handler.config.options.option import (
    boolean,
    hosts,
    integer,
    json_object,
    names,
    number,
    number_or_auto,
    one_of,
    option,
    parallel_degree,
    path,
    precision,
    string,
)

ROLLING_BATCHES = ("auto", "disable", "trtllm", "vllm", "lmi-dist", "scheduler")

REASONING_PARSERS = (
    "auto", "none", "hf", "deepseek_r1", "deepseek_v3", "qwen3", "glm45", "glm47", "minimax_m2",
    "minimax_m2_append_think", "kimi_k2",
    "mistral", "gemma4", "openai_gptoss", "granite", "nemotron_v3", "seed_oss", "deepseek_v4", "muse_glimmer",
    *("kimi_k3", "minimax_m3", "deepseek_v41", "hy_v3", "hunyuan_a13b", "cohere_command3", "olmo3", "ernie45"),
    *("k2_horizon", "inkling"),
    *("granite_thinking_parser", "holo2", "ling3", "mimo", "poolside_v1", "step3p5", "step5", "step3", "hy_v4"),
    "cohere_command4",
)  # fmt: skip

TOOL_CALL_PARSERS = (
    *("auto", "none", "hf", "hermes", "smollm2", "llama3_json", "pythonic", "llama4_pythonic", "mistral"),
    *("qwen3_coder", "qwen3_xml"),
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2", "glm45", "glm47", "minimax_m2", "openai", "gemma4"),
    *("granite", "granite4", "phi4_mini_json", "seed_oss", "deepseek_v4", "mimo"),
    *("kimi_k3", "minimax_m3", "deepseek_v41", "hy_v3", "hy_v4", "jamba", "cohere_command3", "cohere_command4", "lfm2"),
    *("olmo3", "functiongemma", "gigachat3", "apertus", "xlam", "internlm", "granite-20b-fc", "step3", "nemotron_json"),
    *("longcat", "dots", "k2_horizon", "minicpm5", "inkling", "muse_glimmer"),
    *("llama4_json", "qwen3_json", "step3p5", "step5", "poolside_v1", "ling3", "ernie45", "hunyuan_a13b"),
)

VLLM_REASONING_PARSERS = ("beam", "minicpmv", "muse", "musespark1x", "plamo3")
"""Names of vLLM 0.33 for reasoning that is not known here."""

VLLM_TOOL_CALL_PARSERS = ("beam", "muse", "musespark1x", "plamo3")
"""Names of vLLM 0.33 for tool calls of forms that are not known here."""


def _parser(known: Collection[str], vllm: Collection[str], remedy: str) -> Callable[[str], str]:
    """Read the name of a parser; say of vLLM's others what to do instead."""

    def parse(text: str) -> str:
        if text in vllm:
            raise ValueError(f"is a format of vLLM's that is not supported here: {remedy}")
        return one_of(*known)(text)

    return parse


_NO_TOOLS = "leave the option out, and send tools with tool_choice 'required' or a tool's name, or set option.tool_parser_plugin"
_NO_REASONING = "leave the option out for auto; with none the model's reasoning stays in the text"


STAND_IN = "echo"
"""The engine that tries a configuration of any other: what is theirs has no effect with it."""

BY_ROLLING_BATCH = {"trtllm": "trtllm", "vllm": "vllm", "lmi-dist": "vllm"}
"""Values of option.rolling_batch that name an engine; LMI itself serves lmi-dist by vLLM."""


def engine_name(llm_engine: str, rolling_batch: str) -> str:
    """Name the engine of the two options; "" where they contradict each other."""
    by_batch = BY_ROLLING_BATCH.get(rolling_batch)
    if llm_engine == STAND_IN:
        return llm_engine
    if llm_engine == "auto":
        return by_batch or "openvino"  # it reads every kind of model
    return llm_engine if by_batch in (None, llm_engine) else ""


def _rolling_batch(text: str) -> str:
    value = one_of(*ROLLING_BATCHES)(text)
    return "auto" if value == "scheduler" else value


def _streaming(text: str) -> bool:
    """Parse a boolean; LMI's `huggingface` streams too."""
    return text.lower() == "huggingface" or boolean(text)


def _switch(text: str) -> bool:
    """Parse a boolean; AWS's images also take 1."""
    return text == "1" or boolean(text)


TASKS = {
    "auto": ("text_embedding", "text2text-generation", "image-text-to-text", "visual-question-answering", "any-to-any"),
    "text-generation": ("generate", "conversational"),
    "text-embedding": ("feature-extraction", "embed", "embedding", "sentence-similarity"),
    "text-classification": ("classify",),
    "rerank": ("score", "text-ranking"),
    "automatic-speech-recognition": ("transcription",),
    "pooling": (),
}
"""Tasks with the other names that LMI, vLLM and Hugging Face give them; for those of auto, LMI asks the model."""


def _task(text: str) -> str:
    one_of(*(name for own, others in TASKS.items() for name in (own, *others)))(text)
    return next((own for own, others in TASKS.items() if text in others), text)


def _pooling(text: str) -> str:
    one_of("auto", "cls", "last", "lasttoken", "mean", "max")(text)
    return "last" if text == "lasttoken" else text


@dataclass(frozen=True)
class Options:
    """Options of all engines, a line each: name, type, parser, default, meaning, other names."""

    # fmt: off
    # what is served
    model_id: str | None = option(path, None, "a .gguf file, a model directory, a name on the Hugging Face hub (owner/model; openvino: also owner/model/file.gguf), a prefix on S3 (s3://bucket/prefix/), or `demo`; with openai a directory or name with the tokenizer and config of the server's model", "option.model")
    model_name: str = option(string, "model", "the name in /predictions/{name} and /models", "option.modelName")
    served_model_name: tuple[str, ...] | None = option(names, None, "comma-separated model names for OpenAI's clients, the first one in answers (on SageMaker the endpoint's name, which a container cannot know); * for any")
    llm_engine: str = option(one_of(*LLM_ENGINES), "auto", "the engine; auto: the one that option.rolling_batch names, else openvino")
    rolling_batch: str = option(_rolling_batch, "auto", "LMI's switch: disable is dynamic batching; trtllm, vllm and lmi-dist (vLLM) choose the engine; scheduler means auto, and DJL Serving does not change it")
    async_mode: bool | None = option(boolean, None, "/invocations has the schema of LMI's async mode (wire/async.md), which option.lmi_version 0.33 and later have; by default with LMI's async handlers in option.entryPoint, and from 0.35 on unless option.rolling_batch or batch_size choose another mode; under DJL Serving as Java runs the worker")
    task: str = option(_task, "auto", "what the model computes (embeddings.md): text-generation, text-embedding (or feature-extraction), text-classification (or classify) or rerank (or score), or pooling, which is one of the last three; or automatic-speech-recognition (or transcription; audio.md); auto: by its configuration", "option.runner", "option.convert")
    normalize: bool = option(boolean, True, "embeddings have length 1 unless a request says otherwise", "normalize")
    pooling: str = option(_pooling, "auto", "how the vectors of a text's tokens become its embedding: cls (the first), last (or lasttoken), mean or max (vllm has no max); auto: as the model's files say", "pooling")
    dtype: str = option(precision, "auto", "precision of the computation; auto is the engine's choice (CPU: bf16 if available)", "option.data_type")
    tensor_parallel_degree: str = option(parallel_degree, "1", "number of devices for a model, or max; CPU engines have one", "option.tensor_parallel_size")
    replicas: str = option(number_or_auto, "1", "engines side by side, each a process with its own devices or its share of the cores, behind one queue (scaling.md); auto: as many as the devices allow; option.max_rolling_batch_size and option.kv_cache_gib are each one's")
    lmi_version: LmiVersion = option(read_lmi_version, OLDEST, "the release of LMI whose schema and defaults are served (migrating/README.md); by default that of the DJL Serving that runs the handler, 0.36 with option.async_mode, LMI's async handlers or the variables of AWS's vLLM image, else 0.28")
    # how answers look
    output_formatter: str | None = option(string, None, "framing of answers to prompts (chats stream by their own stream alone): json, jsonlines or sse, by default json, or jsonlines (tgi_compat: sse) for streams; or the name of a model.py's output formatter (formatters.md), by default its only one")
    input_formatter: str | None = option(string, None, "the name of a model.py's input formatter (formatters.md), by default its only one")
    tgi_compat: bool = option(boolean, False, "answers in TGI's format")
    openai_compat: bool = option(boolean, False, "chats on /invocations are answered as on /v1/chat/completions; the variables of AWS's vLLM image and TGI's MESSAGES_API_ENABLED set it")
    root_schema: str = option(one_of("tgi", "mindie"), "tgi", "the embedded server's route /: TGI's, or MindIE's text and stream inference")
    enable_streaming: bool = option(_streaming, False, "dynamic batching only: answers as {\"outputs\": [...]} lines")
    enable_force_include_usage: bool = option(_switch, False, "every streamed chat and completion ends with its token counts, as with stream_options.include_usage")
    enable_tokenizer_info_endpoint: bool = option(_switch, False, "the embedded server has vLLM's /tokenizer_info, which shows the model's tokenizer_config.json and chat template")
    batch_transform: bool = option(boolean, False, "the embedded server answers /invocations as SageMaker's batch transform needs it (local.md): a line a request, also a refusal, with status 200; SageMaker's SAGEMAKER_BATCH sets it")
    tool_call_parser: str = option(_parser(TOOL_CALL_PARSERS, VLLM_TOOL_CALL_PARSERS, _NO_TOOLS), "auto", "format of the model's tool calls; auto: by its response template, else by its chat template; hf: by its response template; none: calls stay in the text")
    tool_parser_plugin: str | None = option(string, None, "a Python file with your own parser of tool calls (models.md), relative to serving.properties or the working directory")
    reasoning_parser: str | None = option(_parser(REASONING_PARSERS, VLLM_REASONING_PARSERS, _NO_REASONING), None, "family of the model's reasoning, which chats show apart from the text (documents: wire/reasoning); auto: by its response template, else by its chat template; hf: by its response template; none: it stays in the text; by default as auto")
    trim_answers: bool = option(boolean, False, "text and reasoning in the answers to chats, messages and responses have no white space at their beginning and end")
    chat_template: str | None = option(string, None, "a chat template in place of the model's own: its text, or a file (relative to serving.properties or the working directory)")
    default_chat_template_kwargs: Mapping[str, Any] | None = option(json_object, None, "arguments of the chat template for requests that do not set them: {\"enable_thinking\": false}")
    generation_config: str = option(string, "auto", "defaults for sampling parameters that clients leave out; auto: those of the model's generation_config.json; vllm: none; or the directory of another generation_config.json, relative to serving.properties or the working directory")
    override_generation_config: Mapping[str, Any] | None = option(json_object, None, "values in place of generation_config.json's: {\"temperature\": 0.6, \"eos_token_id\": 3}; null removes one; its max_new_tokens limits every answer")
    install_requirements: bool = option(boolean, True, "install what requirements.txt in the model directory names, at each start, as LMI does (formatters.md); under DJL Serving, outside our images, its Java side does so whatever this option says")
    unknown_parameters: str = option(one_of("report", "refuse"), "report", "unknown parameters: report them in x-lmi-ignored-parameters, or refuse the request")
    # sessions
    enable_stateful_sessions: bool | None = option(_switch, None, "stateful sessions (sessions.md); by default on in the schema of LMI's async mode, else off, as in LMI's and AWS's images")
    sessions_expiration: int = option(integer(1, 10**9), 1200, "lifetime of a session, in seconds")
    sessions_max: int = option(integer(1, 10**6), 10000, "sessions open at once; one more gets 503")
    sessions_path: str | None = option(path, None, "directory of the sessions' directories; by default /dev/shm/sagemaker_sessions, in memory")
    # stored responses (wire/responses.md)
    responses_store: str = option(path, "off", "where responses, and threads of Anthropic's, are stored for later requests: off, memory, or a directory, whose file survives a restart (wire/responses.md); each instance, and in memory each worker of DJL Serving, has its own")
    responses_expiration: int = option(integer(1, 10**9), 86400, "seconds that a stored response lives after its creation or last continuation")
    responses_max: int = option(integer(1, 10**5), 10000, "stored responses; beyond, the least recently used are dropped")
    responses_max_bytes: int = option(integer(1 << 20, 1 << 40), 1 << 28, "bytes of all stored responses; beyond, the least recently used are dropped, and a longer request is refused")
    # images (images.md)
    allowed_media_domains: tuple[str, ...] | None = option(hosts, None, "comma-separated hosts from which images and audio clips are fetched by http and https: `name` for their usual ports, or `name:port`; * for any public host; by default none, and they come in the body as data URLs")
    allowed_local_media_path: str | None = option(path, None, "a directory whose files requests may name by `file:` URLs; by default none")
    max_image_bytes: int = option(integer(1, 1 << 28), 20 << 20, "bytes of an image's file that is fetched; larger ones are refused")
    max_image_pixels: int = option(integer(1, 178_956_970), 1 << 25, "width times height of an image; larger ones are refused before their pixels are decoded")
    image_fetch_timeout: float = option(number(0.1, 600), 5.0, "seconds that fetching an image may take")
    # audio clips (audio.md)
    max_audio_bytes: int = option(integer(1, 1 << 28), 25 << 20, "bytes of an audio clip's file that is fetched or uploaded; larger ones are refused")
    max_audio_seconds: int = option(integer(1, 14_400), 1800, "seconds of an audio clip; longer ones are refused before their samples are decoded")
    audio_fetch_timeout: float = option(number(0.1, 600), 10.0, "seconds that fetching an audio clip may take")
    # how much at once
    max_rolling_batch_size: int = option(integer(1, 4096), 32, "sequences in the engine at once", "option.max_num_seqs", by_engine={"vllm": 256, "trtllm": 256, "openai": 256})
    job_queue_size: int = option(integer(1), 1000, "requests that may wait; others get 503, 429 or 529, by API", prefix="")
    batch_size: int = option(integer(1, 4096), 1, "dynamic batching: requests in a batch", "max_dynamic_batch_size", prefix="")
    max_batch_delay: int = option(integer(0, 3_600_000), 100, "dynamic batching: milliseconds to wait for a full batch", prefix="")
    max_request_size: int = option(integer(1), 67_108_864, "bytes of a request body; longer ones get 413", prefix="")
    max_model_len: int | None = option(integer(2), None, "tokens of prompt and answer together; by default the model's context length")
    max_input_len: int | None = option(integer(1), None, "tokens of a prompt; by default all that option.max_model_len leaves")
    max_num_batched_tokens: int | None = option(integer(16), None, "tokens that one engine step computes; fewer shorten other requests' waits during long prompts; by default openvino 256, others as they choose", "option.max_rolling_batch_prefill_tokens")
    kv_cache_gib: int = option(integer(0), 0, "GiB for the KV cache; 0 leaves it to the engine (openvino: grows as needed; vllm: on a GPU by option.gpu_memory_utilization, on a CPU 4)")
    enable_prefix_caching: bool | None = option(boolean, None, "reuse the KV cache of equal prompt beginnings; by default as the engine does (vllm, trtllm: yes; openvino: no)", "option.enable_kv_cache_reuse")
    # how long
    predict_timeout: float = option(number(0.1), 120.0, "seconds that a request may wait for its start; under DJL also the limit of a dynamic batch", "option.predictTimeout")
    request_time_limit: float | None = option(number(0), None, "seconds that a request may take in total, 0 for no limit; by default 900 under DJL Serving, which does not report that a client has left, and no limit in the embedded server")
    model_loading_timeout: float = option(number(1), 240.0, "seconds that the engine may take to load")
    engine_timeout: float = option(number(0.1), 60.0, "seconds without a step after which the engine counts as hung")
    event_loop_timeout: float = option(number(0), 30.0, "seconds that the event loop may be blocked before the server logs its threads' stacks and aborts; 0: no limit")
    client_timeout: float = option(number(0.1), 120.0, "seconds that a client may take to send its body, or to read nothing of its stream, before its connection is closed")
    keep_alive_timeout: float = option(number(1), 75.0, "seconds that an HTTP connection may be idle between two requests; set it above the load balancer's own limit (usually 60), which would otherwise use a closed connection")
    # the rest
    engine_isolation: str = option(one_of("auto", "process", "thread"), "auto", "where the engine runs; auto: in a process, echo in a thread")
    log_prompts: bool = option(boolean, False, "write prompts to the log")
    capture_requests: str | None = option(path, None, "a directory into which requests and their answers are written, for `lmi replay` (capture.md): with all that clients send, except keys; by default none")
    capture_percent: float = option(number(0, 100), 100.0, "percentage of the requests that option.capture_requests writes, chosen at random")
    capture_file_mb: int = option(integer(1, 1 << 20), 64, "MiB of a file of option.capture_requests; then the next one begins")
    capture_total_mb: int = option(integer(1, 1 << 30), 1024, "MiB of all files of option.capture_requests; beyond, the oldest are deleted")
    tgi_metrics: bool = option(boolean, False, "the embedded server's /metrics has TGI's names too, for autoscalers: tgi_queue_size, tgi_batch_current_size, tgi_request_count, tgi_request_success, tgi_request_duration")
    djl_metrics: bool = option(boolean, False, "under DJL Serving: the worker writes each request's tokens, time to the first token and time in the queue as [METRICS] lines, which DJL Serving's own metrics then have (SERVING_PROMETHEUS=true)")
    cloudwatch_metrics_interval: float = option(number(0), 0.0, "seconds between lines of CloudWatch's embedded metric format on the embedded server's stdout; 0: none")
    otlp_traces_endpoint: str | None = option(string, None, "URL that gets OpenTelemetry's traces by OTLP, over HTTP as http://localhost:4318/v1/traces; by default as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says; needs pip install 'lmi-handler[tracing]'")
    # fmt: on
