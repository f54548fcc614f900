"""Options of the echo engine, of engines with structured output, and of the GPU engines."""

from __future__ import annotations

from handler.config.engines import LLM_ENGINES
from handler.config.options.option import (
    MediaLimits,
    Option,
    boolean,
    integer,
    json_object,
    lora_modules,
    number,
    one_of,
    path,
    string,
)

_GPU = ("vllm", "trtllm")
_GUIDED = ("openvino", *_GPU)

ECHO = (
    Option("option.echo_tokens_per_second", "echo_tokens_per_second", number(0), 0.0, "tokens a second for each request; 0: no limit", engines=("echo",), idle="only echo keeps a pace"),
    Option("option.echo_tokenizer", "echo_tokenizer", path, None, "a Hugging Face directory, whose tokenizer and template echo uses instead of words", engines=("echo",), idle="others have the model's tokenizer"),
    Option("option.echo_cues", "echo_cues", boolean, False, "the words <raise> <hang> <die> <refuse> make the engine do so (for tests)", engines=("echo",), idle="only echo has cues"),
)  # fmt: skip

GUIDED = (
    Option(
        "option.guide_timeout",
        "guide_timeout",
        number(0, 600),
        5.0,
        "seconds of CPU time to compile a client's schema, expression or grammar; 0: no check (vllm.md)",
        engines=_GUIDED,
    ),
)

MEDIA = (
    Option(
        "option.limit_mm_per_prompt",
        "limit_mm_per_prompt",
        MediaLimits(),
        None,
        'images and audio clips of a request: {"image": 4, "audio": 1}, or image=4,audio=1; by default 32 each; others must be 0',
        engines=LLM_ENGINES[1:],
    ),
)

GPU = (
    Option("option.trust_remote_code", "trust_remote_code", boolean, False, "run code from the model's directory", engines=(*_GPU, "openai"), idle="no code that comes with a model is run"),
    Option("option.revision", "revision", string, None, "branch, tag or commit of a model on the Hugging Face hub", engines=LLM_ENGINES[1:], idle="echo has no model"),
    Option("option.pipeline_parallel_degree", "pipeline_parallel_size", integer(1), None, "number of stages for a model's layers", engines=_GPU, harmless=("1",)),
    Option("option.enable_chunked_prefill", "enable_chunked_prefill", boolean, None, "compute long prompts in parts, alongside other requests' tokens", engines=_GPU),
    Option("option.enable_lora", "enable_lora", boolean, False, "serve LoRA adapters (adapters.md)", engines=("echo", *_GPU), idle="the engine has no LoRA adapters"),
    Option("option.lora_modules", "lora_modules", lora_modules, None, "adapters to load at the start: name=path, a JSON object of name and path, or a list", engines=("echo", *_GPU)),
    Option("option.max_loras", "max_loras", integer(1), 4, "adapters in one batch", engines=_GPU),
    Option("option.max_cpu_loras", "max_cpu_loras", integer(1), None, "adapters kept in the host's memory", engines=_GPU),
    Option("option.max_lora_rank", "max_lora_rank", integer(1), 16, "the largest rank of an adapter", engines=_GPU),
    Option("option.guided_decoding_backend", "guided_decoding_backend", string, None, "backend of structured output: vllm auto, xgrammar, guidance, outlines; trtllm xgrammar, llguidance", engines=_GPU),
    Option("option.chat_template_content_format", "chat_template_content_format", one_of("auto", "string", "openai"), None, "form of a message's content in the chat template: string, or openai's list of parts; auto: as the template needs", engines=_GPU, harmless=("auto", "string")),
    Option("option.engine_args", "engine_args", json_object, None, "a JSON object of the engine's arguments, by its own names; they override other options", engines=_GPU),
)  # fmt: skip
