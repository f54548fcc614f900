"""llama.cpp's servers as a kind of server by URL, used by their own API. The engine is that of `engine.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from handler.core.values import Task
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import gguf_file
from handler.engines.llamacpp import engine
from handler.engines.llamacpp.files import model_directory, served_file
from handler.engines.llamacpp.servers import SOFTWARE, served_path
from handler.engines.openai.kind import ServerKind


class LlamaCppKind(ServerKind):
    software = SOFTWARE
    owner = "llamacpp"
    tasks = (Task.GENERATION, Task.EMBEDDING, Task.RERANK)
    reads_gguf = True
    capabilities = staticmethod(engine.capabilities)
    load = staticmethod(engine.load)
    load_tokenizer = staticmethod(engine.load_tokenizer)
    structured_output_check = staticmethod(engine.structured_output_check)

    def fetch(self, model_id: str | None, config: EngineConfig) -> str | None:
        if gguf_file(model_id) is None:
            return super().fetch(model_id, config)
        return engine.fetch(model_id, config)

    def directory(self, model_id: str | None, config: EngineConfig) -> Path | None:
        urls = config.engine_options.get("base_url", ())
        file = served_path(urls) if model_id is None else served_file(model_id)
        return None if file is None else model_directory(file)

    def checks_structured_output(self, urls: Sequence[str]) -> bool:
        return True


KINDS = {"llamacpp": LlamaCppKind()}
