"""What dialects know of the server: the options and the engine's limits."""

from __future__ import annotations

from pathlib import Path, PurePath

from handler import __version__, engines
from handler.config.config import Config
from handler.config.model_files import DEMO, DEMO_MEMBER, embedding_prompts, label_names, tokenizer_config
from handler.core.media import MEDIA
from handler.core.values import Task
from handler.engines.base import NO_MEDIA
from handler.engines.process.engine_loop import Spec
from handler.protocols.assistant.template import check_defaults
from handler.protocols.kernel.context import DEFAULT_MAX_MEDIA, ServerContext
from handler.protocols.kernel.generation import NO_DEFAULTS
from handler.protocols.lmi.asynchronous import MODEL_NAME
from handler.scheduler.lora.registry import AdapterRegistry
from handler.serving.loading.generation import generation_defaults
from handler.serving.loading.response_template import response_template
from handler.serving.media.kinds import missing_packages


def server_context(config: Config, spec: Spec, adapters: AdapterRegistry) -> ServerContext:
    check_defaults(config)
    able = engines.capabilities(spec.engine, spec.config)
    generation, template = NO_DEFAULTS, None
    shown = config.engine_options.get("echo_tokenizer") or spec.config.source or spec.config.model
    if spec.config.task is Task.GENERATION:
        generation = generation_defaults(config, spec.config.source or spec.config.model, able)
        template = response_template(config, Path(shown) if shown else None)
    names = (config.model_name, config.model_id, *(config.served_model_name or (MODEL_NAME,)))
    options = {**config.engine_options, **config.engine_options.get("engine_args", {})}
    most = options.get("limit_mm_per_prompt", {})
    max_media = {kind: most.get(kind, DEFAULT_MAX_MEDIA) for kind in MEDIA}
    return ServerContext(
        engine=spec.engine,
        config=config,
        unsupported=able.unsupported,
        limits=able.limits,
        no_adapters=able.no_adapters,
        sampling_defaults=able.sampling_defaults,
        generation=generation,
        adapters=adapters,
        model_names=tuple(filter(None, names)),
        source=_source(config.model_id) if spec.config.model else "",
        fingerprint=f"lmi-{__version__}-{spec.engine}",
        response_template=template,
        task=spec.config.task,
        prompts=embedding_prompts(spec.config.model),
        labels=label_names(spec.config.model) or ("LABEL_0", "LABEL_1"),
        structural_tags=able.structural_tags if "structured_output" not in able.unsupported else frozenset(),
        no_media={
            kind: able.no_media.get(kind, NO_MEDIA)
            or ("" if max_media[kind] else "option.limit_mm_per_prompt is 0")
            or missing_packages(kind)
            for kind in MEDIA
        },
        max_media=max_media,
        tokenizer_config=tokenizer_config(Path(shown)) if shown and config.enable_tokenizer_info_endpoint else {},
    )


def _source(model_id: str | None) -> str:
    """Return what people call a model: the last part of its path or address."""
    return PurePath(DEMO_MEMBER).stem if model_id in (None, DEMO) else PurePath(model_id).name
