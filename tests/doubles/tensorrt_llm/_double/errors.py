"""What is raised."""

from __future__ import annotations


class RequestError(RuntimeError):
    """One request failed."""


class CppExecutorError(RuntimeError):
    """The executor's C++ thread failed."""

    def __init__(self, message: str | None = None) -> None:
        self.message, self.stack_trace = message, ""
        super().__init__(message)


class EngineDeadError(RuntimeError):
    """The engine is gone."""
