"""A model as a host serves it."""

from __future__ import annotations

from typing import NamedTuple

from handler.config.loader import Config
from handler.engines.base import Tokenizer
from handler.engines.process.engine_loop import Spec
from handler.engines.process.supervisor import EngineSupervisor
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.loading import Formatters
from handler.protocols import registry
from handler.protocols.base import Schema, ServerContext
from handler.scheduler.lora.registry import AdapterHome
from handler.serving.launch import make_validator, schema_context


class LoadedModel(NamedTuple):
    """All that a host needs; the engine may still be loading."""

    config: Config
    engine: EngineSupervisor
    tokenizer: Tokenizer
    schema: Schema
    context: ServerContext
    formatters: Formatters
    adapters: AdapterHome
    guides: StructuredOutputValidator | None = None


def loaded_model(
    config: Config,
    spec: Spec,
    engine: EngineSupervisor,
    tokenizer: Tokenizer,
    formatters: Formatters,
    adapters: AdapterHome,
) -> LoadedModel:
    schema = registry.choose(rolling_batch=config.rolling_batch, tgi_compat=config.tgi_compat)
    context = schema_context(config, spec, adapters.registry)
    return LoadedModel(config, engine, tokenizer, schema, context, formatters, adapters, make_validator(spec, engine))
