"""Benchmark a GPU engine alone, in our server, and in its own server, in one run.

All answers are greedy and equally long. It measures tokens a second, times to the first token (TTFT) and between tokens
(ITL), and the CPU time per token of the processes around the engine. It prints tables, then one line of JSON. Run it
with the Python that has the engine, and with nothing else on the machine:

    python bench/engines.py MODEL --engine vllm [-o option.load_format=dummy]

MODEL is the argument of `lmi serve`. The exit status is 1 if a request failed or a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from systems import apis, summary, turns, vllm, vllm_settings

from handler.core.errors import ConfigError
from proof.bench import machine

_ENGINES = ("vllm",)
_NAMES = summary.Names(vllm.OFFLINE, vllm.OURS, vllm.PEER)
_PARTS = dict(zip(_NAMES._fields, _NAMES, strict=True))


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def counts(text: str) -> list[int]:
    return [count(number) for number in text.split(",")]


def parts(text: str) -> list[str]:
    try:
        return [_PARTS[name] for name in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"unknown part {error}; known are {', '.join(_PARTS)}") from None


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("model", metavar="MODEL", help="a Hugging Face directory, an id on its hub, or demo")
    add("--engine", choices=_ENGINES, default="vllm")
    add("-o", dest="options", action="append", default=[], metavar="KEY=VALUE", help="as `lmi serve` takes it; for all")
    add(
        "--api",
        choices=apis.APIS,
        default="chat",
        help="chat: OpenAI's of both; text: LMI's and OpenAI's, with log-probabilities (default %(default)s)",
    )
    add("--clients", type=counts, help="(default 1,8,32, with a GPU 1,32,128,256)")
    add("--rounds", type=count, default=4, help="answers of each client in a measurement (default %(default)s)")
    add("--tokens", type=count, default=128, help="of every answer (default %(default)s)")
    add("--prompt-words", type=count, default=48, help="(default %(default)s)")
    add("--repeat", type=count, default=3, help="medians are of so many (default %(default)s)")
    add("--processes", type=count, help="of the load generator (default: half the cores, 2 to 8)")
    add("--only", type=parts, default=list(_NAMES), metavar="PART,...", help=f"of {', '.join(_PARTS)}")
    add("--apart", action="store_true", help="one system up at a time: slower, in less memory")
    add("--quiet", type=float, default=0.2, help="cores of other processes that are borne (default %(default)s)")
    return result


def run(given: argparse.Namespace) -> int:
    devices = vllm.find_devices()
    cores = os.cpu_count() or 2
    plan = turns.Plan(
        clients=given.clients or ([1, 32, 128, 256] if devices.gpu else [1, 8, 32]),
        rounds=given.rounds,
        tokens=given.tokens,
        prompt_words=given.prompt_words,
        processes=given.processes or min(8, max(2, cores // 2)),
        repeat=given.repeat,
        together=not given.apart,
        quiet=given.quiet,
    )
    starts = vllm.starts(given.model, given.options, devices, apis.APIS[given.api], together=plan.together)
    points, abouts = turns.run(plan, {name: starts[name] for name in given.only})
    values = [summary.summarize(point, _NAMES) for point in points]
    facts = {**machine.describe(), "devices": list(devices.names), "engine": given.engine, "model": given.model}
    facts["api"] = given.api
    facts["versions"] |= vllm_settings.versions()
    return report(facts, plan, values, abouts, summary.ON_GPU if devices.gpu else summary.ON_CPU, given.options)


def report(
    facts: dict[str, Any],
    plan: turns.Plan,
    values: Sequence[dict[str, Any]],
    abouts: turns.Abouts,
    targets: Sequence[summary.Target],
    options: Sequence[str],
) -> int:
    """Print the tables and the JSON line; returns the exit status."""
    print(machine.summary(facts) + "".join(f"; {name}" for name in facts["devices"]))
    print(f"answers of {plan.tokens} tokens, prompts of {plan.prompt_words} words, {plan.rounds} rounds, ", end="")
    print(f"{plan.repeat} times, {plan.processes} load processes\n")
    print(summary.show_systems(values) + "\n")
    print(summary.show_ratios(values, _NAMES) + "\n")
    if any(value["others_cores"] + value["idle_systems_cores"] > plan.quiet for value in values):
        print(f"DISTURBED: more than {plan.quiet:g} of a core went elsewhere: see others_cores in the JSON line")
    verdicts = summary.verdicts(values, targets)
    for text, met in verdicts:
        print(f"{'met' if met else 'NOT MET'}: {text}")
    judged = [{"target": text, "met": met} for text, met in verdicts]
    print(
        json.dumps(
            {**facts, "options": options, "plan": vars(plan), "results": values, "settings": abouts, "targets": judged}
        )
    )
    return 0 if all(met for _, met in verdicts) and not summary.failures(values) else 1


def main() -> int:
    given = parser().parse_args()
    _keep_stdout()
    try:
        return run(given)
    except ConfigError as error:
        print(f"engines.py: {error}", file=sys.stderr)
        return 2
    finally:
        sys.stdout.flush()


def _keep_stdout() -> None:
    """For what is printed here: what engines write to theirs, which is this one, goes to stderr."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


if __name__ == "__main__":
    raise SystemExit(main())
