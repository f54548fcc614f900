"""The process in which the real executor runs. Here it does nothing but be there, and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tensorrt_llm._double.api import MANNERS

# Open MPI starts a daemon, and this the worker. Open MPI 5 gives each a process group of its own, in our session.
_DAEMON = """
import os, subprocess, sys
os.setpgid(0, 0)
sleep = "import time; print(flush=True); time.sleep(300)"
sys.exit(subprocess.call([sys.executable, "-S", "-c", sleep, "-m", "mpi4py.futures.server"]))
"""


class Imitated:
    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _DAEMON]
        self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._daemon.stdout is not None
        with self._daemon.stdout as said:
            said.readline()  # the worker is there
        self._closing = False
        if not MANNERS.silent_mpi:
            threading.Thread(target=self._follow, name="double-mpi", daemon=True).start()

    @property
    def dead(self) -> bool:
        return self._daemon.poll() is not None

    def close(self) -> None:
        self._closing = True
        if not self.dead:
            os.killpg(self._daemon.pid, signal.SIGKILL)
            self._daemon.wait()

    def _follow(self) -> None:
        """Open MPI 5 ends the process whose worker has died."""
        self._daemon.wait()
        if not self._closing:
            os._exit(1)


class Spawned:
    """As MpiPoolSession in llmapi/mpi_session.py does it. The worker is busy outside of MPI, as the executor is."""

    def __init__(self) -> None:
        from mpi4py.futures import MPIPoolExecutor

        self._directory = tempfile.TemporaryDirectory()
        self._end = Path(self._directory.name, "end")
        os.mkfifo(self._end)
        self._pool: Any = MPIPoolExecutor(max_workers=1, path=sys.path)
        self._pid: int = self._pool.submit(os.getpid).result()  # where the spawn fails, this comes never
        self._work = self._pool.submit(exec, f"open({str(self._end)!r}).close()")  # waits for a writer

    @property
    def dead(self) -> bool:
        try:
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    def close(self) -> None:
        self._end.open("w").close()
        self._work.result()
        self._pool.shutdown(wait=True)
        self._directory.cleanup()


def start() -> Imitated | Spawned | None:
    """
    Raises:
        RuntimeError: it died in the start, or could not be started.
    """
    launched = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"))
    if launched and "TLLM_SPAWN_PROXY_PROCESS" not in os.environ:
        raise RuntimeError("MPI_Comm_spawn failed: All nodes which are allocated for this job are already filled.")
    if MANNERS.init_fails:
        raise RuntimeError("Executor worker died during initialization")
    if MANNERS.mpi:
        return Spawned()
    return Imitated() if MANNERS.worker else None
