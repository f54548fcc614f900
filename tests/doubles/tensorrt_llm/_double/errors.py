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
    """The engine is gone: pending requests raise it, and all later ones."""

    def __init__(self, root_cause: BaseException | None = None) -> None:
        self.root_cause = root_cause
        cause = f": {type(root_cause).__name__}: {root_cause}" if root_cause is not None else ""
        super().__init__(f"Engine has died{cause}")
