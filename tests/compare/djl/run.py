"""Compare handlers in DJL Serving's worker: ours, upstream's for TensorRT-LLM, and a minimal handler called null.

Clients stream through DJL's Java server. The command measures tokens per second, time to first token, and the CPU time
per token of the worker and its engine. All handlers run in turns, for each version of DJL's Python engine. The async
mode is only measured in versions that support it. The output is a table and one line of JSON. Java and Maven are
required:

    python -m tests.compare.djl.run [--versions 0.25.0,0.34.0] [--clients 32,128] [--pace 60]

The handlers null and upstream return one token per step. Our engine does not wait for the Java server. So a step
returns all tokens since the previous step, and the ratios include this gain. The exit status is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proof.bench import machine, report
from proof.bench.cli import counts
from proof.bench.client import Closed, Target
from proof.bench.processes import measure
from tests.clients import toolchains
from tests.compare.processes import cpu_seconds
from tests.djl.servers import DjlServer, newer
from tests.environment import clean_environment

_HERE = Path(__file__).parent
_READY = 60.0  # seconds
_ASYNC_SINCE = "0.31"
_ALL = {
    "engine": "Python",
    "option.max_rolling_batch_size": "256",
    "option.output_formatter": "jsonlines",  # DJL 0.25 does not support `stream` in a request
    "job_queue_size": "2000",
    "minWorkers": "1",
    "maxWorkers": "1",
}
_ROLLING = {"option.rolling_batch": "auto"}
_ASYNC = {"option.rolling_batch": "disable", "option.async_mode": "true"}


class Handler(NamedTuple):
    """A compared handler, with its own options in serving.properties, and the name of its model.py if it needs one."""

    own: Mapping[str, str]
    source: str = ""

    @property
    def asynchronous(self) -> bool:
        return "option.async_mode" in self.own

    def write(self, directory: Path) -> Path:
        """Write the model directory from which DJL starts the handler, and return it."""
        directory.mkdir(parents=True)
        if self.source:
            shutil.copyfile(_HERE / self.source, directory / "model.py")
        lines = [f"{key}={value}\n" for key, value in (_ALL | dict(self.own)).items()]
        (directory / "serving.properties").write_text("".join(lines))
        return directory


def handlers(pace: float) -> dict[str, Handler]:
    """Return the compared handlers by name. Our engine runs `pace` steps per second, or as many as it can for 0."""
    ours = {
        "option.entryPoint": "handler.entry",
        "option.llm_engine": "echo",
        "option.engine_isolation": "process",
        "option.echo_tokens_per_second": f"{pace:g}",
        "option.lmi_version": "0.28",  # one line per token in each mode
    }
    return {
        "null": Handler(_ROLLING, "null.py"),
        "upstream": Handler({"option.rolling_batch": "trtllm", "option.model_id": "none"}, "upstream.py"),
        "ours": Handler({**ours, **_ROLLING}),
        "ours, engine on a thread": Handler({**ours, **_ROLLING, "option.engine_isolation": "thread"}),
        "null, async": Handler(_ASYNC, "null_async.py"),
        "ours, async": Handler({**ours, **_ASYNC}),
    }


def worker_python() -> Path:
    """Return the workers' Python interpreter, which searches upstream's packages before this environment's."""
    python = toolchains.python("djl", _HERE)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    # addsitedir also reads the directory's own .pth files, such as that of an editable install of our handler
    (Path(site) / "behind.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return python


@contextlib.contextmanager
def servers(version: str, pace: float) -> Iterator[dict[str, DjlServer]]:
    """Start a DJL server for each handler. All servers run, but each is idle while another server is measured."""
    env = {**clean_environment(), "PYTHON_EXECUTABLE": str(worker_python())}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djl-compared-")))
        running: dict[str, DjlServer] = {}
        for name, handler in handlers(pace).items():
            if handler.asynchronous and not newer(version, _ASYNC_SINCE):
                continue
            own = scratch / str(len(running))
            server = DjlServer.start(None, version, own, handler.write(own / "model"), env=env)
            stack.callback(server.stop)
            server.wait_ready(_READY)
            running[name] = server
        yield running


class Turn(NamedTuple):
    """One measurement of a handler."""

    rate: float  # tokens per second
    first_token: float  # median time to first token, in seconds
    cpu: float  # CPU microseconds per token, of the worker and its engine
    errors: dict[str, int]
    others: float  # CPU cores that other processes kept busy


def measure_turn(args: argparse.Namespace, clients: int, server: DjlServer) -> Turn:
    worker, meter = server.worker_pid(), machine.OthersMeter()
    before = cpu_seconds(worker)
    results = measure(Target(server.url, args.tokens), Closed(clients, seconds=args.seconds), processes=1)
    tokens = sum(result.num_tokens for result in results)
    cpu = cpu_seconds(worker).since(before).host / tokens * 1e6
    first = statistics.median(report.first_token_times(results))
    return Turn(report.tokens_per_second(results), first, cpu, report.errors(results), meter.cores() or 0.0)


def run(args: argparse.Namespace, version: str) -> Iterator[dict[str, Any]]:
    """Measure one version of DJL, and yield a row for each number of clients and each handler."""
    with servers(version, args.pace) as running:
        for clients in args.clients:
            turns: dict[str, list[Turn]] = {name: [] for name in running}
            for number in range(args.repeat + 1):
                for name, server in running.items():
                    turn = measure_turn(args, clients, server)
                    print(f"DJL {version}, {clients:3} clients, {name}: {turn.rate:,.0f} tokens/s", file=sys.stderr)
                    if number:  # the first turn is a warm-up, because Java compiles hot code only after a while
                        turns[name].append(turn)
            for name, own in turns.items():
                yield {"djl": version, "clients": clients, "handler": name, **summarize(own, turns)}


def summarize(own: Sequence[Turn], turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Return the medians of a handler's turns, and of its ratios to the other handlers in the same turn."""
    return {
        "tokens_per_second": statistics.median(turn.rate for turn in own),
        **{
            f"over_{other}": statistics.median(a.rate / b.rate for a, b in zip(own, turns[other], strict=True))
            for other in ("null", "upstream")
        },
        "first_token_ms": 1e3 * statistics.median(turn.first_token for turn in own),
        "worker_and_engine_us_per_token": statistics.median(turn.cpu for turn in own),
        "errors": dict(sum((Counter(turn.errors) for turn in own), Counter[str]())),
        "others_cores": max(turn.others for turn in own),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["DJL", "clients", "handler", "tokens/s", "of null", "of upstream", "first token ms"]
    lines = []
    for row in rows:
        line = [row["djl"], str(row["clients"]), row["handler"], f"{row['tokens_per_second']:,.0f}"]
        line += [f"{row['over_null']:.2f}", f"{row['over_upstream']:.2f}", f"{row['first_token_ms']:.0f}"]
        line += [f"{row['worker_and_engine_us_per_token']:.1f}", f"{row['others_cores']:.2f}"]
        lines.append([*line, ", ".join(f"{count} {kind}" for kind, count in row["errors"].items()) or "0"])
    return report.table([*head, "worker and engine us/token", "others, cores", "errors"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--versions", default="0.25.0,0.34.0", help="versions of ai.djl.python (default: %(default)s)")
    add("--clients", type=counts, default=[32, 128], help="numbers of concurrent clients (default: 32,128)")
    add("--tokens", type=int, default=256, help="tokens in each response (default: %(default)s)")
    add("--pace", type=float, default=0.0, help="steps per second of our engine (0: no limit) (default: %(default)g)")
    add("--seconds", type=float, default=4.0, help="seconds of each measurement (default: %(default)s)")
    add("--repeat", type=int, default=3, help="repetitions; the table shows medians (default: %(default)s)")
    args = parser.parse_args()
    rows = [row for version in args.versions.split(",") for row in run(args, version)]
    facts = machine.describe()
    print(f"{machine.summary(facts)}\nresponses of {args.tokens} tokens, {args.repeat} times\n{show(rows)}")
    print(json.dumps({**facts, "plan": vars(args), "rows": rows}))
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
