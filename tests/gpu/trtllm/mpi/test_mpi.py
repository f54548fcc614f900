"""Workers of the real MPI, spawned as TensorRT-LLM does it, under Open MPI 4 (Debian 12's) and 5 (from PyPI).

The double's executor stands for TensorRT-LLM; MPI_Comm_spawn, the daemon and the worker are Open MPI's own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from handler.core.errors import GenerationFailed
from handler.core.values import Finish
from handler.engines.process.supervisor import EngineSupervisor
from tests.clients import toolchains
from tests.gpu.trtllm.cases import Served, served
from tests.process_tree import descendants

_ASK = """
import mpi4py
from mpi4py import MPI
print(mpi4py.__path__[0])
print(next(line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line))
print(MPI.Get_library_version())
"""

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(params=[4, pytest.param(5, marks=pytest.mark.nightly)])
def mpi(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """mpi4py can be imported, and finds this Open MPI."""
    version: int = request.param
    python = toolchains.python(f"openmpi{version}", Path(__file__).parent)
    if version == 4:
        _need_debians()
        monkeypatch.setenv("PATH", f"/usr/bin:{os.environ['PATH']}")
    else:
        monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    package, library, name = asked.stdout.splitlines()[:3]
    if not name.startswith(f"Open MPI v{version}."):
        _unable(f"Open MPI {version} is needed, not {name}")
    monkeypatch.setenv("MPI4PY_LIBMPI", library)  # our interpreter would take the system's
    monkeypatch.setenv("PYTHONPATH", str(Path(package).parent))  # the worker's own interpreter reads it
    monkeypatch.syspath_prepend(str(Path(package).parent))
    for name in ("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.delenv(name, raising=False)
    return version


def _need_debians() -> None:
    if shutil.which("mpirun", path="/usr/bin") and shutil.which("orted", path="/usr/bin"):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        _unable("Open MPI 4 is needed: apt-get install openmpi-bin libopenmpi-dev")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-qy"]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "install", "--no-install-recommends", "openmpi-bin", "libopenmpi-dev"], check=True)


def _unable(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _worker(engine: EngineSupervisor, mpi: int) -> int:
    assert engine.pid is not None
    started = descendants(engine.pid)
    assert any(command.startswith("prte " if mpi == 5 else "orted ") for command in started.values()), started
    (found,) = [pid for pid, command in started.items() if command.endswith("-m mpi4py.futures.server")]
    return found


def _answers(found: Served) -> bool:
    id = found.submit(max_new_tokens=5, ignore_eos=True)
    return found.run(60)[id][-1].finish is Finish.LENGTH


def _gone(pids: dict[int, str]) -> bool:
    deadline = time.monotonic() + 20
    while any(_alive(pid, command) for pid, command in pids.items()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _alive(pid: int, command: str) -> bool:
    """It is there, and no other process has got its number."""
    shown = subprocess.run(["ps", "-ww", "-o", "stat=,args=", "-p", str(pid)], capture_output=True, text=True).stdout
    return shown.partition(" ")[2].strip() == command and shown[0] != "Z"


def test_a_killed_engine_leaves_no_worker(model: Path, mpi: int) -> None:
    """That of Open MPI 5 has a process group of its own, and would keep the GPU's memory."""
    with served(model, "mpi") as found:
        pid = found.engine.pid
        assert pid is not None
        worker = _worker(found.engine, mpi)
        assert os.getpgid(worker) != pid
        started = descendants(pid)
        lost = found.submit(max_new_tokens=400, ignore_eos=True)
        os.kill(pid, signal.SIGKILL)
        assert isinstance(found.run()[lost][-1].error, GenerationFailed)
        assert _gone(started)
        assert _answers(found)


def test_a_killed_worker_ends_the_engine_and_a_new_one_serves(
    model: Path, mpi: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Open MPI 4 tells nobody of it; 5 ends the engine by itself, if it comes first."""
    with served(model, "mpi") as found:
        first = found.engine.pid
        lost = found.submit(max_new_tokens=400, ignore_eos=True)
        while not found.batcher.step(timeout=0.5):
            pass
        worker = _worker(found.engine, mpi)
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        error = found.run()[lost][-1].error
        assert isinstance(error, GenerationFailed)
        assert time.monotonic() - began < 20
        if mpi == 4:
            assert "it exited with code 1" in str(error)
            assert f"the engine's process mpi4py (pid {worker}) has ended" in capfd.readouterr().err
        assert _answers(found)
        second = found.engine.pid
        assert second is not None
        assert second != first
        started = descendants(second)
        capfd.readouterr()
    assert _gone(started)
    assert "the engine's process" not in capfd.readouterr().err, "an orderly close is no death"
