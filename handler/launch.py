"""The command `lmi launch`, which runs a coding agent with a running server or with a new server."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from handler.config import environment
from handler.config.engines import LLM_ENGINES
from handler.config.model_files import cache_directory
from handler.config.options.option import beginning
from handler.core.child_processes import Child, die_with_parent, python
from handler.core.command_line import KeptLines, Parser, add_repeatable
from handler.core.errors import ConfigError, log_words

_URL = "http://127.0.0.1:8080"  # where `lmi serve` listens
_MIN_CONTEXT = 32_000  # tokens: an agent's first prompt, with room for work
_TIMEOUT = 10.0  # seconds for a response
_MAX_BYTES = 1 << 22  # maximum size of a response
_END_SECONDS = 10.0  # for a server to end, if it is not needed
_LOG_TAIL = 20  # lines of a failed server's log
_PROVIDER, _KEY = "lmi_launch", "LMI_LAUNCH_KEY"  # not the documented names, which users' files may define
_MAX_NAME = 1000  # characters of a model's name
_KEEP = 30 * 86_400.0  # seconds that an agent's settings file is kept after its launch


class Served(NamedTuple):
    """The model that an agent uses.

    Attributes:
        url: the URL of the server, without a trailing slash.
        key: the API key of the server, or "none" if no key is set, because agents require a key.
        model: the name of the model on the server.
        context: the context length in tokens, or None if the server does not report it.
        websockets: whether the server is known to open WebSockets for responses.
    """

    url: str
    key: str
    model: str
    context: int | None
    websockets: bool = False


class Settings(NamedTuple):
    """Environment variables and arguments for an agent.

    Attributes:
        variables: environment variables to set. A variable with the value None is not set.
        arguments: arguments to insert before those of the user.
        command: default arguments, used if the user passes no arguments.
        files: maps each option that takes a file to the contents of the file. Only the user can read these files.
            Secrets are passed in files or variables, because other users can read arguments.
    """

    variables: Mapping[str, str | int | None]
    arguments: Sequence[str] = ()
    command: Sequence[str] = ()
    files: Mapping[str, str] = MappingProxyType({})


class Agent(NamedTuple):
    """A coding agent.

    Attributes:
        install: the command that installs the agent.
        settings: the function that creates its settings.
        uses_websockets: whether its settings depend on whether the server opens WebSockets.
        skills: the directories of skills that it reads, below a project and below the home directory, or None.
    """

    title: str
    install: str
    settings: Callable[[Served], Settings]
    uses_websockets: bool = False
    skills: tuple[str, str] | None = None


_SHARED_SKILLS = (".agents/skills", ".agents/skills")
"""The directories of skills that several agents read (agentskills.io; each agent's documentation, 2026)."""


def _claude(served: Served) -> Settings:
    models = ("MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS", "FABLE")))
    clouds = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD")
    variables: dict[str, str | int | None] = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_API_KEY": "",  # the user's key is for Anthropic, and Claude Code would ask whether to use it
        "ANTHROPIC_CUSTOM_HEADERS": "",  # may contain another server's key
        **{f"ANTHROPIC_{name}": served.model for name in models},
        **{f"CLAUDE_CODE_USE_{cloud}": "" for cloud in clouds},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": served.context,  # else it assumes 1,000,000
    }
    # `env` in the settings files of the user and the project overrides variables, and Claude Code sends the key of
    # their apiKeyHelper beside ANTHROPIC_AUTH_TOKEN. --settings overrides both (code.claude.com/docs, "Settings").
    values = {name: str(value) for name, value in variables.items() if value is not None}
    return Settings(variables, files={"--settings": json.dumps({"env": values, "apiKeyHelper": ""})})


def _codex(served: Served) -> Settings:
    provider: dict[str, Any] = {
        "name": "lmi",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "env_key": _KEY,
        # Codex tries a server without WebSockets seven times, which takes 18 seconds.
        "supports_websockets": served.websockets or None,
    }
    values: dict[str, Any] = {
        "model": served.model,
        "model_provider": _PROVIDER,
        "model_context_window": served.context,
        "web_search": "disabled",  # the server has none
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "otel.metrics_exporter": "none",
        "features.plugins": False,
        "features.apps": False,
        **{f"model_providers.{_PROVIDER}.{name}": value for name, value in provider.items()},
    }
    # TOML writes these values as JSON does, but has no escapes for surrogates.
    pairs = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if value is not None]
    return Settings({_KEY: served.key}, [word for pair in pairs for word in ("-c", pair)])


def _opencode(served: Served) -> Settings:
    limit: dict[str, Any] = {}
    compaction: dict[str, Any] = {}
    if context := served.context:
        output = context // 4
        limit["limit"] = {"context": context, "input": context - output, "output": output}
        # OpenCode summarizes a session once a prompt was longer than `input` minus this number of tokens. The next
        # prompt also contains tool results, and the server refuses a prompt that leaves no room for `output`.
        compaction["compaction"] = {"reserved": context // 8}
    model = f"{_PROVIDER}/{served.model}"
    config = {
        "model": model,
        "small_model": model,
        "agent": {name: {"model": model} for name in ("build", "plan", "general", "explore")},
        "enabled_providers": [_PROVIDER],  # the user's other providers get no prompts
        "disabled_providers": [],
        "share": "disabled",
        "autoupdate": False,
        **compaction,
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "lmi",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
                "models": {served.model: {"name": served.model, **limit}},
            }
        },
    }
    # OpenCode replaces {env:NAME} and {file:PATH} (opencode.ai/docs/config, "Variables"), also in a server's words.
    text = re.sub(r"\{(?=env:|file:)", r"\\u007b", json.dumps(config))
    return Settings({"OPENCODE_CONFIG_CONTENT": text, "OPENCODE_DISABLE_MODELS_FETCH": "true"})


def _goose(served: Served) -> Settings:
    variables: dict[str, str | int | None] = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": served.model,
        "OPENAI_HOST": served.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": served.key,
        "OPENAI_CUSTOM_HEADERS": "",  # may contain another server's key
        "GOOSE_LEAD_PROVIDER": "openai",  # else the user's lead and planner models get prompts
        "GOOSE_PLANNER_PROVIDER": "openai",
        "GOOSE_PLANNER_MODEL": served.model,
        "GOOSE_CONTEXT_LIMIT": served.context,  # else it assumes 128,000
        "GOOSE_TELEMETRY_ENABLED": "false",
    }
    return Settings(variables, command=["session"])  # without a command, goose starts by asking for settings


def _aider(served: Served) -> Settings:
    model, base = f"openai/{served.model}", f"{served.url}/v1"
    variables = {
        "AIDER_OPENAI_API_KEY": served.key,
        "AIDER_API_KEY": f"openai={served.key}",  # else `api-key` in .aider.conf.yml replaces the key
        "AIDER_SHOW_MODEL_WARNINGS": "false",  # aider warns of a model that it does not know
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_ANALYTICS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks GitHub for prices
        "OPENAI_API_KEY": served.key,
        "OPENAI_BASE_URL": base,  # LiteLLM prefers it to OPENAI_API_BASE
        "OPENAI_API_BASE": base,
    }
    # aider lets .env of the home, the repository and the directory override variables, and --env-file override those.
    file = "\n".join(f"{name}='{_dotenv(value)}'" for name, value in variables.items())
    arguments = ["--model", model, "--weak-model", model, "--editor-model", model, "--openai-api-base", base]
    # With the model in this file, aider does not ask GitHub for its context length and price.
    metadata = {"litellm_provider": "openai", "mode": "chat", "input_cost_per_token": 0, "output_cost_per_token": 0}
    if served.context:
        metadata |= {"max_input_tokens": served.context, "max_tokens": served.context}
    return Settings(
        variables, arguments, files={"--env-file": file, "--model-metadata-file": json.dumps({model: metadata})}
    )


def _dotenv(value: str) -> str:
    """Escape a value for single quotes in a .env file."""
    return value.replace("\\", "\\\\").replace("'", "\\'")


AGENTS = {
    "claude": Agent(
        "Claude Code",
        "npm install -g @anthropic-ai/claude-code",
        _claude,
        skills=(".claude/skills", ".claude/skills"),
    ),
    "codex": Agent("Codex", "npm install -g @openai/codex", _codex, uses_websockets=True, skills=_SHARED_SKILLS),
    "opencode": Agent(
        "OpenCode",
        "npm install -g opencode-ai",
        _opencode,
        skills=(".opencode/skills", ".config/opencode/skills"),
    ),
    "goose": Agent("goose", "brew install block-goose-cli", _goose, skills=(".agents/skills", ".config/agents/skills")),
    "aider": Agent("aider", "uv tool install --python 3.12 aider-chat", _aider),
}
"""Maps the program name of each agent to the agent."""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "launch",
        help="run a coding agent that uses a served model",
        usage="lmi launch AGENT [MODEL] [-h] [--url URL] [--name NAME] [--print] [-o KEY=VALUE ...] [-- ARGUMENT ...]",
        formatter_class=KeptLines,
        description="Run a coding agent on the server at --url. With MODEL, --engine, --properties or -o, start a "
        "server for the agent instead, and stop it when the agent exits. Arguments after -- are passed to the agent. "
        "The environment variable LMI_API_KEY sets the server's key. Agents:\n"
        + "\n".join(f"  {name:<9} {agent.title}" for name, agent in AGENTS.items()),
    )
    parser.add_argument("agent", choices=[*AGENTS], metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("model", nargs="?", metavar="MODEL", help="start a server for this model, as lmi serve does")
    parser.add_argument("--url", help=f"URL of a running server (default: {_URL})")
    parser.add_argument("--name", help="a model name from /v1/models, such as an adapter's (default: the first)")
    parser.add_argument("--print", action="store_true", help="print the settings as shell commands; run nothing")
    parser.add_argument("--engine", help=f"engine of MODEL's server: {', '.join(LLM_ENGINES)}")
    parser.add_argument("--properties", type=Path, metavar="FILE", help="a serving.properties file for MODEL's server")
    add_repeatable(parser, "-o", "options", "KEY=VALUE", "an option for MODEL's server")
    parser.set_defaults(run=_launch)

    def ours(words: Sequence[str]) -> Sequence[str]:
        command = [*takewhile(lambda word: word != "--", words)]
        parser.set_defaults(words=[*words[len(command) + 1 :]])
        return command

    parser.rewrite = ours


def _launch(arguments: argparse.Namespace) -> int:
    """Replace this process with the agent, so that the agent receives signals and sets the exit status."""
    url, key = _server(arguments)
    served = _find(url, key, arguments.name)
    agent = AGENTS[arguments.agent]
    if agent.uses_websockets:
        served = served._replace(websockets=_has_websockets(url, key))
    settings = agent.settings(served)
    variables = _direct(url) | {name: str(value) for name, value in settings.variables.items() if value is not None}
    files = chain(*((option, private_file(text)) for option, text in settings.files.items()))
    words = [arguments.agent, *settings.arguments, *files, *(arguments.words or settings.command)]
    if arguments.print:
        print(*(f"export {name}={shlex.quote(value)}" for name, value in variables.items()), sep="\n")
        print(shlex.join(words), flush=True)
        return 0
    if served.context is not None and served.context < _MIN_CONTEXT:
        _say(
            f"the context length of {served.model} is {served.context} tokens, but an agent needs {_MIN_CONTEXT}; "
            "use a model with a longer context, or increase option.max_model_len if it is below the model's own"
        )
    os.execvpe(words[0], words, {**os.environ, **variables})


def _server(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the URL and the API key of the server for the agent. Start the server if an argument describes one.

    Raises:
        ConfigError: if the agent is not installed, or if the server cannot be started.
    """
    starts = any((arguments.model, arguments.engine, arguments.properties, arguments.options))
    if starts and (arguments.url or arguments.print):
        arguments.parser.error(
            f"--{'url' if arguments.url else 'print'} is for a running server and cannot be used with MODEL, --engine, "
            "--properties or -o, which start a server"
        )
    if starts and sys.platform != "linux":
        raise ConfigError(
            "lmi launch: MODEL, --engine, --properties and -o need Linux, where the server stops with the agent; start "
            "a server with `lmi serve MODEL`, and omit these arguments"
        )
    name, agent = arguments.agent, AGENTS[arguments.agent]
    if shutil.which(name) is None and not arguments.print:
        raise ConfigError(f"lmi launch: {agent.title} is not installed ({name} is not on PATH): {agent.install}")
    if starts:
        return _started(arguments)
    return (arguments.url or _URL).rstrip("/").removesuffix("/v1"), environment.api_key()


def _direct(url: str) -> dict[str, str]:
    """Return environment variables that make requests to a URL on this machine bypass proxies."""
    host = urlsplit(url).hostname or ""
    if host not in ("127.0.0.1", "localhost", "::1"):
        return {}
    bypassed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = bypassed if bypassed.strip() == "*" else ",".join(filter(None, [bypassed, host]))
    return {"NO_PROXY": value, "no_proxy": value}


def _find(url: str, key: str, name: str | None) -> Served:
    """Find a model on a server by its name, or the first model if `name` is None.

    Raises:
        ConfigError: if the server does not return a list of models, or if it has no model with this name.
    """
    try:
        models = json.loads(_get(f"{url}/v1/models", key))["data"]
        contexts = {str(model["id"]): model.get("max_model_len") for model in models}
        model = name or next(iter(contexts))
    except urllib.error.HTTPError as error:
        error.close()
        hint = "; set LMI_API_KEY to the server's key" if error.code in (401, 403) else ""
        if 300 <= error.code < 400:  # the key is for this server only
            hint = f", a redirect to {log_words(error.headers.get('Location') or 'nowhere')}; set --url to that server"
        raise ConfigError(f"lmi launch: {url}/v1/models returned status {error.code}{hint}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"lmi launch: cannot reach a server at {url} ({reason}): start a server with `lmi serve MODEL`, "
            "or pass MODEL"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        raise ConfigError(f"lmi launch: {url}/v1/models does not return a list of models") from None
    if model not in contexts:
        raise ConfigError(f"lmi launch: {url} has no model {model}; its models are {log_words(', '.join(contexts))}")
    if not model.isprintable() or len(model) > _MAX_NAME:  # a terminal, a shell and an agent's files get it
        raise ConfigError(
            f"lmi launch: {url} has a model name that is not printable or is longer than {_MAX_NAME} characters: "
            f"{beginning(model)}; set --name to another model of this server"
        )
    context = contexts[model]
    return Served(url, key or "none", model, context if type(context) is int and context > 0 else None)


def _get(url: str, key: str) -> bytes:
    import http.client  # these two are too slow to import in every command
    import urllib.request

    class Refused(urllib.request.HTTPRedirectHandler):
        """Raises HTTPError for a redirect, because urllib would send the key to the other host."""

        def redirect_request(self, *_: object) -> None:
            return None

    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    proxies = urllib.request.ProxyHandler({} if _direct(url) else None)  # None reads proxies from the environment
    try:
        with urllib.request.build_opener(proxies, Refused).open(request, timeout=_TIMEOUT) as answer:
            return bytes(answer.read(_MAX_BYTES))
    except http.client.HTTPException as error:
        raise OSError(repr(error)) from None  # the URL is wrong, or the server does not speak HTTP


def _has_websockets(url: str, key: str) -> bool:
    """Return whether a server opens a WebSocket for responses. A proxy in front of it may prevent this."""
    from websockets.exceptions import WebSocketException  # too slow to import in every command
    from websockets.sync.client import connect

    try:
        with connect(
            f"ws{url.removeprefix('http')}/v1/responses",
            additional_headers={"Authorization": f"Bearer {key}"} if key else {},
            proxy=None if _direct(url) else True,
            open_timeout=_TIMEOUT,
            close_timeout=_TIMEOUT,
        ):
            return True
    except (OSError, WebSocketException, ImportError):  # ImportError: a SOCKS proxy needs another package
        return False


def private_file(text: str) -> str:
    """Write the text to a file that only the user can read, and return the path of the file.

    The agent may read the file as long as it runs, so the file is deleted only by a much later launch. The file name is
    a hash of the text, so a launch with other settings writes another file.
    """
    folder = cache_directory() / "launch"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        path = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"lmi launch: cannot write the agent's settings ({error}); set LMI_CACHE to a directory of yours"
        ) from None
    for other in folder.iterdir():
        with contextlib.suppress(OSError):  # another launch has deleted it
            if other.stat().st_mtime < time.time() - _KEEP:
                other.unlink()
    return str(path)


# -- a server for the agent, as a child of the process that becomes the agent ------------------------------------------


def _started(arguments: argparse.Namespace) -> tuple[str, str]:
    """Start a server on a free loopback port, wait until it is ready, and return its URL and API key.

    Raises:
        ConfigError: if the server exits before it is ready.
    """
    key = environment.api_key() or secrets.token_urlsafe(16)  # keeps other users of this machine out
    log = cache_directory() / "launch.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    _say(f"starting a server; it logs to {log}")
    descriptor, file = tempfile.mkstemp(dir=log.parent)
    os.replace(file, log)  # a server of an earlier launch goes on writing to the replaced file
    with open(descriptor, "r+b") as output:
        server = Child(
            python("handler.cli:run", json.dumps(_serve_words(arguments))),
            env={
                **environment.of_embedded_server(),
                "LMI_API_KEY": os.environ.get("LMI_API_KEY") or key,
                "LMI_LOG_FORMAT": "text",
            },
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that Ctrl-C reaches only the agent
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
        try:
            return _wait(server, output.fileno(), key), key
        except BaseException:
            server.end(_END_SECONDS, signal.SIGTERM)
            raise


def _serve_words(arguments: argparse.Namespace) -> list[str]:
    """Return the words of the command `lmi serve` that follow the program name."""
    words = ["serve", "--port", "0", *filter(None, [arguments.model])]
    words += ["--engine", arguments.engine] if arguments.engine else []
    words += ["--properties", str(arguments.properties)] if arguments.properties else []
    return words + [word for option in arguments.options for word in ("-o", option)]


def _wait(server: Child, log: int, key: str) -> str:
    """Wait until a server is ready, and return the URL that its log contains.

    Args:
        log: the file descriptor of the log. It is used instead of the path, because another launch may have replaced
            the file.
    """
    while server.poll() is None:
        response = re.search(r"^listening on (https?://[^\s;]+);", _read(log), re.MULTILINE)
        if response and _ready(response[1], key):
            return response[1]
        time.sleep(0.1)
    tail = "\n".join(beginning(line) for line in _read(log).splitlines()[-_LOG_TAIL:])
    raise ConfigError(f"lmi launch: the server exited with status {server.returncode}:\n{tail}")


def _read(log: int) -> str:
    return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")  # does not move the server's file offset


def _ready(url: str, key: str) -> bool:
    try:
        _get(f"{url}/ping", key)
    except OSError:  # 503 while it loads
        return False
    return True


def _say(text: str) -> None:
    print(f"lmi launch: {text}", file=sys.stderr, flush=True)
