"""The compared handlers, each as the model directory from which DJL starts it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
_ALL = {
    "engine": "Python",
    "option.max_rolling_batch_size": "256",
    "option.output_formatter": "jsonlines",  # DJL 0.25 knows no `stream` in a request
    "job_queue_size": "2000",
    "minWorkers": "1",
    "maxWorkers": "1",
}


class Handler(NamedTuple):
    """A compared handler.

    Attributes:
        own: its lines of serving.properties, beside those of all handlers.
        source: its model.py, if it needs one.
        paced: its engine keeps the pace by itself.
    """

    name: str
    own: dict[str, str]
    source: Path | None = None
    is_ours: bool = False
    paced: bool = False

    @property
    def options(self) -> dict[str, str]:
        """The options that DJL's Java side sends when it loads the model."""
        return {key.removeprefix("option."): value for key, value in (_ALL | self.own).items()}

    def write(self, directory: Path) -> Path:
        """Make the model's directory."""
        directory.mkdir(parents=True)
        if self.source:
            shutil.copyfile(self.source, directory / "model.py")
        lines = [f"{key}={value}\n" for key, value in (_ALL | self.own).items()]
        (directory / "serving.properties").write_text("".join(lines))
        return directory


_ASYNC = {"option.rolling_batch": "disable", "option.async_mode": "true"}

NULL = Handler("null", {"option.rolling_batch": "auto"}, _HERE / "null.py")
NULL_ASYNC = Handler("null, async", _ASYNC, _HERE / "null_async.py")
UPSTREAM = Handler("upstream", {"option.rolling_batch": "trtllm", "option.model_id": "none"}, _HERE / "upstream.py")


FREE = Handler(
    "ours, engine that costs nothing",
    {"option.rolling_batch": "auto", "option.llm_engine": "echo"},
    _HERE / "free.py",
    is_ours=True,
)


def ours(isolation: str, pace: float = 0.0, *, asynchronous: bool = False) -> Handler:
    """Make our handler.

    Args:
        isolation: place of its engine, process or thread.
        pace: steps a second; 0: no limit.
        asynchronous: in async mode, else in rolling batch.
    """
    own = {
        "option.entryPoint": "handler.entry",
        "option.llm_engine": "echo",
        "option.engine_isolation": isolation,
        "option.echo_tokens_per_second": f"{pace:g}",
        "option.lmi_version": "0.28",  # a line a token, in each mode
        **(_ASYNC if asynchronous else {"option.rolling_batch": "auto"}),
    }
    return Handler(f"ours, echo in a {isolation}{', async' * asynchronous}", own, is_ours=True, paced=True)
