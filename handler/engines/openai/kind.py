"""What is asked of a kind of server by URL. `engine.py` asks it about everything in which kinds differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

from handler.core.errors import ConfigError, Problem
from handler.core.media import MEDIA
from handler.core.values import Task
from handler.engines.base import Capabilities, Engine, EngineConfig, StructuredOutputCheck, Tokenizer
from handler.engines.huggingface import files
from handler.engines.remote.servers import Software

NO_MEDIA = dict.fromkeys(MEDIA, "the server at option.base_url receives only tokens")


class ServerKind(ABC):
    """One kind of server by URL.

    Attributes:
        software: the servers' name, and what messages to clients say of them.
        owner: prefix of `owned_by` in the servers' models.
        tasks: the tasks of models that the kind supports.
        no_task: why it does not support the other tasks.
        reads_gguf: whether a GGUF file is enough as the MODEL.
    """

    software: Software
    owner: str
    tasks: ClassVar[Collection[Task]] = (Task.GENERATION,)
    no_task: ClassVar[str] = "only generate text here; llamacpp and sglang also compute embeddings"
    reads_gguf: ClassVar[bool] = False

    def check_task(self, config: EngineConfig) -> None:
        """Raise ConfigError if the kind does not support the model's task."""
        if config.task not in self.tasks:
            servers = f"option.task={config.options.task}: servers of the kind {self.software.name}"
            raise ConfigError(Problem("", "option.task", f"{servers} {self.no_task}"))

    @abstractmethod
    def capabilities(self, config: EngineConfig) -> Capabilities:
        """Return what the servers support."""

    def fetch(self, model_id: str | None, config: EngineConfig) -> str | None:
        """Download what the engine reads of a model; see `engines.fetch`."""
        return files.fetch_descriptions(model_id, config)

    def directory(self, model_id: str | None, config: EngineConfig) -> Path | None:
        """Return the directory with the tokenizer of a GGUF file, or None if `model_id` should name a directory.

        Raises:
            ConfigError: there is no file, or its tokenizer is not supported.
        """
        return None

    @abstractmethod
    def load(self, config: EngineConfig) -> Engine:
        """Return the engine for the model's task."""

    def load_tokenizer(self, config: EngineConfig) -> Tokenizer:
        return files.load_tokenizer(config)

    def checks_structured_output(self, urls: Sequence[str]) -> bool:
        """Return whether clients' schemas and grammars are checked here before the servers at `urls` get them."""
        return False

    def structured_output_check(self, config: EngineConfig) -> StructuredOutputCheck:
        """Load the checker for schemas and grammars; see `engines.structured_output_check`."""
        raise NotImplementedError
