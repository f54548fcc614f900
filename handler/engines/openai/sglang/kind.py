"""SGLang's servers as a kind of server by URL, used by their own API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from handler.core.values import Task
from handler.engines.base import Capabilities, EngineConfig, Tokenizer
from handler.engines.huggingface.pooling import HfPoolingTokenizer
from handler.engines.openai.kind import ServerKind
from handler.engines.openai.sglang.api import SGLANG
from handler.engines.openai.sglang.check import SglangCheck, uses_xgrammar
from handler.engines.openai.sglang.embeddings import SglangPooling
from handler.engines.openai.sglang.engine import SglangEngine
from handler.engines.remote.sglang import SOFTWARE


class SglangKind(ServerKind):
    software = SOFTWARE
    owner = "sglang"
    tasks = (Task.GENERATION, Task.EMBEDDING)
    no_task = "score only texts, not tokens; llamacpp also computes scores"

    def capabilities(self, config: EngineConfig) -> Capabilities:
        return replace(SGLANG, no_adapters="") if config.engine_options.get("enable_lora") else SGLANG

    def load(self, config: EngineConfig) -> SglangEngine | SglangPooling:
        return SglangEngine(config, self) if config.task is Task.GENERATION else SglangPooling(config)

    def load_tokenizer(self, config: EngineConfig) -> Tokenizer:
        if config.task is Task.GENERATION:
            return super().load_tokenizer(config)
        return HfPoolingTokenizer(config.model_path, config.chat_template)

    def checks_structured_output(self, urls: Sequence[str]) -> bool:
        return uses_xgrammar(urls)

    structured_output_check = staticmethod(SglangCheck)


KINDS = {"sglang": SglangKind()}
