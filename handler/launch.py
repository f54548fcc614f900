"""The command `lmi launch`: coding agents, the settings by which each uses this server, and the start of a server."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from handler.config import environment
from handler.config.engines import LLM_ENGINES
from handler.config.model_files import cache_directory
from handler.core.child_processes import die_with_parent, python
from handler.core.command_line import KeptLines, Parser, add_repeatable
from handler.core.errors import ConfigError, log_words

_URL = "http://127.0.0.1:8080"  # where `lmi serve` listens
_MIN_CONTEXT = 32_000  # tokens: an agent's first prompt, with room for work
_TIMEOUT = 10.0  # seconds for an answer
_MAX_BYTES = 1 << 22  # of an answer
_LOG_TAIL = 20  # lines of a failed server's log


class Served(NamedTuple):
    """The model that an agent uses.

    Attributes:
        url: of the server, without a trailing slash.
        key: "none" for a server without keys: agents require one.
        context: tokens; None if the server does not report it.
    """

    url: str
    key: str
    model: str
    context: int | None


class Settings(NamedTuple):
    """Environment variables and arguments of an agent.

    Attributes:
        variables: those that are None stay unset.
        arguments: come before the user's.
        command: arguments for a user who gives none.
    """

    variables: Mapping[str, str | int | None]
    arguments: Sequence[str] = ()
    command: Sequence[str] = ()


class Agent(NamedTuple):
    """A coding agent's program."""

    title: str
    install: str
    settings: Callable[[Served], Settings]


def _claude(served: Served) -> Settings:
    models = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    keys = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY")
    variables: dict[str, str | int | None] = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_API_KEY": "",  # the user's own is for Anthropic, and a terminal would be asked about it
        **{f"ANTHROPIC_{name}": served.model for name in models},
        **{f"CLAUDE_CODE_USE_{cloud}": "" for cloud in ("BEDROCK", "VERTEX", "FOUNDRY")},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": served.context,  # else it assumes 1,000,000
    }
    # `env` of the user's settings.json beats variables, and --settings beats that. Other users can read arguments.
    own = {name: str(value) for name, value in variables.items() if value is not None and name not in keys}
    return Settings(variables, ["--settings", json.dumps({"env": own})])


def _codex(served: Served) -> Settings:
    provider = {"name": "lmi", "base_url": f"{served.url}/v1", "wire_api": "responses", "env_key": "LMI_KEY"}
    values: dict[str, Any] = {
        "model": served.model,
        "model_provider": "lmi",
        "model_context_window": served.context,
        "web_search": "disabled",  # the server has none
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "otel.metrics_exporter": "none",
        "features.plugins": False,
        "features.apps": False,
        **{f"model_providers.lmi.{name}": value for name, value in provider.items()},
    }
    # TOML writes these values as JSON does, but has no escapes for halves of characters.
    pairs = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if value is not None]
    return Settings({"LMI_KEY": served.key}, [word for pair in pairs for word in ("-c", pair)])


def _opencode(served: Served) -> Settings:
    limit = {"limit": {"context": served.context, "output": served.context // 4}} if served.context else {}
    config = {
        "model": f"lmi/{served.model}",
        "small_model": f"lmi/{served.model}",
        "share": "disabled",
        "autoupdate": False,
        "provider": {
            "lmi": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "lmi",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
                "models": {served.model: {"name": served.model, **limit}},
            }
        },
    }
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "true"})


def _goose(served: Served) -> Settings:
    variables: dict[str, str | int | None] = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": served.model,
        "OPENAI_HOST": served.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": served.key,
        "GOOSE_CONTEXT_LIMIT": served.context,  # else it assumes 128,000
        "GOOSE_TELEMETRY_ENABLED": "false",
    }
    return Settings(variables, command=["session"])  # alone, it asks for settings first


def _aider(served: Served) -> Settings:
    variables = {
        "AIDER_OPENAI_API_KEY": served.key,
        "AIDER_SHOW_MODEL_WARNINGS": "false",  # that it does not know the model
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_ANALYTICS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks GitHub for prices
    }
    # Not variables: those of a project's .env beat them.
    return Settings(variables, ["--model", f"openai/{served.model}", "--openai-api-base", f"{served.url}/v1"])


AGENTS = {
    "claude": Agent("Claude Code", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("Codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("OpenCode", "npm install -g opencode-ai", _opencode),
    "goose": Agent("goose", "brew install block-goose-cli", _goose),
    "aider": Agent("aider", "uv tool install --python 3.12 aider-chat", _aider),
}
"""Agents by the names of their programs."""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "launch",
        help="run a coding agent on a served model",
        usage="lmi launch AGENT [MODEL] [-h] [--url URL] [--name NAME] [--print] [-o KEY=VALUE ...] [-- ARGUMENT ...]",
        formatter_class=KeptLines,
        description="Run a coding agent on the server at --url, or on one that serves MODEL and ends with the agent.\n"
        "--engine, --properties and -o start one too. "
        "Words after -- go to the agent. Agents:\n"
        + "\n".join(f"  {name:<9} {agent.title}" for name, agent in AGENTS.items())
        + "\nLMI_API_KEY is the server's key.",
    )
    parser.add_argument("agent", choices=[*AGENTS], metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("model", nargs="?", metavar="MODEL", help="start a server of this model, as lmi serve does")
    parser.add_argument("--url", help=f"a running server (default: {_URL})")
    parser.add_argument("--name", help="a model name from /v1/models, such as an adapter's (default: the first)")
    parser.add_argument("--print", action="store_true", help="print the settings for a shell; run nothing")
    parser.add_argument("--engine", help=f"engine of MODEL's server: {', '.join(LLM_ENGINES)}")
    parser.add_argument("--properties", type=Path, metavar="FILE", help="a serving.properties file for MODEL's server")
    add_repeatable(parser, "-o", "options", "KEY=VALUE", "an option for MODEL's server")
    parser.set_defaults(run=_launch)

    def ours(words: Sequence[str]) -> Sequence[str]:
        own = [*itertools.takewhile(lambda word: word != "--", words)]
        parser.set_defaults(words=[*words[len(own) + 1 :]])
        return own

    parser.rewrite = ours


def _launch(arguments: argparse.Namespace) -> int:
    """Replace this process with the agent, which thereby gets its signals, its terminal and its exit status."""
    name, agent = arguments.agent, AGENTS[arguments.agent]
    starts = any((arguments.model, arguments.engine, arguments.properties, arguments.options))
    if starts and (arguments.url or arguments.print):
        arguments.parser.error(
            f"--{'url' if arguments.url else 'print'} is for a running server; MODEL, --engine, --properties and -o "
            "start another"
        )
    if starts and sys.platform != "linux":
        raise ConfigError(
            "lmi launch: only on Linux does the server end with the agent; start one with `lmi serve MODEL`"
        )
    if shutil.which(name) is None and not arguments.print:
        raise ConfigError(f"lmi launch: {agent.title} is not installed ({name} is not on PATH): {agent.install}")
    if starts:
        url, key = _started(arguments)
    else:
        url, key = (arguments.url or _URL).rstrip("/").removesuffix("/v1"), environment.api_key()
    served = _find(url, key, arguments.name)
    variables, before, command = agent.settings(served)
    known = {**_direct(url), **{name: str(value) for name, value in variables.items() if value is not None}}
    words = [name, *before, *(arguments.words or command)]
    if arguments.print:
        print(*(f"export {variable}={shlex.quote(value)}" for variable, value in known.items()), sep="\n")
        print(shlex.join(words), flush=True)
        return 0
    if served.context is not None and served.context < _MIN_CONTEXT:
        has = f"the context of {served.model} is {served.context} tokens"
        _say(f"{has}; an agent needs {_MIN_CONTEXT} (option.max_model_len)")
    os.execvpe(name, words, {**os.environ, **known})


def _direct(url: str) -> dict[str, str]:
    """Return variables that make requests to this machine bypass proxies."""
    host = urlsplit(url).hostname or ""
    if host not in ("127.0.0.1", "localhost", "::1"):
        return {}
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = others if others.strip() == "*" else ",".join(filter(None, [others, host]))
    return {"NO_PROXY": value, "no_proxy": value}


def _find(url: str, key: str, name: str | None) -> Served:
    """Ask a server for its models.

    Raises:
        ConfigError: nothing answers, or not with a list of models; or no model has that name.
    """
    try:
        models = json.loads(_get(f"{url}/v1/models", key))["data"]
        contexts = {str(model["id"]): model.get("max_model_len") for model in models}
        model = name or next(iter(contexts))
    except urllib.error.HTTPError as error:
        hint = "; LMI_API_KEY is its key" if error.code in (401, 403) else ""
        raise ConfigError(f"lmi launch: {url}/v1/models answers with status {error.code}{hint}") from None
    except OSError as error:
        why = getattr(error, "reason", error)
        raise ConfigError(
            f"lmi launch: no server answers at {url} ({why}): start one with `lmi serve MODEL`, or give MODEL here"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        raise ConfigError(f"lmi launch: {url}/v1/models does not return a list of models") from None
    if model not in contexts:
        raise ConfigError(f"lmi launch: {url} has no model {model}; it has {log_words(', '.join(contexts))}")
    context = contexts[model]
    return Served(url, key or "none", model, context if isinstance(context, int) else None)


def _get(url: str, key: str) -> bytes:
    import http.client  # here: the two take longer than all else of a command line
    import urllib.request

    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    proxies = urllib.request.ProxyHandler({} if _direct(url) else None)  # None: the environment's
    try:
        with urllib.request.build_opener(proxies).open(request, timeout=_TIMEOUT) as answer:
            return bytes(answer.read(_MAX_BYTES))
    except http.client.HTTPException as error:
        raise OSError(repr(error)) from None  # a wrong URL, or no HTTP server


# -- a server of its own, a child of the process that becomes the agent ------------------------------------------------


def _started(arguments: argparse.Namespace) -> tuple[str, str]:
    """Start a server on a free port of loopback; return its URL and its key once it is ready.

    Raises:
        ConfigError: the server ended before it was ready.
    """
    key = environment.api_key() or secrets.token_urlsafe(16)  # keeps other users of this machine out
    words = ["--port", "0", *filter(None, [arguments.model])]
    words += ["--engine", arguments.engine] if arguments.engine else []
    words += ["--properties", str(arguments.properties)] if arguments.properties else []
    words += [word for option in arguments.options for word in ("-o", option)]
    log = cache_directory() / "launch.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    _say(f"starting a server; its log is {log}")
    descriptor, made = tempfile.mkstemp(dir=log.parent)
    os.replace(made, log)  # that of a launch before stays open to its server
    with open(descriptor, "r+b") as output:
        server = subprocess.Popen(
            python("handler.cli:run", json.dumps(["serve", *words])),
            env={**os.environ, "LMI_API_KEY": os.environ.get("LMI_API_KEY") or key, "LMI_LOG_FORMAT": "text"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is the agent's
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
        try:
            return _wait(server, output.fileno(), key), key
        except BaseException:
            server.terminate()
            server.wait()
            raise


def _wait(server: subprocess.Popen[bytes], log: int, key: str) -> str:
    """Return the URL of a server that is ready, from its log: another launch may have replaced the file meanwhile."""
    while server.poll() is None:
        found = re.search(r"^listening on (https?://[^\s;]+);", _read(log), re.MULTILINE)
        if found and _ready(found[1], key):
            return found[1]
        time.sleep(0.1)
    tail = "\n".join(_read(log).splitlines()[-_LOG_TAIL:])
    raise ConfigError(f"lmi launch: the server ended with status {server.returncode}:\n{tail}")


def _read(log: int) -> str:
    return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")  # the server's place in it stays


def _ready(url: str, key: str) -> bool:
    try:
        _get(f"{url}/ping", key)
    except OSError:  # 503 while it loads
        return False
    return True


def _say(text: str) -> None:
    print(f"lmi launch: {text}", file=sys.stderr, flush=True)
