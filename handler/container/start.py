"""The container's main program, which turns arguments and environment into the server's command and runs it."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from handler import __version__
from handler.config.environment import SECURE_MODE, secure_mode, warning_without_keys
from handler.config.loader import read_config
from handler.config.options.names import FRONTS
from handler.container import djl
from handler.container.arguments import (
    ContainerArguments,
    ModelSource,
    Translation,
    find_model,
    read_arguments,
    translated_environment,
)
from handler.container.supervisor import Address, run_as_init, supervise
from handler.core.devices import DriverCheck, GpuDriver, check_driver, read_driver
from handler.core.errors import ConfigError, Problem, Problems, refuse
from handler.core.log import captured, set_up
from handler.core.terminal import escaping

log = logging.getLogger("handler.container")

_CACHES = {
    "LMI_CACHE": "lmi",  # converted models
    "HF_HOME": "huggingface",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
}
"""Variables for directories that engines write to, and their default directories below LMI_SCRATCH."""


_NOT_SECURE = (
    f"{SECURE_MODE}=true: DJL Serving's secure mode refuses the entry point of this handler; set LMI_FRONT=embedded, "
    "whose server honors each of SAGEMAKER_SECURITY_CONTROLS"
)


class Start(NamedTuple):
    """A server's command and environment.

    Attributes:
        supervised: where DJL Serving listens, which this process must drain at SIGTERM and restart. None if the server
            does this itself.
    """

    command: list[str]
    environ: Mapping[str, str]
    supervised: Address | None


@escaping()
def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process with the server, or run the server and return its exit status."""
    signal.signal(signal.SIGTERM, _exit)  # the kernel drops the signal for a process 1 without a handler
    try:
        as_json = set_up({**os.environ, "LMI_LOG_LEVEL": "INFO"})
        start = prepare(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        log.error("cannot start: %s", error)
        return 2
    except OSError as error:
        log.error("cannot start: %s", error)
        return 1
    sys.stderr.flush()
    if start.supervised is not None:
        with captured(as_json):
            return supervise(start.command, start.environ, start.supervised)
    if os.getpid() == 1:
        return run_as_init(start.command, start.environ)
    # A signal that arrives now stays pending until `lmi serve` has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.execve(start.command[0], start.command, dict(start.environ))


def prepare(argv: Sequence[str], environ: Mapping[str, str], driver: GpuDriver | None = None) -> Start:
    """Prepare the server's command and environment. For DJL Serving, this writes files below LMI_SCRATCH.

    Args:
        driver: the GPU driver. By default, it is read from NVML.

    Raises:
        ConfigError: if the server cannot start. The error contains all problems.
        OSError: if the scratch directory is not writable.
    """
    problems = Problems()
    arguments, gpus = ContainerArguments(0), DriverCheck("")
    translation, source = Translation(environ, ()), ModelSource(None, None, {})
    with problems:
        arguments = read_arguments(argv, environ)
    if (model := _model_of(arguments.options)) is not None:
        environ = {**environ, "OPTION_MODEL_ID": model}  # a flag overrides the variable
    front = environ.get("LMI_FRONT") or "embedded"
    if front not in FRONTS:
        problems.append(Problem("", "", f"environment variable LMI_FRONT={front}: must be {' or '.join(FRONTS)}"))
    if front == "djl" and secure_mode(environ):
        problems.append(Problem(f"environment variable {SECURE_MODE}", SECURE_MODE, _NOT_SECURE))
    log.info("lmi-handler %s, front %s, port %d", __version__, front, arguments.port)
    driver = driver or read_driver()
    with problems:
        gpus = check_driver(driver, environ)
    with problems:
        translation = translated_environment(environ)
    for line in filter(None, (gpus.line, *translation.lines)):
        log.info("%s", line)
    with problems:
        source = find_model(translation.environ, needed=_needs_model(arguments, environ))
        _log(source)
    with problems:
        _check_caches(translation.environ, source)
    scratch = Path(environ.get("LMI_SCRATCH") or Path(environ.get("TMPDIR") or "/tmp") / "lmi")
    ready = _server_environment(translation.environ, scratch, gpus.library_path)
    home, server = Path(), list[str]()
    with problems:
        if front == "djl" and not arguments.check:
            home = djl.home(ready)
        else:
            server = embedded_command(arguments, source)
    if problems or not server:  # otherwise `lmi serve` reports the problems of the options
        problems += read_config(
            properties=source.properties, overrides=arguments.options, environ=translation.environ, java=front == "djl"
        ).problems
    problems.check()
    if server:
        environ = ready if arguments.check else with_token(ready)
        return Start(server, environ, supervised=None)
    return _start_of_djl(arguments, source, ready, scratch, home, gpu=driver is not None)


def _needs_model(arguments: ContainerArguments, environ: Mapping[str, str]) -> bool:
    """Return whether the engine needs a model, as all engines but echo do."""
    return "option.llm_engine=echo" not in arguments.options and environ.get("OPTION_LLM_ENGINE") != "echo"


def _server_environment(environ: Mapping[str, str], scratch: Path, library_path: str) -> dict[str, str]:
    """Return the environment of the server, with its caches below `scratch` and `library_path` for the GPU driver."""
    ready = {name: str(scratch / directory) for name, directory in _CACHES.items()} | dict(environ)
    if library_path:
        ready["LD_LIBRARY_PATH"] = ":".join(filter(None, [library_path, environ.get("LD_LIBRARY_PATH")]))
    return ready


def _start_of_djl(
    arguments: ContainerArguments,
    source: ModelSource,
    environ: Mapping[str, str],
    scratch: Path,
    home: Path,
    *,
    gpu: bool,
) -> Start:
    """Write the files of DJL Serving below `scratch`, and return the start of DJL Serving in the directory `home`."""
    if warning := warning_without_keys(arguments.host, checks_keys=False):
        log.warning("%s", warning)
    scratch.mkdir(parents=True, exist_ok=True)
    name = djl.make_model(arguments, source, environ, scratch / "model", djl.version(home))
    configuration = djl.make_configuration(scratch, arguments)
    command = djl.command(home, configuration, name, scratch / "model", gpu=gpu)
    address = Address(arguments.host, arguments.port, name)
    return Start(command, with_token(djl.environment(home, environ, scratch)), supervised=address)


def _model_of(options: Sequence[str]) -> str | None:
    """Return the last value of option.model_id, or None if no option sets it."""
    pairs = (option.partition("=") for option in reversed(options))
    return next((value.strip() for key, _, value in pairs if key.strip() == "option.model_id"), None)


def embedded_command(arguments: ContainerArguments, source: ModelSource) -> list[str]:
    """Make the command of `lmi serve`, which drains itself at SIGTERM.

    Raises:
        ConfigError: if SageMaker's model data contain a model.py but neither a model nor a serving.properties.
    """
    options = [part for option in arguments.options for part in ("-o", option)]
    serve = [sys.executable, "-m", "handler", "serve", "--host", arguments.host]
    serve += ["--port", str(arguments.port), *options, *(["--check"] if arguments.check else [])]
    if source.properties is not None:  # it may name the model itself
        return [*serve, str(source.properties.parent)]
    code = source.directory and source.directory / "model.py"
    if code and code.is_file() and source.model_id != str(source.directory):
        raise ConfigError(f"{code} needs a serving.properties next to it, which may be empty")
    # Not as an option, because that would override the serving.properties of the directory.
    return [*serve, source.model_id] if source.model_id else serve


def _log(source: ModelSource) -> None:
    log.info("model: %s", source.model_id or (f"set in {source.properties}" if source.properties else "none"))
    for name, path in source.channels.items():
        log.info("additional model data: %s in %s", name, path)


def _check_caches(environ: Mapping[str, str], source: ModelSource) -> None:
    refuse(
        f"environment variable {name}={value}: is inside SageMaker's model data, which are read-only"
        for name in _CACHES
        if (value := environ.get(name)) and source.directory and Path(value).is_relative_to(source.directory)
    )


def _exit(sig: int, frame: FrameType | None) -> None:
    os._exit(0)  # an exception in the middle of an import may crash an extension module


# -- the Hugging Face token from Secrets Manager -----------------------------------------------------------------------
# DescribeModel shows a model's environment to everyone who may call it, so the environment has only the secret's ARN.


_ARN = "HF_TOKEN_SECRET_ARN"
_TOKEN = "HF_TOKEN"
_FORM = re.compile(r"arn:aws[\w-]*:secretsmanager:([a-z0-9-]+):[0-9]{12}:secret:\S+")
_TRUE = ("1", "true", "yes", "on")  # as huggingface_hub reads its own switches
_SECONDS = 5

_ADVICE = {
    "AccessDeniedException": ": the execution role needs secretsmanager:GetSecretValue on the secret, and kms:Decrypt "
    "on the secret's KMS key",
    "ResourceNotFoundException": ": the secret does not exist in that account and region",
    "DecryptionFailure": ": the execution role needs kms:Decrypt on the secret's KMS key",
}


def with_token(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment, with the Hugging Face token from the secret in HF_TOKEN_SECRET_ARN if that is set.

    Raises:
        ConfigError: if the secret cannot be fetched, or if HF_TOKEN is also set.
    """
    arn = environ.get(_ARN)
    if not arn:
        return environ
    if environ.get(_TOKEN):
        raise ConfigError(f"{_TOKEN} and {_ARN} are both set: remove {_TOKEN}, as environment variables are not secret")
    region = _FORM.fullmatch(arn)
    if region is None:
        raise ConfigError(f"{_ARN}={arn}: is not a secret's ARN (arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME)")
    if environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        raise ConfigError(
            f"{_ARN} is set, but this container is offline (HF_HUB_OFFLINE) and can reach neither Secrets Manager nor "
            f"the hub: put the model's files into the model data, and remove {_ARN}"
        )
    return {**environ, _TOKEN: _token(arn, _secret_text(arn, region[1]))}


def _secret_text(arn: str, region: str) -> str:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError as error:
        raise ConfigError(f"{_ARN} needs {error.name}, which is not installed in this image") from None
    limits = Config(connect_timeout=_SECONDS, read_timeout=_SECONDS, retries={"total_max_attempts": 3})
    try:
        client = boto3.client("secretsmanager", region_name=region, config=limits)
        answer: dict[str, Any] = client.get_secret_value(SecretId=arn)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "unknown")
        raise ConfigError(f"the secret {arn} cannot be read: {code}{_ADVICE.get(code, '')}") from None
    except BotoCoreError as error:
        raise ConfigError(
            f"the secret {arn} cannot be read: {error} ({type(error).__name__}). The container needs a role, and must "
            f"reach Secrets Manager in {region}. Under network isolation, remove {_ARN}; a VPC without NAT needs an "
            "interface endpoint for secretsmanager"
        ) from None
    if not isinstance(answer.get("SecretString"), str):
        raise ConfigError(f"the secret {arn} is binary: store the token as text")
    return str(answer["SecretString"])


def _token(arn: str, text: str) -> str:
    """Return the token in a secret's text.

    The text is either the token itself or a JSON object that contains the token as the member HF_TOKEN or as its only
    member. Error messages never contain any part of the text.
    """
    text = text.strip("\ufeff \t\r\n")  # a text from a file may have a byte order mark
    if text.startswith("{"):
        try:
            members = json.loads(text)
        except ValueError:
            raise ConfigError(f"the secret {arn} looks like JSON, but is not valid JSON") from None
        text = members.get(_TOKEN, next(iter(members.values()), "") if len(members) == 1 else "")
        if not isinstance(text, str) or not text:
            raise ConfigError(f"the secret {arn} is a JSON object without a string {_TOKEN}")
    if not re.fullmatch(r"[!-~]+", text):
        raise ConfigError(f"the secret {arn} is not a token: a token is one word of printable ASCII characters")
    return text
