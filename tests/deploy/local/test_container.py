"""The container's process: what it is started with, its log, and its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deploy.emulator.container import Command, Container, command
from deploy.errors import DeployError, Failed
from tests.process_tree import alive
from tests.servers import PATIENCE, wait_for

T = TypeVar("T")


def python(code: str, **environment: str) -> Command:
    return Command((sys.executable, "-c", code), environment)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def test_sagemaker_s_argument_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMI_CACHE", "/somewhere")
    made = command(None, 8123, ["option.max_model_len=64", "job_queue_size=2"], "echo")
    assert made.arguments == (sys.executable, "-m", "handler.container", "serve")
    assert dict(made.environment) == {
        "SAGEMAKER_BIND_TO_PORT": "8123",
        "LMI_HOST": "127.0.0.1",
        "LMI_CACHE": "/somewhere",
        "OPTION_MAX_MODEL_LEN": "64",
        "SERVING_JOB_QUEUE_SIZE": "2",
        "OPTION_LLM_ENGINE": "echo",
        "SAGEMAKER_MODEL_PATH": "/dev/null",
        "OPTION_MODEL_ID": "demo",
    }


def test_a_directory_is_sagemaker_s_model_data_and_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = command(str(tmp_path), 1, [], None).environment
    assert directory["SAGEMAKER_MODEL_PATH"] == str(tmp_path)
    assert "OPTION_MODEL_ID" not in directory
    file = tmp_path / "m.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert command("m.gguf", 1, [], None).environment["OPTION_MODEL_ID"] == str(file)
    assert command(str(file), 1, [], None).environment["OPTION_MODEL_ID"] == str(file)


@pytest.mark.parametrize("name", ["owner/model", "owner/model/file.gguf", "demo"])
def test_a_name_that_is_no_path_stays(name: str) -> None:
    assert command(name, 1, [], None).environment["OPTION_MODEL_ID"] == name


@pytest.mark.parametrize("option", ["a", "=b", ""])
def test_an_option_without_a_name_or_a_value(option: str) -> None:
    with pytest.raises(DeployError, match="must be NAME=VALUE"):
        command(None, 1, [option], None)


def test_the_shell_s_settings_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPTION_ENGINE", "SERVING_X", "HF_TOKEN", "SAGEMAKER_MODEL_PATH", "LMI_API_KEY"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("MINE", "stays")
    lines: list[str] = []

    async def go() -> None:
        container = Container(lines.append)
        code = "import os; print(sorted(name for name in os.environ if os.environ[name] in ('mine', 'stays', 'set')))"
        await container.start(python(code, OPTION_X="set"))
        await container.wait_for_exit()
        await container.stop()

    run(go())
    assert lines == ["['MINE', 'OPTION_X']"]


def test_its_death_has_its_status_and_last_lines() -> None:
    shown: list[str] = []

    async def go(code: str) -> Failed:
        container = Container(shown.append)
        await container.start(python(code))
        try:
            return await container.wait_for_exit()
        finally:
            await container.stop()

    failed = run(go("import sys\nfor i in range(30): print('line', i)\nprint('at last', file=sys.stderr)\nsys.exit(3)"))
    assert str(failed) == "the container ended with status 3"
    assert failed.advice == "Its last lines:\n" + "\n".join(f"  line {i}" for i in range(11, 30)) + "\n  at last"
    assert len(shown) == 31
    assert str(run(go("import os; os.kill(os.getpid(), 9)"))) == "the container was ended by SIGKILL"
    assert run(go("pass")).advice == "It wrote nothing."


def test_a_line_without_end_and_bytes_that_are_no_text_do_no_harm() -> None:
    shown: list[str] = []

    async def go() -> None:
        container = Container(shown.append)
        code = "import sys; sys.stdout.buffer.write(b'x' * 3_000_000 + b'\\n\\xff end\\nrest')"
        await container.start(python(code))
        await container.wait_for_exit()
        await container.stop()

    run(go())
    assert shown[-2:] == ["� end", "rest"]
    assert "(a line too long to show)" in shown


def test_sigterm_first_and_sigkill_for_who_stays(tmp_path: Path) -> None:
    """Its children go with it."""
    shown: list[str] = []
    children: list[int] = []
    stays = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )

    async def go() -> int:
        container = Container(shown.append)
        await container.start(python(stays))
        while not shown:
            await asyncio.sleep(0.01)
        children.append(int(shown[0]))
        return await container.stop(1.5)

    assert run(go()) == -9
    assert shown[1:] == ["asked", "still there 1.5 s after SIGTERM: SIGKILL, as SageMaker does"]
    wait_for(lambda: not alive(children[0]), PATIENCE, "its child is left behind")


def test_one_that_leaves_at_sigterm_is_not_killed() -> None:
    leaves = (
        "import signal, sys, time\n"
        "def leave(*_):\n    print('finishing', flush=True); time.sleep(0.1); print('done', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    shown: list[str] = []

    async def go() -> int:
        container = Container(shown.append)
        await container.start(python(leaves))
        while not shown:
            await asyncio.sleep(0.01)
        return await container.stop()

    assert run(go()) == 0
    assert shown == ["up", "finishing", "done"]


def test_a_child_that_left_its_group_does_not_hold_up_the_end() -> None:
    """It has the log's pipe, and is nobody's to end."""
    away = "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True); print('up', flush=True)"

    async def go() -> float:
        lines: list[str] = []
        container = Container(lines.append)
        await container.start(python(f"{away}; import time; time.sleep(60)"))
        while not lines:
            await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        await container.stop(5)
        return asyncio.get_running_loop().time() - began

    assert run(go()) < 15


def test_its_death_is_seen_while_a_child_lives_on() -> None:
    away = "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True)"

    async def go() -> tuple[str, float]:
        container = Container(lambda line: None)
        began = asyncio.get_running_loop().time()
        await container.start(python(f"{away}; raise SystemExit(3)"))
        failed = await container.wait_for_exit()
        await container.stop(5)
        return str(failed), asyncio.get_running_loop().time() - began

    said, seconds = run(go())
    assert said == "the container ended with status 3"
    assert seconds < 15
