"""The steps of `lmi move`. Each step is a command of `lmi`, and its report says what is proven and what is not."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from deploy.adopt.files import read_file
from deploy.aws import as_deploy_error
from deploy.cli.main import print_error
from deploy.emulator.serving import free_port
from deploy.errors import DeployError
from deploy.spec.options import options_problems
from deploy.spec.reading import read_spec
from handler.cli import main
from handler.config.options.names import KEY_VARIABLES
from handler.core.command_line import print_json
from handler.core.errors import ConfigError
from proof.bench.processes import interrupted_by_sigterm, process
from proof.move.cli import ADOPT
from proof.move.contract import PROFILE_OF_KIND, NoForm, fault
from proof.move.local import Entry, LocalServer, local_server
from proof.replay.comparison import traits
from proof.replay.exchange import Request, Unreadable
from proof.replay.run import beginning, readable
from proof.replay.sources import open_requests
from proof.replay.targets import HttpTarget, Paced

CHECK, START, REPLAY, CONFORM, UNCOMPARED, INTERRUPTED = 6, 7, 8, 9, 10, 130
"""Exit statuses of the steps. Those of `lmi deploy` are 1 to 5."""
STEPS = ("adopt", "check", "start", "replay", "conform")
_MAX_FINDINGS = 3  # differences of a class in the report, which replay/report.json has in full
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SAGEMAKER", "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME")
_EMULATED = "another server responds instead of AWS; the emulator does not have the endpoint's options"
_OF_METRICS = {"tgi.metrics": "clients of an endpoint cannot read /metrics; option.tgi_metrics=true adds TGI's names"}
_OF_MODEL = {"tgi.chat-model": "chats name the endpoint's model, but another model is served here"}
"""Rules that are skipped, with the reasons: about what clients cannot read, and about the name of the model."""


class Ended(Exception):
    """A step ends the move. The argument is the exit status."""


@dataclass
class Findings:
    """What a move has proven, and what it has not.

    Attributes:
        proven: steps that passed, with what they show.
        not_proven: what no step shows, by name, with the reason.
        failed: what a step refutes, by name, with the reason.
        status: the exit status: 0, or that of the first step that failed.
    """

    proven: list[Entry] = field(default_factory=list)
    not_proven: list[Entry] = field(default_factory=list)
    failed: list[Entry] = field(default_factory=list)
    status: int = 0

    def fail(self, status: int, *failed: Entry) -> None:
        self.failed += failed
        self.status = self.status or status

    def end(self, status: int) -> None:
        """End the move early. Steps without a finding are not proven."""
        self.status = status
        reached = {name for name, _ in (*self.proven, *self.failed)}
        self.not_proven += [(step, "not reached") for step in STEPS if step not in reached]


def run(arguments: argparse.Namespace) -> int:
    """Run the steps, print the findings, and return the exit status.

    Raises:
        ConfigError: an argument is wrong, or a file cannot be read.
    """
    findings, output = Findings(), arguments.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        with interrupted_by_sigterm():
            _steps(arguments, findings, output)
    except KeyboardInterrupt:
        findings.end(INTERRUPTED)
    except Ended as ended:
        findings.end(int(ended.args[0]))
    except (BotoCoreError, ClientError) as error:
        findings.end(print_error(as_deploy_error(error)))
    except DeployError as error:
        findings.end(print_error(error))
    except OSError as error:
        raise ConfigError(f"lmi move: {error}") from None
    _report(findings, output, as_json=arguments.json)
    return findings.status


def _steps(arguments: argparse.Namespace, findings: Findings, output: Path) -> None:
    against = _reference(arguments)
    path = output / "specification.yaml"
    adopted = _adopt(arguments, path)
    origin = adopted["container"]
    findings.proven.append(("adopt", f"{path} is the specification; {adopted['notes'][-1]}"))
    for kind, meaning in (
        ("unmapped", "cannot be mapped"),
        ("differences", "has another effect here"),
        ("idle", "has no effect here"),
    ):
        findings.not_proven += [(item["setting"], f"{meaning}: {item['reason']}") for item in adopted[kind]]
    server = _check(arguments, findings, path)
    profile = PROFILE_OF_KIND.get(origin["kind"]) or server.profile()
    compared = _start(arguments, findings, server, profile, against)
    _conform(arguments, findings, server, profile)
    findings.not_proven += [
        ("load and latency", "measure them with `lmi deploy bench`, or with `lmi deploy up --shadow`"),
        ("AWS", "nothing was created; the image, the role and the instances are tested by `lmi deploy up`"),
    ]
    if not compared:
        findings.not_proven.append((arguments.requests or "requests", "no request was compared or checked"))
        findings.fail(UNCOMPARED)


# -- adopt: `lmi deploy adopt`, whose flags are passed on --------------------------------------------------------------


def _adopt(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Write the specification, and return what `lmi deploy adopt --json` prints."""
    if arguments.restart:
        path.unlink(missing_ok=True)
    elif path.exists():
        raise ConfigError(
            f"lmi move: {path} is from an earlier run; add --restart to replace it, or name another --output"
        )
    words = [arguments.endpoint]
    name = arguments.name
    if _is_file(arguments.endpoint):
        file = Path(arguments.endpoint)
        words = ["--file", str(file)]
        name = name or read_file(file, arguments.recommendation or 1).name or _name_of(file)
    flags = {flag: getattr(arguments, flag.replace("-", "_")) for flag in (*ADOPT, "recommendation")}
    flags["name"] = name
    words += [word for flag, value in flags.items() if value is not None for word in (f"--{flag}", str(value))]
    words += ["--read-data"] if arguments.read_data else []
    status, text = _run(["deploy", "adopt", *words, "--output", str(path), "--json"])
    if status:
        raise Ended(status)
    adopted: dict[str, Any] = json.loads(text)
    return adopted


def _is_file(endpoint: str) -> bool:
    return endpoint.endswith(".json") or Path(endpoint).is_file()


def _name_of(file: Path) -> str:
    """Return a name for a deployment from the name of a file."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", file.stem).strip("-")[:63].strip("-") or "moved"


def _run(words: Sequence[str]) -> tuple[int, str]:
    """Run a command of `lmi`, and return its exit status and its standard output."""
    _tell(f"$ lmi {shlex.join(words)}")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = main(words)
    return status, text.getvalue()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- check: the specification as `lmi deploy plan` checks it, and the options here as `lmi serve --check` does ---------


def _check(arguments: argparse.Namespace, findings: Findings, path: Path) -> LocalServer:
    spec = read_spec(path)
    _tell("checking the specification, and its options on this machine")
    problems = options_problems(spec)
    server = local_server(spec, arguments.model, arguments.engine, arguments.options)
    if all_problems := [*problems, *server.problems]:
        findings.fail(CHECK, *(("check", problem) for problem in all_problems))
        raise Ended(CHECK)
    findings.proven.append(("check", "the options of the specification have no problems"))
    findings.not_proven += [*server.replaced, *((f"-o {pair}", "set only here") for pair in arguments.options)]
    return server


# -- start and replay --------------------------------------------------------------------------------------------------


def _reference(arguments: argparse.Namespace) -> str:
    """Return the reference of the replay.

    Raises:
        ConfigError: the requests cannot be read, or the reference does not apply.
    """
    if arguments.requests is None:
        if arguments.against is not None:
            raise ConfigError("lmi move: --against needs REQUESTS")
        return "contract"
    if arguments.against == "endpoint" and _is_file(arguments.endpoint):
        raise ConfigError("lmi move: --against endpoint needs the endpoint's name instead of a file")
    requests = readable(arguments.requests, beginning(open_requests(arguments.requests))[0], "lmi move")
    recorded = any(request.response is not None for request in requests)
    return arguments.against or ("recorded" if recorded else "contract")


def _start(arguments: argparse.Namespace, findings: Findings, server: LocalServer, profile: str, against: str) -> int:
    """Start the server, replay the requests, and return the number of requests that were compared or checked."""
    command = server.command(free_port())
    _tell(f"$ {shlex.join(command)}")
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(process(command, timeout=900.0)).url
        except ConfigError as error:
            findings.fail(START, ("start", str(error)))
            raise Ended(START) from None
        where = f"{server.num_options} options and variables of the specification"
        findings.proven.append(("start", f"the server is ready with {arguments.model} and {where}"))
        if arguments.requests is None:
            return 0
        if against == "contract":
            return asyncio.run(_ask(arguments, findings, url, profile))
        return _replay(arguments, findings, url, against, is_own=server.is_own)


async def _ask(arguments: argparse.Namespace, findings: Findings, url: str, profile: str) -> int:
    """Send the requests, and return how many responses were checked against the contract of a profile."""
    num_right, num_checked = 0, 0
    target = Paced(HttpTarget(url))
    await target.open()
    try:
        for request in open_requests(arguments.requests):
            if isinstance(request, Unreadable):
                findings.not_proven.append((request.location, request.reason))
                continue
            try:
                wrong = fault(profile, request, await target.ask(request))
            except NoForm as error:
                findings.not_proven.append((request.id, f"not checked: {error}"))
                continue
            num_checked += 1
            num_right += not wrong
            if wrong:
                findings.fail(REPLAY, (request.id, wrong))
    finally:
        await target.close()
    if num_right:
        text = f"{num_right} of {num_checked} responses have status 2xx and text, as the contract {profile} demands; "
        text += "their layout was tested in part, and none was compared"
        findings.proven.append(("replay", text))
    findings.not_proven.append(
        ("equality", "no response of the old endpoint was compared; record them, or add --against endpoint")
    )
    return num_checked


def _replay(arguments: argparse.Namespace, findings: Findings, url: str, against: str, *, is_own: bool) -> int:
    """Compare the responses with the recorded ones or the live endpoint's, and return how many were compared."""
    output, requests = arguments.output / "replay", arguments.requests
    (output / "report.json").unlink(missing_ok=True)
    reference = f"sagemaker:{arguments.endpoint}" if against == "endpoint" else "recorded"
    words = ["replay", requests, "--to", url, "--against", reference, "--output", str(output), "--restart"]
    status, text = _run([*words, *([] if is_own else ["--allow", "text=100"])])
    _tell(text)
    if not (output / "report.json").is_file():
        raise Ended(status)
    report = json.loads((output / "report.json").read_text())
    _add_classes(findings, report, is_own=is_own)
    if not is_own:
        findings.not_proven.append(("texts", f"not compared, as {arguments.model} replaces the model"))
    elif sampled := sum(isinstance(item, Request) and not traits(item).greedy for item in open_requests(requests)):
        findings.not_proven.append((f"texts of {sampled} sampled requests", "sampled texts differ by themselves"))
    if against == "endpoint":
        findings.not_proven += [(f"{name}={os.environ[name]}", _EMULATED) for name in _ENDPOINTS if name in os.environ]
    compared: int = report["compared"]
    return compared


def _add_classes(findings: Findings, report: dict[str, Any], *, is_own: bool) -> None:
    """Add what the classes of a replay prove and refute, and the requests that were skipped."""
    numbers = {name: entry["requests"] for name, entry in report["classes"].items()}
    if same := sum(numbers[name] for name in ("equal", "tie", *(() if is_own else ("text",)))):
        shown = "do not differ from" if is_own else "have the status, framing and fields of"
        reference = ", ".join(report["answered"]["reference"])
        text = f"{same} of {report['compared']} responses {shown} those of {reference}"
        findings.proven.append(("replay", text))
    findings.not_proven += [(location, reason) for location, reason in map(dict.values, report["unreadable"]["first"])]
    if report["beyond"]:
        findings.fail(REPLAY, *((name, _beyond(report, name)) for name in report["beyond"]))


def _beyond(report: dict[str, Any], name: str) -> str:
    """Return the number of requests in a class that has too many, and the first differences."""
    findings = [*report["findings"].get(name, {})]
    others = f" and {len(findings) - _MAX_FINDINGS} others" if len(findings) > _MAX_FINDINGS else ""
    number = report["classes"][name]["requests"]
    return f"{number} request{'s' * (number != 1)}: {', '.join(findings[:_MAX_FINDINGS])}{others}"


# -- conform: the platform's rules and the contract of the old container, with a server that it starts itself ----------


def _conform(arguments: argparse.Namespace, findings: Findings, server: LocalServer, profile: str) -> None:
    port, file = free_port(), arguments.output / "conform.json"
    file.unlink(missing_ok=True)
    words = ["conform", f"http://127.0.0.1:{port}", "--profile", "sagemaker", "--profile", profile]
    words += ["--command", shlex.join(["env", "LMI_LOG_LEVEL=WARNING", *server.command(port)]), "--output", str(file)]
    skipped = {
        **({} if server.spec.options.get("tgi_metrics") else _OF_METRICS),
        **({} if server.is_own else _OF_MODEL),
    }
    words += [word for rule in arguments.rule for word in ("--rule", rule)]
    words += [word for rule in skipped if rule not in arguments.rule for word in ("--skip", rule)]
    with _without_keys():
        status, _ = _run(words)
    if status == INTERRUPTED:
        raise Ended(status)
    if not file.is_file():
        findings.fail(CONFORM, ("conform", f"no rule was tested (status {status})"))
        return
    _add_rules(findings, json.loads(file.read_text()), skipped)
    if arguments.rule:
        findings.not_proven.append(("other rules", f"only {', '.join(arguments.rule)} was tested (--rule)"))


def _add_rules(findings: Findings, report: dict[str, Any], skipped: dict[str, str]) -> None:
    """Add what the rules of a report of `lmi conform` prove and refute, and which were not tested."""
    for profile in report["profiles"]:
        verdicts = [result["result"] for result in report["results"] if result["profile"] == profile]
        if passed := verdicts.count("passed"):
            tested = len(verdicts) - verdicts.count("not asked")
            findings.proven.append(("conform", f"{passed} of {tested} rules of {profile} that could be tested"))
    for result in report["results"]:
        rule = f"{result['rule']} ({result['profile']})"
        if result["result"] == "failed":
            findings.fail(CONFORM, (rule, f"expected: {result['wanted']}; received: {result.get('got', '')}"))
        elif result["result"] == "not asked":
            findings.not_proven.append((rule, skipped.get(result["rule"], result["why"])))


@contextlib.contextmanager
def _without_keys() -> Iterator[None]:
    """Hide keys of servers in the environment, because the server here has no key."""
    keys = {name: os.environ.pop(name) for name in KEY_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(keys)


# -- the report --------------------------------------------------------------------------------------------------------


def _report(findings: Findings, output: Path, *, as_json: bool) -> None:
    lists = {"proven": findings.proven, "failed": findings.failed, "not_proven": findings.not_proven}
    document = {
        "status": findings.status,
        **{name: [{"name": item, "text": text} for item, text in items] for name, items in lists.items()},
    }
    (output / "move.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if as_json:
        print_json(document)
        return
    print("\n".join(_lines(lists)))
    print(f"status {findings.status}; written: {output / 'move.json'}", flush=True)


def _lines(lists: dict[str, list[Entry]]) -> Iterator[str]:
    """Yield the lines of the report. Names with the same text share a line."""
    for name, items in lists.items():
        if items:
            yield f"{name.replace('_', ' ')}:"
        by_text: dict[str, list[str]] = {}
        for item, text in items:
            by_text.setdefault(" ".join(text.split()), []).append(item)
        yield from (f"  {', '.join(dict.fromkeys(names))}: {text}" for text, names in by_text.items())
