"""A model as a host serves it."""

from __future__ import annotations

from typing import NamedTuple

from handler import schemas
from handler.adapter_registry import AdapterHome
from handler.config import Config
from handler.engines.base import Tokenizer
from handler.engines.guide_checks import GuideChecks
from handler.engines.remote import RemoteEngine
from handler.engines.worker import Spec
from handler.formatters.loading import Formatters
from handler.launch import guide_checks, schema_context
from handler.schemas.base import Context, Schema


class LoadedModel(NamedTuple):
    """All that a host needs; the engine may still be loading."""

    config: Config
    engine: RemoteEngine
    tokenizer: Tokenizer
    schema: Schema
    context: Context
    formatters: Formatters
    adapters: AdapterHome
    guides: GuideChecks | None = None


def loaded_model(
    config: Config,
    spec: Spec,
    engine: RemoteEngine,
    tokenizer: Tokenizer,
    formatters: Formatters,
    adapters: AdapterHome,
) -> LoadedModel:
    schema = schemas.choose(rolling_batch=config.rolling_batch, tgi_compat=config.tgi_compat)
    context = schema_context(config, spec, adapters.registry)
    return LoadedModel(config, engine, tokenizer, schema, context, formatters, adapters, guide_checks(spec, engine))
