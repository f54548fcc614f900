"""The settings of `lmi launch`, held against docs/agents.md, and its command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from handler import launch
from handler.cli import main, make_parser
from handler.core.child_processes import Child
from handler.core.errors import ConfigError
from handler.launch import AGENTS, Served
from tests.docs.blocks import Block, parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
SERVED = Served("http://127.0.0.1:8080", "none", "model", 131072)


def documented(language: str, word: str) -> str:
    """The block of the page that has the word."""
    blocks = [item for item in parse(PAGE.read_text()).items if isinstance(item, Block)]
    [block] = [block for block in blocks if block.language == language and word in block.text]
    return block.text


def test_the_page_has_each_agent() -> None:
    lines = PAGE.read_text().splitlines()
    for name, agent in AGENTS.items():
        [row] = [line for line in lines if line.startswith(f"| {agent.title} | `{name}` |")]
        assert row.endswith(f"| `{agent.install}` |")


def test_the_page_has_claude_codes_variables() -> None:
    lines = [line for line in documented("sh", "claude -p").splitlines() if line.startswith("export ")]
    shown = dict(word.split("=", 1) for line in lines for word in shlex.split(line)[1:])
    assert shown == {name: str(value) for name, value in AGENTS["claude"].settings(SERVED).variables.items()}


def test_the_page_has_codexs_settings() -> None:
    variables, words, *_ = AGENTS["codex"].settings(SERVED._replace(websockets=True))
    assert words[::2] == ["-c"] * (len(words) // 2)
    # The launch has names of its own, so that what a user wrote from the page does not change it.
    lines = [word.replace("lmi_launch", "lmi").replace("LMI_LAUNCH_KEY", "LMI_API_KEY") for word in words[1::2]]
    assert tomllib.loads("\n".join(lines)) == tomllib.loads(documented("toml", "model_provider"))
    assert variables == {"LMI_LAUNCH_KEY": "none"}
    assert documented("sh", "codex exec").startswith("LMI_API_KEY=none ")
    page = documented("toml", "model_provider") + documented("sh", "codex exec")
    assert "lmi_launch" not in page
    assert "LMI_LAUNCH_KEY" not in page


def test_codex_tries_no_websocket_that_the_server_does_not_open() -> None:
    words = AGENTS["codex"].settings(SERVED).arguments
    assert "websockets" not in " ".join(words)


def test_codex_takes_any_name_of_a_model() -> None:
    words = AGENTS["codex"].settings(SERVED._replace(model="llama\N{LLAMA}")).arguments
    assert tomllib.loads("\n".join(words[1::2]))["model"] == "llama\N{LLAMA}"


@pytest.mark.parametrize("agent", AGENTS)
def test_nothing_is_said_of_a_context_that_the_server_does_not_tell(agent: str) -> None:
    settings = AGENTS[agent].settings(SERVED._replace(context=None))
    told = {name: value for name, value in settings.variables.items() if value is not None}
    told.update(settings.files)
    assert "131072" not in str((told, settings.arguments))
    assert "None" not in str((told, settings.arguments))


@pytest.mark.parametrize("agent", AGENTS)
def test_no_key_is_in_the_arguments(agent: str) -> None:
    """Other users can read them."""
    settings = AGENTS[agent].settings(SERVED._replace(key="a-secret"))
    assert "a-secret" not in str((settings.arguments, settings.command))
    assert "a-secret" in str((settings.variables, settings.files))


def test_claude_codes_settings_beat_every_key_of_the_users() -> None:
    """As the real one has it: --settings beats the settings of the user and the project, and these the variables."""
    settings = AGENTS["claude"].settings(SERVED._replace(key="servers"))
    own = json.loads(settings.files["--settings"])
    assert own["env"] == {name: str(value) for name, value in settings.variables.items()}
    assert own["env"]["ANTHROPIC_AUTH_TOKEN"] == "servers"
    assert own["env"]["ANTHROPIC_API_KEY"] == own["env"]["ANTHROPIC_CUSTOM_HEADERS"] == own["apiKeyHelper"] == ""


def test_opencode_summarizes_before_the_next_prompt_is_too_long() -> None:
    """Its last prompt may have `input` less `reserved` tokens; the next one has a tool's results and needs `output`."""
    for context in (32_000, 131_072):
        content = AGENTS["opencode"].settings(SERVED._replace(context=context)).variables["OPENCODE_CONFIG_CONTENT"]
        config = json.loads(str(content))
        (model,) = config["provider"]["lmi_launch"]["models"].values()
        limit = model["limit"]
        assert limit["input"] + limit["output"] == limit["context"] == context
        last = limit["input"] - config["compaction"]["reserved"]
        assert context / 2 < last < context - limit["output"] - context / 10
    unknown = AGENTS["opencode"].settings(SERVED._replace(context=None)).variables["OPENCODE_CONFIG_CONTENT"]
    assert "reserved" not in str(unknown)


def test_a_models_name_is_no_variable_of_opencode() -> None:
    """OpenCode would put the user's variable or file there, and send it to the server as the model's name."""
    name = "{env:ANTHROPIC_API_KEY}{file:~/.ssh/id_rsa}"
    content = AGENTS["opencode"].settings(SERVED._replace(model=name)).variables["OPENCODE_CONFIG_CONTENT"]
    assert isinstance(content, str)
    assert not re.search(r"\{(env|file):", content)
    assert json.loads(content)["model"] == f"lmi_launch/{name}"


def test_aider_reads_its_key_as_it_is() -> None:
    """python-dotenv's escapes in single quotes; aider has them read before it looks at its variables."""
    lines = AGENTS["aider"].settings(SERVED._replace(key="a'b\\c#d")).files["--env-file"].splitlines()
    assert "OPENAI_API_KEY='a\\'b\\\\c#d'" in lines


def test_a_settings_file_is_the_users_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path))
    one, two = Path(launch.private_file("one")), Path(launch.private_file("two"))
    assert one != two
    assert one == Path(launch.private_file("one"))
    assert (one.read_text(), one.stat().st_mode & 0o777, one.parent.stat().st_mode & 0o777) == ("one", 0o600, 0o700)
    os.utime(one, (0, 0))
    launch.private_file("two")
    assert [*one.parent.iterdir()] == [two]


def test_a_settings_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot write the agent's settings .*; set LMI_CACHE to a directory of yours"
    ):
        launch.private_file("text")


def test_a_server_is_found_by_its_own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what its engine says, nor by the log of a launch that came after."""
    log = tmp_path / "launch.log"
    log.write_text("gRPC server listening on 127.0.0.1:5\nlistening on http://127.0.0.1:9; docs at /docs\n")
    monkeypatch.setattr(launch, "_ready", lambda url, key: True)
    with log.open("r+b") as file, Child(["sleep", "60"]) as server:
        log.unlink()
        log.write_text("listening on http://127.0.0.1:6;\n")
        assert launch._wait(server, file.fileno(), "") == "http://127.0.0.1:9"
        server.kill()


def test_words_after_dashes_are_the_agents() -> None:
    arguments = make_parser().parse_args(["launch", "codex", "m", "--engine", "echo", "--", "exec", "--url", "--", "x"])
    assert (arguments.model, arguments.url) == ("m", None)
    assert arguments.words == ["exec", "--url", "--", "x"]
    assert make_parser().parse_args(["launch", "codex"]).words == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["claud"], "invalid choice: 'claud'; did you mean claude?"),
        (["claude", "model", "--url", "http://127.0.0.1:9"], "--url is for a running server"),
        (["claude", "--engine", "echo", "--print"], "--print is for a running server"),
    ],
)
def test_command_lines_that_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *words])
    assert said in capsys.readouterr().err
