"""An engine that uses servers by URL. It sends them token ids, and gets token ids.

This handler still processes text, stop strings, chat templates and errors itself. Whatever depends on the kind of the
servers is asked of their `ServerKind` (`kind.py`).
"""

from __future__ import annotations

from pathlib import Path

from handler.core.errors import ConfigError
from handler.engines.base import Capabilities, Engine, EngineConfig, StructuredOutputCheck, Tokenizer
from handler.engines.huggingface.files import gguf_file
from handler.engines.llamacpp.files import is_model_directory, served_file
from handler.engines.llamacpp.parameters import check_pooling
from handler.engines.openai.kind import ServerKind
from handler.engines.openai.kinds import KINDS, find_kind
from handler.engines.remote.servers import RemoteOptions

__all__ = [
    "capabilities",
    "check",
    "checks_structured_output",
    "fetch",
    "load",
    "load_tokenizer",
    "prepare",
    "structured_output_check",
]

_GGUF = "the MODEL can be a .gguf file only for llama.cpp's servers: use the model's Hugging Face directory"


class UrlSetting(RemoteOptions):
    """The options of the engine, which are checked before it is loaded."""

    def urls(self, config: EngineConfig) -> tuple[str, ...]:
        """Return the servers' addresses, after checking the task.

        Raises:
            ConfigError: a kind of server does not support the model's task, or option.base_url is not set.
        """
        check_pooling(config)
        if (kind := _chosen(config)) is not None:
            kind.check_task(config)
        return super().urls(config)

    def check_model(self, model_id: str | None, config: EngineConfig) -> None:
        reader = _reader(model_id, config)
        tells = model_id is None and reader.reads_gguf  # at startup, the servers are asked for their file
        if not tells and gguf_file(model_id) is None:
            super().check_model(model_id, config)

    def prepare(self, model_id: str | None, config: EngineConfig) -> Path:
        """Return the directory of the model's tokenizer, chat template and config, which a GGUF file also contains.

        Raises:
            ConfigError: the model does not exist, or has no tokenizer.
        """
        directory = _reader(model_id, config).directory(model_id, config)
        return super().prepare(model_id, config) if directory is None else directory


_SETTING = UrlSetting("openai", "http://host:8000/v1")
check, prepare = _SETTING.check, _SETTING.prepare


def _chosen(config: EngineConfig) -> ServerKind | None:
    """Return the kind that option.base_url_kind names, or None for `auto`."""
    return KINDS.get(config.engine_options.get("base_url_kind", "auto"))


def _kind(config: EngineConfig) -> ServerKind:
    """Return the kind of the servers. If option.base_url_kind is auto, ask them first.

    Raises:
        ConfigError: the kind of no server can be determined, the kinds differ, or the kind lacks the task.
    """
    check_pooling(config)
    kind = _chosen(config) or KINDS[find_kind(_SETTING.urls(config))]
    kind.check_task(config)
    return kind


def _reader(model_id: str | None, config: EngineConfig) -> ServerKind:
    """Return a kind, as far as it is known, whose servers can have loaded a model.

    Raises:
        ConfigError: the MODEL is a GGUF file, which is not enough for the servers.
    """
    chosen = _chosen(config)
    is_gguf = gguf_file(model_id) is not None or served_file(model_id) is not None
    for kind in KINDS.values() if chosen is None else (chosen,):
        if kind.reads_gguf or not is_gguf:
            return kind
    raise ConfigError(f"option.base_url_kind={config.engine_options['base_url_kind']}: {_GGUF}")


def fetch(model_id: str | None, config: EngineConfig) -> str | None:
    """Download a model's files except the weights, or the GGUF file of llama.cpp's servers; see `engines.fetch`."""
    return _reader(model_id, config).fetch(model_id, config)


def capabilities(config: EngineConfig) -> Capabilities:
    return _kind(config).capabilities(config)


def checks_structured_output(config: EngineConfig) -> bool:
    """Return whether clients' schemas and grammars are checked here.

    The back ends of vLLM, Dynamo and SGLang's other back ends are not installed here.
    """
    return _kind(config).checks_structured_output(_SETTING.urls(config))


def structured_output_check(config: EngineConfig) -> StructuredOutputCheck:
    return _kind(config).structured_output_check(config)


def load(config: EngineConfig) -> Engine:
    kind = _kind(config)
    if not kind.reads_gguf and config.model is not None and is_model_directory(config.model):
        raise ConfigError(f"the servers are of the kind {kind.software.name}: {_GGUF}")
    return kind.load(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    return _kind(config).load_tokenizer(config)
