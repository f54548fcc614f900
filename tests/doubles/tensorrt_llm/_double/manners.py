"""Which version is played, and what goes wrong: `TLLM_DOUBLE=version=1.2.1;die_after=50;burst=3`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass

MISUSES: list[str] = []
"""What the adapter did that real versions punish with a hang, or with wrong answers."""


class Misuse(SystemExit):
    """Nothing catches it by accident: it ends the process, or the test."""


def misuse(what: str) -> Misuse:
    MISUSES.append(what)
    print(f"TensorRT-LLM's double: {what}", file=sys.stderr, flush=True)
    return Misuse(what)


@dataclass
class Manners:
    """Counts are tokens of all requests together.

    Attributes:
        die_after: then every pending result raises, and the LLM is shutting down.
        death: what they raise: runtime, cpp, or dead (since 1.3, by default there).
        stall_after: then nothing comes any more, without a word.
        stall_error: what a thread of the executor's has met then, and told nobody.
        exit_after: then the process is gone.
        init_fails: the LLM cannot be made.
        burst: tokens an item.
        late_abort: tokens that still come after an abort.
        assert_logprobs: the number of the item with which requests that want log-probabilities fail in reading.
        late_finish: the end comes as an item of its own, without tokens.
        cancel_all: requests end by themselves as cancelled, after as many tokens.
        gpus: how many there seem to be.
        pause: seconds between steps.
        worker: start a process, as MPI's workers are; it does nothing. Its death ends this process, as with Open MPI 5.
        silent_mpi: its death is told to nobody, as with Open MPI 4, and nothing comes any more.
        mpi: start a worker by MPI itself, which must be there.
        notices: what becomes of one to an event loop that does not run: caught by the proxy, or uncaught, which is the
            LLM's end. By default as the version does.
        fast: tokens cost nothing, and follow no model.
    """

    version: str = "1.2.1"
    die_after: int = 0
    death: str = ""
    stall_after: int = 0
    stall_error: str = ""
    exit_after: int = 0
    init_fails: bool = False
    burst: int = 1
    late_abort: int = 0
    assert_logprobs: int = 0
    late_finish: bool = False
    cancel_all: int = 0
    gpus: int = 1
    pause: float = 0.001
    worker: bool = False
    silent_mpi: bool = False
    mpi: bool = False
    notices: str = ""
    fast: bool = False

    @property
    def release(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def notices_are_caught(self) -> bool:
        """The proxy does since October 2025."""
        return self.notices == "caught" if self.notices else self.release >= (1, 2)


def read(text: str) -> Manners:
    found = Manners()
    kinds = {name: type(value) for name, value in asdict(found).items()}
    for part in filter(None, text.split(";")):
        name, _, value = part.partition("=")
        kind = kinds[name]
        setattr(found, name, True if kind is bool else kind(value))
    return found


MANNERS = read(os.environ.get("TLLM_DOUBLE", ""))
"""A test in the same process may change it before it makes an LLM."""
