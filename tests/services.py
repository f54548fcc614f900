"""A `Service` on the echo engine, for tests that need an event loop but no HTTP."""

from __future__ import annotations

from handler.config.loader import load_config
from handler.plugins.loading import Formatters
from handler.scheduler.lora.registry import AdapterHome, AdapterRegistry
from handler.serving.launch import engine_spec, load_tokenizer, start_engine
from handler.serving.model import loaded_model
from handler.serving.service import Service


async def echo_service() -> Service:
    """Ready; the caller closes it."""
    config = load_config(overrides=["option.llm_engine=echo"], environ={})
    spec = engine_spec(config)
    adapters = AdapterHome(AdapterRegistry())
    service = Service(
        loaded_model(config, spec, start_engine(config, spec), load_tokenizer(spec), Formatters(), adapters)
    )
    service.start()
    await service.opened
    return service
