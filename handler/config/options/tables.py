"""The tables of options: first the options of all engines, in `Options`, and then the options of single engines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from handler.config.engines import ENGINES, LLM_ENGINES
from handler.config.lmi_version import OLDEST, LmiVersion, read_lmi_version
from handler.config.options.engine_arguments import choice
from handler.config.options.option import (
    MediaLimits,
    Option,
    boolean,
    choice_of,
    header_name,
    hosts,
    integer,
    integer_or,
    json_object,
    lora_modules,
    names,
    number,
    option,
    path,
    precision,
    string,
    true_or_false,
)
from handler.core.tgi_version import TgiVersion, read_tgi_version

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
"""Names of reasoning formats in vLLM 0.33 that are not supported here."""

VLLM_TOOL_CALL_PARSERS = ("beam", "muse", "musespark1x", "plamo3")
"""Names of tool call formats in vLLM 0.33 that are not supported here."""


def _parser(engines: Collection[str], vllm: Collection[str], remedy: str) -> Callable[[str], str]:
    """Return a parser for the known names. For other vLLM names, its error message contains a remedy."""

    def parse(text: str) -> str:
        if text in vllm:
            raise ValueError(f"is a format that only vLLM supports: {remedy}")
        return choice_of(*engines)(text)

    return parse


_NO_TOOLS = "omit the option, and require a tool with tool_choice in requests, or set option.tool_parser_plugin"
_NO_REASONING = "omit the option for auto, or write none to leave the model's reasoning in the text"


STAND_IN = "echo"
"""The engine for trying out the configurations of other engines. It ignores the options of other engines."""

BY_ROLLING_BATCH = {"trtllm": "trtllm", "vllm": "vllm", "lmi-dist": "vllm"}
"""Maps values of option.rolling_batch to engines. Like LMI, this uses vLLM for lmi-dist."""


def engine_name(llm_engine: str, rolling_batch: str) -> str:
    """Return the engine that the two options select, or "" if they contradict each other."""
    by_batch = BY_ROLLING_BATCH.get(rolling_batch)
    if llm_engine == STAND_IN:
        return llm_engine
    if llm_engine == "auto":
        return by_batch or "openvino"  # the engine that supports every kind of model
    return llm_engine if by_batch in (None, llm_engine) else ""


def _rolling_batch(text: str) -> str:
    value = choice_of(*ROLLING_BATCHES)(text)
    return "auto" if value == "scheduler" else value


def _streaming(text: str) -> bool:
    """Parse a boolean. As in LMI, the value `huggingface` means true, and 1 is refused."""
    return text.lower() == "huggingface" or true_or_false(text)


def _switch(text: str) -> bool:
    """Parse a boolean. As in AWS's images, 1 is accepted."""
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
"""Maps each task to its other names in LMI, vLLM and Hugging Face. Names of `auto` let the model determine the task."""


def _task(text: str) -> str:
    choice_of(*(name for task, aliases in TASKS.items() for name in (task, *aliases)))(text)
    return next((task for task, aliases in TASKS.items() if text in aliases), text)


def _pooling(text: str) -> str:
    choice_of("auto", "cls", "last", "lasttoken", "mean", "max")(text)
    return "last" if text == "lasttoken" else text


def _directory(text: str) -> str:
    """Parse a directory or `off`. An S3 URL is refused, because output files grow line by line and are locked."""
    if text.startswith("s3://"):
        raise ValueError("must be off or a directory: responses are written one by one, which S3 does not support")
    return path(text)


@dataclass(frozen=True)
class Options:
    """The options of all engines. Each line has the name, type, parser, default, meaning and aliases of an option."""

    # fmt: off
    # what is served
    model_id: str | None = option(path, None, "a .gguf file, a model directory, a name on the Hugging Face hub (openvino: also owner/model/file.gguf), s3://bucket/prefix/, or `demo`", "option.model", "option.s3url")
    model_name: tuple[str, ...] = option(names, ("model",), "the name in /predictions/{name}, /v2/models/{name} and /models; further names, separated by commas, are accepted in paths", "option.modelName")
    served_model_name: tuple[str, ...] | None = option(names, None, "comma-separated model names that clients may use; responses contain the first; * accepts any name")
    llm_engine: str = option(choice_of(*LLM_ENGINES), "auto", "the engine; auto selects the engine of option.rolling_batch, or else openvino, or llamacpp for a GGUF file that OpenVINO does not read (own-model.md)")
    rolling_batch: str = option(_rolling_batch, "auto", "LMI's switch: disable selects dynamic batching; trtllm, vllm and lmi-dist (vLLM) select the engine; scheduler means auto")
    async_mode: bool | None = option(true_or_false, None, "/invocations uses the schema of LMI's async mode; wire/async.md lists the defaults")
    task: str = option(_task, "auto", "text-generation, text-embedding, text-classification, rerank, pooling (embeddings.md lists other names), or automatic-speech-recognition or transcription (media.md); auto reads it from the model's configuration", "option.runner", "option.convert")
    normalize: bool = option(boolean, True, "normalize embeddings to length 1 unless a request says otherwise", "normalize")
    pooling: str = option(_pooling, "auto", "how token vectors become an embedding: cls (the first), last or lasttoken, mean, max (not vllm, not llamacpp); auto reads it from the model's files", "pooling")
    dtype: str = option(precision, "auto", "precision of the computation; auto is the engine's choice (CPU: bf16 if available, f32 for GGUF files of up to 1 GiB)", "option.data_type")
    tensor_parallel_degree: str = option(integer_or("max", 1), "1", "number of devices for a model, or max; openvino, openai and grpc accept only 1 or max", "option.tensor_parallel_size")
    replicas: str = option(integer_or("auto", 1, 256), "1", "number of engine replicas behind one queue (scaling.md); auto starts as many as the devices allow")
    lmi_version: LmiVersion = option(read_lmi_version, OLDEST, "the release of LMI whose schema and defaults the server follows; other settings change the default (migrating/README.md)")
    # how responses look
    output_formatter: str | None = option(string, None, "framing of responses to prompts: json (default), jsonlines (default for streams), sse (default for streams with tgi_compat), or the name of a model.py's output formatter (custom-code.md)")
    input_formatter: str | None = option(string, None, "the name of a model.py's input formatter (custom-code.md)")
    tgi_compat: bool = option(boolean, False, "write responses in TGI's format")
    tgi_version: TgiVersion | None = option(read_tgi_version, None, "the release of TGI, such as 2.4.1, that /invocations follows: its schema, statuses and defaults (wire/tgi.md)")
    keep_anthropic_lines: bool = option(boolean, False, "keep the lines x-anthropic-... of system prompts at /v1/messages, which differ between sessions and prevent prefix caching")
    openai_compat: bool = option(boolean, False, "answer chats on /invocations as on /v1/chat/completions")
    root_schema: str = option(choice_of("tgi", "mindie"), "tgi", "API of the embedded server's route /: tgi or mindie")
    enable_streaming: bool = option(_streaming, False, "stream responses in dynamic batching, as lines {\"outputs\": [...]}")
    enable_force_include_usage: bool = option(_switch, False, "every chunk of streamed chats and completions has token counts, as with include_usage and continuous_usage_stats in stream_options")
    enable_tokenizer_info_endpoint: bool = option(_switch, False, "the embedded server answers vLLM's /tokenizer_info, with tokenizer_config.json and the chat template")
    batch_transform: bool = option(boolean, False, "answer refused requests with status 200, for SageMaker's batch transform (local.md); SAGEMAKER_BATCH sets it")
    tool_call_parser: str = option(_parser(TOOL_CALL_PARSERS, VLLM_TOOL_CALL_PARSERS, _NO_TOOLS), "auto", "format of tool calls (models.md); 'none' leaves tool calls in the text")
    tool_parser_plugin: str | None = option(string, None, "a Python file with your own parser of tool calls (models.md)")
    reasoning_parser: str | None = option(_parser(REASONING_PARSERS, VLLM_REASONING_PARSERS, _NO_REASONING), None, "format of the model's reasoning, by default auto (wire/reasoning.md); none leaves it in the text")
    trim_answers: bool = option(boolean, False, "remove white space around text and reasoning in chats, messages and responses")
    chat_template: str | None = option(string, None, "a chat template to use instead of the model's own, or the path of a file with one")
    default_chat_template_kwargs: Mapping[str, Any] | None = option(json_object, None, "default arguments of the chat template: {\"enable_thinking\": false}")
    generation_config: str = option(string, "auto", "source of default sampling parameters: auto (the model's generation_config.json), vllm (none), or a directory with another such file")
    override_generation_config: Mapping[str, Any] | None = option(json_object, None, "values that override those in generation_config.json: {\"temperature\": 0.6, \"top_p\": 0.9}; null removes a value")
    install_requirements: bool = option(boolean, True, "install the model directory's requirements.txt at each start (custom-code.md)")
    unknown_parameters: str = option(choice_of("report", "refuse"), "report", "unknown parameters of a request: report names them in x-lmi-ignored-parameters, refuse refuses the request")
    # sessions
    enable_stateful_sessions: bool | None = option(_switch, None, "stateful sessions (sessions.md); by default on in LMI's async mode")
    sessions_expiration: int = option(integer(1, 10**9), 1200, "seconds until a session expires")
    sessions_max: int = option(integer(1, 10**6), 10000, "maximum number of open sessions; another gets 503, or replaces one of the API key with the most")
    sessions_path: str | None = option(path, None, "directory for the sessions' files; by default /dev/shm/sagemaker_sessions, in memory")
    # stored responses (wire/responses.md)
    responses_store: str = option(path, "off", "where responses, conversations and Anthropic's threads are stored: off, memory or a directory (wire/responses.md)")
    compaction_key_file: str | None = option(path, None, "file with the secret that encrypts the summaries of conversations; by default a new secret at each start (wire/responses.md)")
    responses_expiration: int = option(integer(1, 10**9), 86400, "seconds to keep a response or conversation after its creation or last continuation")
    responses_max: int = option(integer(1, 10**5), 10000, "maximum number of stored responses and conversations per API key; beyond it, the key's least recently used ones are deleted")
    responses_max_bytes: int = option(integer(1 << 20, 1 << 40), 1 << 28, "maximum bytes of stored responses and conversations per API key; beyond it, the key's least recently used ones are deleted; a longer request is refused")
    responses_total_bytes: int = option(integer(1 << 20, 1 << 42), 1 << 30, "maximum bytes of all stored responses and conversations; beyond it, the key's least recently used ones are deleted; a response that still does not fit gets 503")
    background_max: int = option(integer(1, 10**4), 16, "maximum number of background responses per API key that are queued or in progress; another gets 429")
    background_timeout: float = option(number(1, 10**6), 3600.0, "maximum seconds from the creation of a background response to its end; it then fails")
    background_max_bytes: int = option(integer(1 << 16, 1 << 30), 1 << 24, "maximum bytes of the events of a background response; beyond it, the response fails")
    # files and batches (wire/batches.md)
    batches_store: str = option(_directory, "off", "directory of the embedded server's files and batches: off, or a directory (wire/batches.md)")
    batches_concurrency: int = option(integer(0, 4096), 0, "maximum number of sequences of all batches in the engine at once; 0 uses half of its capacity")
    batches_max_open: int = option(integer(1, 10**4), 16, "maximum number of unfinished batches per API key; creating another gets 429")
    batches_max_lines: int = option(integer(1, 10**6), 50_000, "maximum number of requests in a batch; a longer batch fails")
    batches_max_file_bytes: int = option(integer(1, 1 << 40), 200 << 20, "maximum bytes of an uploaded file; a larger file gets 413")
    batches_max_bytes: int = option(integer(1 << 20, 1 << 42), 1 << 30, "maximum bytes of files per API key; beyond it, uploads get 413 and batches fail")
    batches_total_bytes: int = option(integer(1 << 20, 1 << 44), 8 << 30, "maximum bytes of all files; beyond it, uploads get 503 and batches wait")
    # images (media.md)
    allowed_media_domains: tuple[str, ...] | None = option(hosts, None, "comma-separated hosts from which images and audio clips are fetched (media.md); by default none")
    allowed_local_media_path: str | None = option(path, None, "a directory of files that requests may name by `file:` URLs; by default none")
    max_image_bytes: int = option(integer(1, 1 << 28), 20 << 20, "maximum bytes of a fetched image")
    max_image_pixels: int = option(integer(1, 178_956_970), 1 << 25, "maximum width times height of an image")
    image_fetch_timeout: float = option(number(0.1, 600), 5.0, "maximum seconds to fetch an image")
    # audio clips (media.md)
    max_audio_bytes: int = option(integer(1, 1 << 28), 25 << 20, "maximum bytes of a fetched or uploaded audio clip")
    max_audio_seconds: int = option(integer(1, 14_400), 1800, "maximum length of an audio clip, in seconds")
    audio_fetch_timeout: float = option(number(0.1, 600), 10.0, "maximum seconds to fetch an audio clip")
    # how much at once
    max_rolling_batch_size: int = option(integer(1, 4096), 32, "maximum number of sequences in the engine at once", "option.max_num_seqs", by_engine={"vllm": 256, "trtllm": 256, "openai": 256, "grpc": 256, "llamacpp": 8})
    job_queue_size: int = option(integer(1), 1000, "maximum number of waiting requests; further requests get 503, 429 or 529, depending on the API", prefix="")
    batch_size: int = option(integer(1, 4096), 1, "dynamic batching: maximum number of requests in a batch", "max_dynamic_batch_size", prefix="")
    max_batch_delay: int = option(integer(0, 3_600_000), 100, "dynamic batching: milliseconds to wait for a full batch", prefix="")
    max_request_size: int = option(integer(1), 67_108_864, "maximum bytes of a request body; longer bodies get 413", prefix="")
    requests_total_bytes: int = option(integer(1 << 20, 1 << 42), 1 << 28, "maximum bytes of all requests in memory, from their bodies to their unread responses; a quarter is reserved for small requests; beyond it, requests get 503, 429 or 529")
    max_model_len: int | None = option(integer(2), None, "maximum number of tokens in prompt and response together; by default the model's context length")
    max_input_len: int | None = option(integer(1), None, "maximum number of tokens in a prompt; by default all that option.max_model_len allows")
    max_num_batched_tokens: int | None = option(integer(16), None, "maximum tokens computed in one engine step (tuning.md); by default 256 on openvino; other engines choose", "option.max_rolling_batch_prefill_tokens")
    kv_cache_gib: int = option(integer(0), 0, "GiB for the KV cache; 0 lets the engine decide (4 for vllm on a CPU)")
    enable_prefix_caching: bool | None = option(boolean, None, "reuse the KV cache of shared prompt prefixes; by default on with vllm and trtllm", "option.enable_kv_cache_reuse")
    # how long
    predict_timeout: float = option(number(0.1), 120.0, "maximum seconds that a request may wait to start; under DJL also the time limit of a dynamic batch", "option.predictTimeout")
    request_time_limit: float | None = option(number(0), None, "maximum seconds from when a request joins the engine's queue until its response ends; only running requests are ended; 0 disables the limit; by default 900 under DJL Serving, otherwise none")
    model_loading_timeout: float = option(number(1), 240.0, "maximum seconds for the engine to load; without effect on servers at option.base_url, which are waited for")
    engine_timeout: float = option(number(0.1), 60.0, "seconds without a step after which the engine counts as hung (tuning.md)")
    event_loop_timeout: float = option(number(0), 30.0, "seconds that the event loop may be blocked before the server aborts; 0 disables the limit")
    client_timeout: float = option(number(0.1), 120.0, "maximum seconds for a client to send its body, or to leave its stream unread")
    keep_alive_timeout: float = option(number(1), 75.0, "maximum seconds that a connection may be idle between requests (serving.md)")
    owner_header: str | None = option(header_name, None, "request header in which a gateway names the owner of a request; authorization or x-api-key stands for the key in either of them (security.md); by default, each key in LMI_API_KEY is an owner, and without keys all clients are one")
    # WebSockets (wire/sockets.md)
    websockets_max: int = option(integer(0, 1 << 16), 4096, "maximum number of open WebSockets; another gets 503, or replaces one of an API key that has more; 0 refuses all with 426")
    websockets_seconds: float = option(number(1), 3600.0, "maximum lifetime of a WebSocket, in seconds; its running responses get another minute")
    websockets_compression: bool = option(boolean, False, "compress the messages of WebSockets whose client offers permessage-deflate, except on SageMaker's path")
    # the rest
    engine_isolation: str = option(choice_of("auto", "process", "thread"), "auto", "where the engine runs: process or thread; auto runs echo in a thread and other engines in a separate process")
    log_prompts: bool = option(boolean, False, "write prompts to the log")
    capture_requests: str | None = option(path, None, "directory where requests and their responses are captured (replay.md); by default none")
    capture_percent: float = option(number(0, 100), 100.0, "percentage of requests to capture, chosen at random")
    capture_file_mb: int = option(integer(1, 1 << 20), 64, "maximum MiB of a capture file; beyond it, a new file begins")
    capture_total_mb: int = option(integer(1, 1 << 30), 1024, "maximum MiB of all capture files; beyond it, the oldest are deleted")
    grpc_port: int = option(integer(0, 65535), 0, "port for Triton's gRPC clients, usually 8001; 0 disables gRPC (wire/triton.md)")
    tgi_metrics: bool = option(boolean, False, "the embedded server's /metrics also uses TGI's names (wire/README.md)")
    djl_metrics: bool = option(boolean, False, "log metrics of each request under DJL Serving (djl.md)")
    cloudwatch_metrics_interval: float = option(number(0), 0.0, "seconds between metrics for CloudWatch in the embedded server's log (monitoring.md); 0 disables them")
    otlp_traces_endpoint: str | None = option(string, None, "URL that receives OpenTelemetry traces, such as http://localhost:4318/v1/traces (serving.md)")
    # fmt: on


# -- options of the echo engine, of engines with structured output, and of the GPU engines -----------------------------


_GPU = ("vllm", "trtllm")
_GUIDED = ("openvino", *_GPU, "llamacpp", "openai")

ECHO = (
    Option("option.echo_tokens_per_second", "echo_tokens_per_second", number(0), 0.0, "maximum tokens per second for each request; 0 disables the limit", engines=("echo",), idle="only the echo engine has a speed limit"),
    Option("option.echo_tokenizer", "echo_tokenizer", path, None, "a Hugging Face directory with the tokenizer and chat template that echo uses; by default, words are tokens", engines=("echo",), idle="other engines use the model's tokenizer"),
    Option("option.echo_cues", "echo_cues", boolean, False, "the words <raise>, <hang>, <die> and <refuse> in a prompt make the engine do that (for tests)", engines=("echo",), idle="only the echo engine reads these words"),
)  # fmt: skip

GUIDED = (
    Option(
        "option.guide_timeout",
        "guide_timeout",
        number(0, 600),
        5.0,
        "maximum seconds of CPU time to compile a client's schema, regular expression or grammar; 0 disables the check (vllm.md)",
        engines=_GUIDED,
    ),
)

MEDIA = (
    Option(
        "option.limit_mm_per_prompt",
        "limit_mm_per_prompt",
        MediaLimits(),
        None,
        'maximum number of images and audio clips in a request: {"image": 4, "audio": 1}, or image=4,audio=1; by default 32 each; other media must be 0',
        engines=LLM_ENGINES[1:],
    ),
)

GPU = (
    Option("option.trust_remote_code", "trust_remote_code", boolean, False, "run code from the model's directory", engines=(*_GPU, "openai", "grpc"), idle="the engine does not run code from models"),
    Option("option.revision", "revision", string, None, "branch, tag or commit of a model on the Hugging Face hub", engines=LLM_ENGINES[1:], idle="echo has no model"),
    Option("option.pipeline_parallel_degree", "pipeline_parallel_size", integer(1), None, "number of pipeline stages for the model's layers", engines=_GPU, harmless=("1",)),
    Option("option.enable_chunked_prefill", "enable_chunked_prefill", boolean, None, "compute long prompts in chunks, alongside other requests' tokens", ("option.enable_chunked_context",), engines=_GPU),
    Option("option.enable_lora", "enable_lora", boolean, False, "serve LoRA adapters (adapters.md)", engines=("echo", *_GPU, "openai", "llamacpp"), idle="the engine does not support LoRA adapters"),
    Option("option.lora_modules", "lora_modules", lora_modules, None, "adapters to load at startup: name=path, a JSON object of name and path, or a list", engines=("echo", *_GPU, "openai", "llamacpp")),
    Option("option.adapters_root", "adapters_root", path, None, "directory from which clients may register adapters, besides the model's own (adapters.md); with openai, an absolute path on SGLang's machine", engines=("echo", *_GPU, "openai")),
    Option("option.adapters_code", "adapters_code", boolean, False, "run the model.py of an adapter that a client registers from outside the model's directory", engines=("echo", *_GPU)),
    Option("option.max_loras", "max_loras", integer(1), 4, "maximum number of adapters in one batch", engines=_GPU),
    Option("option.max_cpu_loras", "max_cpu_loras", integer(1), None, "maximum number of adapters kept in host memory", engines=_GPU),
    Option("option.max_lora_rank", "max_lora_rank", integer(1), 16, "maximum rank of an adapter", engines=_GPU),
    Option("option.guided_decoding_backend", "guided_decoding_backend", string, None, "backend of structured output: auto, xgrammar, guidance or outlines with vllm; xgrammar or llguidance with trtllm", engines=_GPU),
    Option("option.chat_template_content_format", "chat_template_content_format", choice_of("auto", "string", "openai"), None, "format of a message's content for the chat template: string, or openai for a list of parts; auto detects what the template needs", engines=_GPU, harmless=("auto", "string")),
    Option("option.engine_args", "engine_args", json_object, None, "a JSON object of the engine's arguments, under its own names; they override other options", engines=_GPU),
)  # fmt: skip


# -- options of the OpenVINO engine ------------------------------------------------------------------------------------


_OPENVINO = ("openvino",)

GROUP_SIZES = (32, 64, 128)
"""Numbers of consecutive weights that may share a scale and a zero point."""


def _group_size(text: str) -> int:
    return int(choice_of(*map(str, GROUP_SIZES))(text))


OPENVINO = (
    Option("option.quantize", "quantization", choice_of("int8", "int4"), None, "bits of a checkpoint's weights after conversion: int8 or int4 (own-model.md)", ("option.quantization",), engines=_OPENVINO),
    Option("option.group_size", "group_size", _group_size, None, "number of weights that share a scale with option.quantize=int4: 32 (default), 64 or 128; smaller if it does not divide a matrix's rows", engines=_OPENVINO),
)  # fmt: skip


# -- LMI's options for vLLM; those that vLLM no longer supports are in foreign.json ------------------------------------


_VLLM = ("vllm",)


def load_format(text: str) -> str:
    """Parse a weight format. vLLM itself checks the name."""
    if text == "sagemaker_fast_model_loader":
        raise ValueError(
            "is only supported by AWS's builds of vLLM in LMI's images up to v15; omit the option, and serve the "
            "model's original files: an S3 prefix for this loader contains only shards of them"
        )
    return string(text)


def _quantization(text: str) -> str:
    """Parse the name of a quantization method in vLLM or LMI. If vLLM is installed, it checks its own names."""
    if text == "marlin":
        raise ValueError(
            "vLLM no longer reads checkpoints in Marlin's own format; use a GPTQ or AWQ checkpoint and omit the option: "
            "vLLM chooses the kernel"
        )
    return text if text in BITSANDBYTES.values() else choice("vllm", "quantization", text)


BITSANDBYTES = {"load_in_4bit": "bitsandbytes4", "load_in_8bit": "bitsandbytes8"}
"""Maps LMI's options for bitsandbytes to the corresponding values of option.quantize."""

VLLM = (
    Option("option.guided_decoding", "guided_decoding", boolean, True, "accept structured output from clients (vllm.md)", engines=_VLLM),
    Option("option.gpu_memory_utilization", "gpu_memory_utilization", number(0.01, 1), None, "fraction of GPU memory for weights and KV cache", engines=_VLLM),
    Option("option.enforce_eager", "enforce_eager", boolean, None, "use no CUDA graphs or compilation, which starts faster and runs slower", engines=_VLLM),
    Option("option.load_format", "load_format", load_format, None, "format of the weights: auto, safetensors, dummy, runai_streamer, ...", engines=_VLLM),
    Option("option.kv_cache_dtype", "kv_cache_dtype", string, None, "precision of the KV cache: auto, fp8, ...", engines=_VLLM),
    Option("option.block_size", "block_size", integer(1), None, "tokens in a block of the KV cache", engines=_VLLM),
    Option("option.max_logprobs", "max_logprobs", integer(-1), -1, "maximum number of alternatives per token; -1 disables the limit", engines=_VLLM),
    Option("option.tokenizer_mode", "tokenizer_mode", choice_of("auto", "hf", "mistral"), None, "vLLM's tokenizer: auto, hf, or mistral for Mistral's own (vllm.md)", engines=_VLLM),
    Option("option.quantize", "quantization", _quantization, None, "quantization, if the checkpoint does not name it: awq, gptq, fp8, bitsandbytes, ...", ("option.quantization",), engines=_VLLM),
    Option("option.load_in_4bit", "load_in_4bit", boolean, None, "LMI's name for option.quantize=bitsandbytes", engines=_VLLM, harmless=("false",)),
    Option("option.load_in_8bit", "load_in_8bit", boolean, None, "LMI's name for option.quantize=bitsandbytes; vLLM uses 4 bits unless the checkpoint has 8-bit weights", engines=_VLLM, harmless=("false",)),
    Option("option.cpu_offload_gb_per_gpu", "cpu_offload_gb", number(0), None, "GiB of weights kept in the host's memory, for each GPU", ("option.cpu_offload_gb",), engines=_VLLM),
    Option("option.disable_sliding_window", "disable_sliding_window", boolean, None, "attend to the whole context, even with a sliding-window model", engines=_VLLM),
    Option("option.disable_custom_all_reduce", "disable_custom_all_reduce", boolean, None, "use NCCL between GPUs", engines=_VLLM),
    Option("option.distributed_executor_backend", "distributed_executor_backend", choice_of("mp", "ray", "uni", "external_launcher"), None, "executor for several GPUs or hosts", engines=_VLLM),
    Option("option.fully_sharded_loras", "fully_sharded_loras", boolean, None, "also spread LoRA computation over GPUs", engines=_VLLM),
    Option("option.lora_dtype", "lora_dtype", string, None, "precision of adapters", engines=_VLLM),
    Option("option.speculative_config", "speculative_config", json_object, None, "speculative decoding, with vLLM's field names: {\"method\": \"ngram\", \"num_speculative_tokens\": 3, ...}", engines=_VLLM),
    Option("option.speculative_draft_model", "speculative_draft_model", string, None, "a draft model for speculative decoding (LMI)", engines=_VLLM),
    Option("option.num_speculative_tokens", "num_speculative_tokens", integer(1), None, "tokens that the draft model proposes at a time (LMI; default 5)", ("option.speculative_length",), engines=_VLLM),
    Option("option.draft_model_tp_size", "draft_model_tp_size", integer(1), None, "number of GPUs for the draft model (LMI); by default as many as for the model", ("option.speculative_draft_tensor_parallel_size",), engines=_VLLM, harmless=("1",)),
    Option("option.lmcache_config_file", "lmcache_config_file", path, None, "LMCache's configuration file (vllm.md); sets LMCACHE_CONFIG_FILE", engines=_VLLM),
    Option("option.lmcache_auto_config", "lmcache_auto_config", boolean, None, "let LMCache keep the KV cache in free memory and disk space (vllm.md)", engines=_VLLM, harmless=("false",)),
)  # fmt: skip


# -- LMI's options for TensorRT-LLM; those of its former TensorRT engines are in foreign.json --------------------------
# `engines/trtllm/arguments.py` converts them into the arguments of `tensorrt_llm.LLM`.

_TRTLLM = ("trtllm",)


def policy(text: str) -> str:
    """Parse a scheduling policy by its lower-case LMI name or its TensorRT-LLM name."""
    return choice_of("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")(text.upper())


def integers(text: str) -> list[int]:
    """Parse a list of positive integers, such as `[4096, 256]` or `4096,256`."""
    rule = "must be whole numbers of at least 1, separated by commas"
    try:
        values = json.loads(text if text.startswith("[") else f"[{text}]")
    except ValueError:
        raise ValueError(rule) from None
    if not values or not all(type(value) is int and value > 0 for value in values):
        raise ValueError(rule)
    return list(values)


def pytorch(text: str) -> str:
    if text != "pytorch":
        raise ValueError("must be pytorch: TensorRT engines are no longer built")
    return text


TRTLLM = (
    # lengths and sizes
    Option("option.max_output_len", "max_output_len", integer(1), None, "maximum tokens of a response; option.max_model_len becomes the sum of this option and option.max_input_len, whose default is then 1024", engines=_TRTLLM),
    Option("option.max_seq_len", "max_seq_len", integer(2), None, "TensorRT-LLM's name for option.max_model_len", engines=_TRTLLM),
    Option("option.max_num_tokens", "max_num_tokens", integer(16), None, "TensorRT-LLM's name for option.max_num_batched_tokens", engines=_TRTLLM),
    Option("option.max_beam_width", "max_beam_width", integer(1), None, "maximum value of num_beams", engines=_TRTLLM),
    Option("option.stream_interval", "stream_interval", integer(1), None, "engine steps between two messages with a request's tokens", engines=_TRTLLM),
    Option("option.inactivity_timeout", "inactivity_timeout", number(0.1), 60.0, "seconds without progress after which the engine counts as hung (trtllm.md)", engines=_TRTLLM),
    # sampling
    Option("option.sampler_type", "sampler_type", choice_of("auto", "TorchSampler", "TRTLLMSampler"), "auto", "sampler before TensorRT-LLM 1.3: TorchSampler or TRTLLMSampler (trtllm.md); auto uses TRTLLMSampler with option.max_beam_width", engines=_TRTLLM),
    Option("option.gather_generation_logits", "gather_generation_logits", boolean, None, "allow requests for the logits of the response", engines=_TRTLLM),
    Option("option.disable_flashinfer_sampling", "disable_flashinfer_sampling", boolean, None, "use TorchSampler without FlashInfer's kernels", engines=_TRTLLM),
    # the KV cache
    Option("option.kv_cache_free_gpu_mem_fraction", "free_gpu_memory_fraction", number(0, 1), None, "fraction of the free GPU memory, after the model is loaded, that the KV cache may use", ("option.free_gpu_memory_fraction",), engines=_TRTLLM),
    Option("option.tokens_per_block", "tokens_per_block", integer(1), None, "tokens in a block of the KV cache", engines=_TRTLLM),
    Option("option.max_tokens", "kv_cache_max_tokens", integer(1), None, "maximum tokens in the whole KV cache", engines=_TRTLLM),
    Option("option.kv_cache_dtype", "kv_cache_dtype", string, None, "precision of the KV cache: auto, fp8, nvfp4", engines=_TRTLLM),
    Option("option.host_cache_size", "host_cache_size", integer(0), None, "bytes of host memory for blocks that do not fit on the GPU", engines=_TRTLLM),
    Option("option.max_attention_window", "max_attention_window", integers, None, "attention windows in tokens, separated by commas; repeated over the layers", engines=_TRTLLM),
    Option("option.sink_token_length", "sink_token_length", integer(0), None, "number of first tokens that a sliding window always keeps", engines=_TRTLLM),
    Option("option.onboard_blocks", "onboard_blocks", boolean, None, "copy blocks back from the host's memory before use", engines=_TRTLLM),
    Option("option.cross_kv_cache_fraction", "cross_kv_cache_fraction", number(0, 1), None, "fraction of the KV cache for cross attention", engines=_TRTLLM),
    Option("option.secondary_offload_min_priority", "secondary_offload_min_priority", integer(0, 100), None, "lowest priority of blocks that go to the host's memory", engines=_TRTLLM),
    Option("option.event_buffer_max_size", "event_buffer_max_size", integer(0), None, "maximum number of KV cache events to keep", engines=_TRTLLM),
    Option("option.enable_partial_reuse", "enable_partial_reuse", boolean, None, "also reuse parts of a block", engines=_TRTLLM),
    # scheduling and kernels
    Option("option.batch_scheduler_policy", "batch_scheduler_policy", policy, None, "max_utilization, guaranteed_no_evict or static_batch", ("option.capacity_scheduler_policy",), engines=_TRTLLM),
    Option("option.enable_trt_overlap", "enable_overlap_scheduler", boolean, None, "prepare a step while the GPU computes the previous one", ("option.enable_overlap_scheduler",), engines=_TRTLLM),
    Option("option.use_custom_all_reduce", "use_custom_all_reduce", boolean, None, "use custom kernels for all-reduce; false uses NCCL", engines=_TRTLLM),
    Option("option.allreduce_strategy", "allreduce_strategy", string, None, "all-reduce method: AUTO, NCCL, ONESHOT, TWOSHOT, ...", engines=_TRTLLM),
    Option("option.attn_backend", "attn_backend", string, None, "attention kernels: TRTLLM, FLASHINFER, VANILLA", engines=_TRTLLM),
    Option("option.moe_backend", "moe_backend", string, None, "kernels for mixtures of experts: CUTLASS, TRTLLM, ...", engines=_TRTLLM),
    Option("option.use_cuda_graph", "use_cuda_graph", boolean, None, "capture CUDA graphs and replay them", engines=_TRTLLM),
    Option("option.cuda_graph_batch_sizes", "cuda_graph_batch_sizes", integers, None, "batch sizes to capture, separated by commas", engines=_TRTLLM),
    Option("option.cuda_graph_max_batch_size", "cuda_graph_max_batch_size", integer(1), None, "maximum batch size to capture", engines=_TRTLLM),
    Option("option.cuda_graph_padding_enabled", "cuda_graph_padding", boolean, None, "pad batches to a captured size", engines=_TRTLLM),
    Option("option.load_format", "load_format", choice_of("auto", "dummy"), None, "auto, or dummy for random weights (for benchmarks)", engines=_TRTLLM),
    Option("option.backend", "backend", pytorch, None, "the backend; only pytorch is supported", engines=_TRTLLM),
    # several GPUs
    Option("option.pipeline_parallel_size", "trtllm_pipeline_parallel_size", integer(1), None, "TensorRT-LLM's name for option.pipeline_parallel_degree", engines=_TRTLLM),
    Option("option.context_parallel_size", "context_parallel_size", integer(1), None, "number of GPUs that share a long prompt (context parallelism)", engines=_TRTLLM),
    Option("option.gpus_per_node", "gpus_per_node", integer(1), None, "number of GPUs per machine", engines=_TRTLLM),
    Option("option.moe_tensor_parallel_size", "moe_tensor_parallel_size", integer(1), None, "number of GPUs that share an expert (tensor parallelism)", engines=_TRTLLM),
    Option("option.moe_expert_parallel_size", "moe_expert_parallel_size", integer(1), None, "number of GPUs that the experts are distributed over", engines=_TRTLLM),
    Option("option.moe_cluster_parallel_size", "moe_cluster_parallel_size", integer(1), None, "number of GPU clusters for the experts", engines=_TRTLLM),
    Option("option.enable_attention_dp", "enable_attention_dp", boolean, None, "split attention by request instead of by head", engines=_TRTLLM),
    # adapters, statistics
    Option("option.lora_target_modules", "lora_target_modules", names, None, "modules that adapters change, separated by commas; by default the attention and MLP modules", engines=_TRTLLM),
    Option("option.iter_stats_max_iterations", "iter_stats_max_iterations", integer(1), None, "number of steps whose statistics are kept", engines=_TRTLLM),
    Option("option.request_stats_max_iterations", "request_stats_max_iterations", integer(1), None, "number of steps whose request statistics are kept", engines=_TRTLLM),
    Option("option.usage_stats", "usage_stats", boolean, False, "let TensorRT-LLM 1.3 and later report its use to NVIDIA (trtllm.md)", engines=_TRTLLM),
)  # fmt: skip


# -- options of the engines that use other servers ---------------------------------------------------------------------


_OPENAI = ("openai",)
_GRPC = ("grpc",)
_LLAMACPP = ("llamacpp",)


def urls(text: str) -> tuple[str, ...]:
    """Parse HTTP URLs separated by commas."""
    addresses = tuple(name.strip().rstrip("/") for name in text.split(","))
    for url in addresses:
        parts = urlsplit(url)
        is_whole = parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)  # `port` may raise
        if parts.scheme not in ("http", "https") or not is_whole:
            raise ValueError("must be http or https addresses separated by commas: http://host:8000/v1")
        if parts.username or parts.password:
            raise ValueError("must not contain a password; the key is read from the variable OPENAI_API_KEY")
    return addresses


def grpc_urls(text: str) -> tuple[str, ...]:
    """Parse gRPC URLs separated by commas."""
    addresses = tuple(name.strip().rstrip("/") for name in text.split(","))
    for url in addresses:
        parts = urlsplit(url)
        is_whole = parts.hostname and parts.port and not (parts.path or parts.query or parts.fragment)
        if parts.scheme not in ("grpc", "grpcs") or not is_whole or parts.username or parts.password:
            raise ValueError("must be grpc or grpcs addresses separated by commas: grpc://host:50051")
    return addresses


def words(text: str) -> tuple[str, ...]:
    """Split a part of a command line into its arguments."""
    return tuple(shlex.split(text))


REMOTE = (
    Option("option.base_url", "base_url", urls, None, "address of the server, such as http://host:8000/v1; several addresses, separated by commas, are replicas (engines-by-url.md)", engines=_OPENAI),
    Option("option.base_url_kind", "base_url_kind", choice_of("auto", *ENGINES["openai"].kinds), "auto", "kind of server; auto reads it from /models at startup; lmi is this handler, llamacpp is llama-server", engines=_OPENAI),
    Option("option.base_url_model", "base_url_model", string, None, "the model's name on that server; by default the first in /models", engines=_OPENAI),
    Option("option.base_url", "base_url", grpc_urls, None, "address of the server, such as grpc://host:50051, or grpcs:// over TLS; several addresses, separated by commas, are replicas (engines-by-url.md)", engines=_GRPC),
    Option("option.base_url_kind", "base_url_kind", choice_of("auto", *ENGINES["grpc"].kinds), "auto", "the server's gRPC contract; auto detects it at startup", engines=_GRPC),
    Option("option.engine_python", "engine_python", path, None, "path of the Python interpreter of an environment with vLLM, SGLang or TensorRT-LLM, which starts the server of option.base_url_kind (engines-by-url.md)", engines=_GRPC),
    Option("option.engine_flags", "engine_flags", words, None, "additional flags for that server, such as --gpu-memory-utilization 0.8", engines=_GRPC),
    Option("option.base_url_connect_timeout", "base_url_connect_timeout", number(0.1), 5.0, "maximum seconds to connect", engines=(*_OPENAI, *_GRPC)),
    Option("option.base_url_timeout", "base_url_timeout", number(0.1), 120.0, "maximum seconds without a token before a request fails", engines=(*_OPENAI, *_GRPC, *_LLAMACPP)),
)  # fmt: skip

LLAMACPP = (
    Option("option.llama_server", "llama_server", path, "llama-server", "name or path of llama.cpp's server, which the engine starts (llamacpp.md)", engines=_LLAMACPP, idle="only the llamacpp engine starts llama-server"),
    Option("option.llama_server_args", "llama_server_args", words, None, "additional flags for llama-server, such as --n-gpu-layers 20 --flash-attn on", engines=_LLAMACPP),
)  # fmt: skip
