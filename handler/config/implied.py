"""The settings that other settings imply in LMI, and the engine that settings select."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from handler.config import lmi_version
from handler.config.engines import LLM_ENGINES
from handler.config.options import images
from handler.config.options.tables import BY_ROLLING_BATCH, ROLLING_BATCHES, TASKS, engine_name
from handler.config.sources import Setting
from handler.core.numbers import is_digits

_HANDLERS = {"trtllm": "trtllm", "tensorrt_llm": "trtllm", "vllm": "vllm"}
"""Maps a part of a djl_python module name to the engine that the module runs."""

_OF_JAVA = ("rust", "onnxruntime", "pytorch")
_POOLS = frozenset(name for task, aliases in TASKS.items() if task != "text-generation" for name in (task, *aliases))
_TRANSLATORS = ("ai.djl.huggingface.translator.TextEmbeddingTranslatorFactory",)
_RENAMED = {"option.runner": "option.task", "option.convert": "option.task", "option.s3url": "option.model_id"}
"""Maps two vLLM options, and the former LMI name of option.model_id, to the options that they set."""


def as_lmi_reads(
    settings: Iterable[Setting], environ: Mapping[str, str], djl: str, *, java: bool, is_mode_set: bool
) -> list[Setting]:
    """Add settings that other settings imply in LMI. Drop or override settings that have a different meaning in LMI.

    The DJL Serving version, async mode, and variables of AWS's other images imply the LMI release. An LMI module in
    option.entryPoint implies the engine. In async mode, Java does not batch, and requires option.rolling_batch=disable.
    In other modes, a batch_size above 1 selects dynamic batching, and option.rolling_batch then selects only the
    engine.

    Args:
        settings: the settings from all sources, in order of increasing precedence.
        environ: the environment.
        djl: the version of DJL Serving if it runs the handler, or "".
        java: whether DJL Serving runs the handler, and therefore reads the names of its modules itself.
        is_mode_set: whether the host has determined the mode in which Java calls the handler.

    Returns:
        The translated settings, in order of increasing precedence.
    """
    settings = list(settings)
    last = {setting.key: setting for setting in settings}
    mode = _async_mode(last)
    weak = [*_release(mode, environ, djl), *_renamed(last)]  # put before the settings
    strong: list[Setting] = []  # put after them
    omitted = {*_RENAMED}
    rolling = last.get("option.rolling_batch", Setting("", "auto", ""))
    batch = _dynamic_batch(last) if mode is None and not is_mode_set else None
    if batch is not None:
        strong.append(Setting("option.rolling_batch", "disable", batch.origin))
        if engine := BY_ROLLING_BATCH.get(rolling.value.strip()):
            weak.append(Setting("option.llm_engine", engine, batch.origin))
    if not java:
        if (djl_engine := java_engine(last)) is not None:
            strong.append(Setting("option.task", "pooling", djl_engine.origin))  # the files determine the exact task
            weak.append(Setting("option.async_mode", "false", djl_engine.origin))
            omitted.update((djl_engine.key, "translatorFactory"))
        module = last.get("option.entryPoint", Setting("", "", ""))
        engines = [engine for word, engine in _HANDLERS.items() if word in module.value]
        if module.value.startswith("djl_python.") and engines:
            weak.insert(0, Setting("option.llm_engine", engines[0], module.origin))
            omitted.add("option.entryPoint")
        if mode is not None and last.get("option.async_mode", mode) is mode:
            weak.append(Setting("option.async_mode", "true", mode.origin))
            settings = [item for item in settings if item.key != rolling.key or item.value.strip() != "disable"]
        elif not strong and rolling.value.strip() == "scheduler":  # `auto` chooses no mode
            weak.append(Setting("option.async_mode", "false", rolling.origin))
    return [*weak, *(item for item in settings if item.key not in omitted), *strong]


def java_engine(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting that selects a native DJL engine for an embedding or reranking model, or None."""
    engine, task = last.get("engine"), last.get("option.task")
    if engine is None or engine.value.strip().lower() not in _OF_JAVA:
        return None
    translator = last.get("translatorFactory")
    is_other = translator is not None and translator.value.strip() not in _TRANSLATORS
    return None if is_other or (task is not None and task.value.strip() not in _POOLS) else engine


def _async_mode(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting that selects LMI's async mode (option.async_mode or an async handler module), or None."""
    switch, module = last.get("option.async_mode"), last.get("option.entryPoint")
    if switch is not None and switch.value.strip().lower() == "true":
        return switch
    is_async = module is not None and module.value.strip().startswith("djl_python.") and "_async_" in module.value
    return module if is_async else None


def _dynamic_batch(last: Mapping[str, Setting]) -> Setting | None:
    """Return the setting of a batch size above 1, or None if it is missing or option.rolling_batch is `disable`."""
    size, rolling = last.get("batch_size") or last.get("max_dynamic_batch_size"), last.get("option.rolling_batch")
    if size is None or (rolling is not None and rolling.value.strip() == "disable"):
        return None
    return size if len(size.value) < 20 and is_digits(size.value.strip()) and int(size.value) > 1 else None


def _release(mode: Setting | None, environ: Mapping[str, str], djl: str) -> Iterator[Setting]:
    """Yield implied settings of option.lmi_version, in order of increasing precedence. The option overrides them."""
    for name in sorted(name for name in environ if name.startswith(images.ALL))[:1]:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), f"environment variable {name}")
    if mode is not None:
        yield Setting(lmi_version.KEY, str(lmi_version.ASYNC), mode.origin)
    if (version := lmi_version.release_of(djl)) is not None:
        yield Setting(lmi_version.KEY, str(version), f"DJL Serving {djl}")


def _renamed(last: Mapping[str, Setting]) -> Iterator[Setting]:
    """Yield settings whose keys are in `_RENAMED`, with the new keys. Other settings of the new keys override them."""
    for key, option in _RENAMED.items():
        if key in last and (key != "option.convert" or last[key].value.strip() not in ("auto", "none")):
            yield last[key]._replace(key=option)


def selected_engine(settings: Iterable[Setting], auto: str) -> str:
    """Return the name of the engine that settings select, or "" for an unknown engine or contradictory settings.

    The engine must be known before values are checked, because engines may have different options with the same name.

    Args:
        settings: the settings, in order of increasing precedence.
        auto: the engine to return if no setting selects an engine.
    """
    texts = {"option.llm_engine": "auto", "option.rolling_batch": "auto"}
    texts |= {setting.key: setting.value.strip() for setting in settings if setting.key in texts}
    llm_engine, rolling_batch = texts.values()
    if llm_engine not in LLM_ENGINES or rolling_batch not in ROLLING_BATCHES:
        return ""
    if llm_engine == "auto" and rolling_batch not in BY_ROLLING_BATCH:
        return auto
    return engine_name(llm_engine, rolling_batch)
