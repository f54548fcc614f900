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


def _true_or_false(text: str) -> bool:
    """Parse a boolean of LMI's that is none of pydantic's: Java takes all but `true` for false, such as 1."""
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _streaming(text: str) -> bool:
    """Parse a boolean; LMI's `huggingface` streams too, and it refuses 1."""
    return text.lower() == "huggingface" or _true_or_false(text)


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
    model_id: str | None = option(path, None, "a .gguf file, a model directory, a name on the Hugging Face hub (openvino: also owner/model/file.gguf), s3://bucket/prefix/, or `demo`", "option.model")
    model_name: str = option(string, "model", "the name in /predictions/{name} and /models", "option.modelName")
    served_model_name: tuple[str, ...] | None = option(names, None, "comma-separated model names for clients; answers give the first; * accepts any name")
    llm_engine: str = option(one_of(*LLM_ENGINES), "auto", "the engine; auto: as option.rolling_batch names it, otherwise openvino")
    rolling_batch: str = option(_rolling_batch, "auto", "LMI's switch: disable is dynamic batching; trtllm, vllm and lmi-dist (vLLM) choose the engine; scheduler means auto")
    async_mode: bool | None = option(_true_or_false, None, "/invocations uses the schema of LMI's async mode; wire/async.md lists the defaults")
    task: str = option(_task, "auto", "text-generation, text-embedding, text-classification, rerank, pooling (embeddings.md lists other names), or automatic-speech-recognition or transcription (audio.md); auto: by the model's configuration", "option.runner", "option.convert")
    normalize: bool = option(boolean, True, "embeddings have length 1 unless a request says otherwise", "normalize")
    pooling: str = option(_pooling, "auto", "how token vectors become an embedding: cls (the first), last or lasttoken, mean, max (not vllm); auto: by the model's files", "pooling")
    dtype: str = option(precision, "auto", "precision of the computation; auto is the engine's choice (CPU: bf16 if available, f32 for GGUF files of up to 1 GiB)", "option.data_type")
    tensor_parallel_degree: str = option(parallel_degree, "1", "devices for a model, or max; CPU engines use one", "option.tensor_parallel_size")
    replicas: str = option(number_or_auto, "1", "engines side by side behind one queue (scaling.md); auto: as many as the devices allow")
    lmi_version: LmiVersion = option(read_lmi_version, OLDEST, "the release of LMI whose schema and defaults are served; other settings change the default (migrating/README.md)")
    # how answers look
    output_formatter: str | None = option(string, None, "framing of answers to prompts: json, jsonlines or sse; by default json, for streams jsonlines (tgi_compat: sse); or the name of a model.py's output formatter (formatters.md)")
    input_formatter: str | None = option(string, None, "the name of a model.py's input formatter (formatters.md)")
    tgi_compat: bool = option(boolean, False, "answers in TGI's format")
    openai_compat: bool = option(boolean, False, "chats on /invocations are answered as on /v1/chat/completions")
    root_schema: str = option(one_of("tgi", "mindie"), "tgi", "the embedded server's route /: tgi or mindie")
    enable_streaming: bool = option(_streaming, False, "dynamic batching only: answers as {\"outputs\": [...]} lines")
    enable_force_include_usage: bool = option(_switch, False, "streamed chats and completions end with token counts, as with stream_options.include_usage")
    enable_tokenizer_info_endpoint: bool = option(_switch, False, "the embedded server offers vLLM's /tokenizer_info, with tokenizer_config.json and the chat template")
    batch_transform: bool = option(boolean, False, "refused requests get status 200, for SageMaker's batch transform (local.md); SAGEMAKER_BATCH sets it")
    tool_call_parser: str = option(_parser(TOOL_CALL_PARSERS, VLLM_TOOL_CALL_PARSERS, _NO_TOOLS), "auto", "format of tool calls (models.md); none: calls stay in the text")
    tool_parser_plugin: str | None = option(string, None, "a Python file with your own parser of tool calls (models.md)")
    reasoning_parser: str | None = option(_parser(REASONING_PARSERS, VLLM_REASONING_PARSERS, _NO_REASONING), None, "format of the model's reasoning, by default auto (wire/reasoning.md); none: it stays in the text")
    trim_answers: bool = option(boolean, False, "remove white space around text and reasoning in chats, messages and responses")
    chat_template: str | None = option(string, None, "a chat template in place of the model's own: its text, or a file")
    default_chat_template_kwargs: Mapping[str, Any] | None = option(json_object, None, "default arguments of the chat template: {\"enable_thinking\": false}")
    generation_config: str = option(string, "auto", "default sampling parameters; auto: those of the model's generation_config.json; vllm: none; or the directory of another such file")
    override_generation_config: Mapping[str, Any] | None = option(json_object, None, "values that replace generation_config.json's: {\"temperature\": 0.6, \"eos_token_id\": 3}; null removes one")
    install_requirements: bool = option(boolean, True, "install the model directory's requirements.txt at each start (formatters.md)")
    unknown_parameters: str = option(one_of("report", "refuse"), "report", "report: name them in x-lmi-ignored-parameters; refuse: refuse the request")
    # sessions
    enable_stateful_sessions: bool | None = option(_switch, None, "stateful sessions (sessions.md); by default on in LMI's async mode")
    sessions_expiration: int = option(integer(1, 10**9), 1200, "seconds that a session lives")
    sessions_max: int = option(integer(1, 10**6), 10000, "sessions open at once; one more gets 503")
    sessions_path: str | None = option(path, None, "directory of the sessions; by default /dev/shm/sagemaker_sessions, in memory")
    # stored responses (wire/responses.md)
    responses_store: str = option(path, "off", "where responses and Anthropic's threads are stored: off, memory or a directory (wire/responses.md)")
    responses_expiration: int = option(integer(1, 10**9), 86400, "seconds that a response is stored after its creation or last continuation")
    responses_max: int = option(integer(1, 10**5), 10000, "stored responses of one API key; above this number, its least recently used are dropped")
    responses_max_bytes: int = option(integer(1 << 20, 1 << 40), 1 << 28, "bytes of one API key's stored responses; above this, its least recently used are dropped; a longer request is refused")
    responses_total_bytes: int = option(integer(1 << 20, 1 << 42), 1 << 30, "bytes of all stored responses; above this, a key that has none to drop gets 503")
    # images (images.md)
    allowed_media_domains: tuple[str, ...] | None = option(hosts, None, "comma-separated hosts from which images and audio clips are fetched (images.md); by default none")
    allowed_local_media_path: str | None = option(path, None, "a directory whose files requests may name by `file:` URLs; by default none")
    max_image_bytes: int = option(integer(1, 1 << 28), 20 << 20, "bytes of a fetched image")
    max_image_pixels: int = option(integer(1, 178_956_970), 1 << 25, "width times height of an image")
    image_fetch_timeout: float = option(number(0.1, 600), 5.0, "seconds that fetching an image may take")
    # audio clips (audio.md)
    max_audio_bytes: int = option(integer(1, 1 << 28), 25 << 20, "bytes of a fetched or uploaded audio clip")
    max_audio_seconds: int = option(integer(1, 14_400), 1800, "seconds of an audio clip")
    audio_fetch_timeout: float = option(number(0.1, 600), 10.0, "seconds that fetching an audio clip may take")
    # how much at once
    max_rolling_batch_size: int = option(integer(1, 4096), 32, "sequences in the engine at once", "option.max_num_seqs", by_engine={"vllm": 256, "trtllm": 256, "openai": 256})
    job_queue_size: int = option(integer(1), 1000, "requests that may wait; others get 503, 429 or 529, depending on the API", prefix="")
    batch_size: int = option(integer(1, 4096), 1, "dynamic batching: requests in a batch", "max_dynamic_batch_size", prefix="")
    max_batch_delay: int = option(integer(0, 3_600_000), 100, "dynamic batching: milliseconds to wait for a full batch", prefix="")
    max_request_size: int = option(integer(1), 67_108_864, "bytes of a request body; longer ones get 413", prefix="")
    requests_total_bytes: int = option(integer(1 << 20, 1 << 42), 1 << 28, "bytes that all requests keep in memory, from their bodies to their unread answers; a quarter is for small ones; above this, requests get 503, 429 or 529")
    max_model_len: int | None = option(integer(2), None, "tokens of prompt and answer together; by default the model's context length")
    max_input_len: int | None = option(integer(1), None, "tokens of a prompt; by default all that option.max_model_len leaves")
    max_num_batched_tokens: int | None = option(integer(16), None, "tokens that one engine step computes (tuning.md); by default 256 on openvino; other engines choose", "option.max_rolling_batch_prefill_tokens")
    kv_cache_gib: int = option(integer(0), 0, "GiB for the KV cache; 0: the engine decides (vllm on a CPU: 4)")
    enable_prefix_caching: bool | None = option(boolean, None, "reuse the KV cache of equal prompt beginnings; by default on with vllm and trtllm", "option.enable_kv_cache_reuse")
    # how long
    predict_timeout: float = option(number(0.1), 120.0, "seconds that a request may wait for its start; under DJL also the limit of a dynamic batch", "option.predictTimeout")
    request_time_limit: float | None = option(number(0), None, "seconds that a request may take in total; 0: no limit; by default 900 under DJL Serving, otherwise none")
    model_loading_timeout: float = option(number(1), 240.0, "seconds that the engine may take to load")
    engine_timeout: float = option(number(0.1), 60.0, "seconds without a step after which the engine counts as hung")
    event_loop_timeout: float = option(number(0), 30.0, "seconds that the event loop may be blocked before the server aborts; 0: no limit")
    client_timeout: float = option(number(0.1), 120.0, "seconds that a client may take to send its body, or may read nothing of its stream")
    keep_alive_timeout: float = option(number(1), 75.0, "seconds that a connection may be idle between requests (serving.md)")
    # the rest
    engine_isolation: str = option(one_of("auto", "process", "thread"), "auto", "where the engine runs; auto: in a process, echo in a thread")
    log_prompts: bool = option(boolean, False, "write prompts to the log")
    capture_requests: str | None = option(path, None, "a directory into which requests and their answers are written (capture.md); by default none")
    capture_percent: float = option(number(0, 100), 100.0, "percentage of requests to capture, chosen at random")
    capture_file_mb: int = option(integer(1, 1 << 20), 64, "MiB of a captured file; then the next one begins")
    capture_total_mb: int = option(integer(1, 1 << 30), 1024, "MiB of all captured files; above this, the oldest are deleted")
    tgi_metrics: bool = option(boolean, False, "the embedded server's /metrics also uses TGI's names (wire/README.md)")
    djl_metrics: bool = option(boolean, False, "metrics of each request under DJL Serving (djl.md)")
    cloudwatch_metrics_interval: float = option(number(0), 0.0, "seconds between metrics for CloudWatch in the embedded server's log (monitoring.md); 0: none")
    otlp_traces_endpoint: str | None = option(string, None, "URL that gets OpenTelemetry traces, such as http://localhost:4318/v1/traces (serving.md)")
    # fmt: on
