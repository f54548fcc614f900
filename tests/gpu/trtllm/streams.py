"""Many streams at once through the adapter in its process, on the double's fast executor: does every request end?

python -m tests.gpu.trtllm.streams --streams 256 --seconds 60
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from handler.config.config import Config
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, State
from tests.doubles import tiny, using

_MOST = 64  # tokens of an answer
_QUIET = 5.0  # seconds without a token, after which what has not ended never will


class Figures(NamedTuple):
    begun: int
    ended: int
    failed: int
    tokens: int
    seconds: float  # in which requests were begun
    cpu: float  # seconds of the engine's process, the double's executor among them

    @property
    def never_ended(self) -> int:
        return self.begun - self.ended - self.failed

    def __str__(self) -> str:
        return (
            f"begun {self.begun}, ended {self.ended}, failed {self.failed}, never ended {self.never_ended}; "
            f"{self.tokens / self.seconds:.0f} tokens/s, {self.cpu / max(self.tokens, 1) * 1e6:.1f} us of CPU a token"
        )


class Streams:
    """Keeps so many requests in flight, and counts what becomes of them."""

    def __init__(self, engine: EngineSupervisor, streams: int) -> None:
        self._engine, self._streams = engine, streams
        self._keys = itertools.count(1)
        self._lengths = random.Random(1)
        self._left: dict[int, int] = {}  # tokens that are to come, by key
        self.ended = self.failed = self.tokens = self.begun = 0

    def run(self, seconds: float) -> Figures:
        assert self._engine.pid is not None
        cpu, began = _cpu(self._engine.pid), time.monotonic()
        while time.monotonic() - began < seconds:
            while len(self._left) < self._streams:
                self._begin()
            self._step()
        tokens, spent, cpu = self.tokens, time.monotonic() - began, _cpu(self._engine.pid) - cpu
        heard = time.monotonic()
        while self._left and time.monotonic() - heard < _QUIET:
            if self._step():
                heard = time.monotonic()
        return Figures(self.begun, self.ended, self.failed, tokens, spent, cpu)

    def _begin(self) -> None:
        key, length = next(self._keys), self._lengths.randint(8, _MOST)
        self._left[key] = length
        self.begun += 1
        self._engine.add(EngineRequest(key, [5, 6, 7], Sampling(max_new_tokens=length, ignore_eos=True)))

    def _step(self) -> bool:
        """Whether there was news."""
        news = False
        for step in self._engine.step(timeout=0.1):
            for key in step.keys:
                news = True
                self.tokens += 1
                self._left[key] -= 1
            for output in step.others:
                news = True
                self.tokens += len(output.ids)
                self._left[output.key] -= len(output.ids)
                if output.finish is not None:
                    left = self._left.pop(output.key)
                    self.failed += output.error is not None
                    self.ended += output.error is None
                    assert output.error is not None or left == 0, f"{left} tokens of a request were lost"
        return news


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(model: Path, streams: int, seconds: float, manners: str = "") -> Figures:
    config = EngineConfig(
        Config(max_rolling_batch_size=streams, engine_options={"inactivity_timeout": 600.0}), model=model
    )
    with using.tensorrt_llm(f"fast;{manners}"):
        engine = EngineSupervisor(Spec("trtllm", config), load_timeout=60)
        try:
            while engine.state is State.LOADING:
                engine.step(timeout=1)
            return Streams(engine, streams).run(seconds)
        finally:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--manners", default="pause=0.01", help="the double's, as TLLM_DOUBLE has them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(measure(tiny.make(Path(directory)), given.streams, given.seconds, given.manners))


if __name__ == "__main__":
    main()
