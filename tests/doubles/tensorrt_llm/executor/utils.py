"""Errors, by the names of the version that is played."""

from __future__ import annotations

from tensorrt_llm._double.api import MANNERS, CppExecutorError, EngineDeadError, RequestError

__all__ = ["CppExecutorError", "RequestError"]

_DEAD: type[Exception] = EngineDeadError
del EngineDeadError


def __getattr__(name: str) -> type[Exception]:
    if name == "EngineDeadError" and MANNERS.release >= (1, 3):
        return _DEAD
    raise AttributeError(name)
