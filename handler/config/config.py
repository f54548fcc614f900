"""The configuration: every option's value, typed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handler.config.options.common import engine_name


@dataclass(frozen=True)
class Config:
    """Every option, typed and checked; docs/options.md describes the fields."""

    model_id: str | None
    model_name: str
    served_model_name: tuple[str, ...] | None
    llm_engine: str
    rolling_batch: str
    max_rolling_batch_size: int
    task: str
    dtype: str
    tensor_parallel_degree: str
    replicas: str
    output_formatter: str | None
    input_formatter: str | None
    tgi_compat: bool
    openai_compat: bool
    root_schema: str
    enable_streaming: bool
    enable_force_include_usage: bool
    unknown_parameters: str
    tool_call_parser: str
    tool_parser_plugin: str | None
    reasoning_parser: str | None
    chat_template: str | None
    default_chat_template_kwargs: Mapping[str, Any] | None
    predict_timeout: float
    request_time_limit: float | None
    model_loading_timeout: float
    engine_timeout: float
    event_loop_timeout: float
    engine_isolation: str
    max_model_len: int | None
    max_input_len: int | None
    max_num_batched_tokens: int | None
    kv_cache_gib: int
    enable_prefix_caching: bool | None
    log_prompts: bool
    client_timeout: float
    keep_alive_timeout: float
    batch_size: int
    max_batch_delay: int
    job_queue_size: int
    max_request_size: int
    tgi_metrics: bool
    otlp_traces_endpoint: str | None
    cloudwatch_metrics_interval: float
    enable_stateful_sessions: bool
    sessions_expiration: int
    sessions_max: int
    sessions_path: str | None
    allowed_media_domains: tuple[str, ...] | None
    allowed_local_media_path: str | None
    max_image_bytes: int
    max_image_pixels: int
    image_fetch_timeout: float
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # the engine's own, without its defaults
    warnings: tuple[str, ...] = ()
    directory: Path | None = field(default=None, compare=False)  # of serving.properties
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)  # key -> origin of its value

    @property
    def engine(self) -> str:
        """Name of the engine; "" where llm_engine and rolling_batch contradict each other."""
        return engine_name(self.llm_engine, self.rolling_batch)

    @property
    def label(self) -> str:
        """Name of the model in metrics and traces: the first of option.served_model_name, as in vLLM."""
        return next((name for name in self.served_model_name or () if name != "*"), self.model_name)

    def where(self, key: str) -> str:
        return self.origins.get(key, "default")
