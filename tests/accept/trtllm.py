"""`make accept-trtllm`: the TensorRT-LLM engine on a GPU machine, point by point; a JSON line with the verdict last.

python -m tests.accept.trtllm MODEL [--adapter DIR] [--only WORD] [--timeout SECONDS] [-o ENGINE_OPTION=JSON ...]

Without a GPU, on the double, with a model that `.venv/bin/python -m tests.doubles.tiny /tmp/tiny` writes:
PYTHONPATH=tests/doubles TLLM_DOUBLE="version=1.3.0rc29;worker" .venv/bin/python -m tests.accept.trtllm /tmp/tiny
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.config import Config
from handler.config.options import OPTIONS
from handler.core.errors import ConfigError
from handler.engines import entry, prepare
from handler.engines.base import EngineConfig
from handler.engines.trtllm.arguments import installed_version, release_of
from tests.accept import points
from tests.accept.points import Point
from tests.accept.served import Skip, served

_DEFAULTS = {
    option.field: option.default
    for option in OPTIONS
    if "trtllm" in option.engines and option.field and option.default is not None
}
_PASS, _FAIL, _SKIP = "PASS", "FAIL", "SKIP"
_OTHER_SAMPLER = "TRTLLMSampler: log-probabilities"


class Result(NamedTuple):
    point: str
    verdict: str
    why: str = ""


class Setup(NamedTuple):
    """One load of the model, and the points that are tried on it."""

    name: str
    options: dict[str, Any]
    points: tuple[Point, ...]


def setups(release: tuple[int, int], adapter: str | None) -> list[Setup]:
    found = [
        Setup("as it is", {}, (*points.GENERAL, *points.IMAGES, points.a_dead_worker_is_noticed_and_replaced)),
        Setup("beams", {"max_beam_width": 4}, (points.beams_come_the_best_first, points.greedy_is_the_same_twice)),
        Setup("guides", {"guided_decoding_backend": "xgrammar"}, points.GUIDES),
        Setup("logits", {"gather_generation_logits": True}, (points.logits_have_their_shapes,)),
    ]
    if release < (1, 3):
        found.insert(1, Setup("TRTLLMSampler", {"sampler_type": "TRTLLMSampler"}, points.GENERAL))
    if adapter is not None:
        lora = {"enable_lora": True, "max_lora_rank": 64}
        found.append(Setup("adapter", lora, (points.an_adapter_changes_the_answer(adapter),)))
    return found


def conformance(model: Path) -> Iterator[Result]:
    """What every engine must do: the suite of the other engines, in a pytest of its own."""
    print("loading the model for 'conformance', in a pytest of its own ...", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests/process/engines/test_conformance.py", "-k", "trtllm"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--timeout", "900", f"--junitxml={report}"],
            env={**os.environ, "ACCEPT_TRTLLM_MODEL": str(model), "PYTEST_ADDOPTS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not report.is_file():
            yield Result("conformance", _FAIL, done.stdout[-2000:])
            return
        cases = list(ElementTree.parse(report).iter("testcase"))
        if not cases:
            yield Result("conformance", _FAIL, f"no test ran: {done.stdout[-500:]}")
        for case in cases:
            bad = case.find("failure") if case.find("failure") is not None else case.find("error")
            skipped = case.find("skipped")
            verdict = _FAIL if bad is not None else _SKIP if skipped is not None else _PASS
            reason = bad if bad is not None else skipped
            yield Result(
                f"conformance: {case.get('name')}", verdict, "" if reason is None else reason.get("message", "")
            )


def tried(setup: Setup, config: EngineConfig, timeout: float) -> Iterator[Result]:
    try:
        print(f"loading the model for {setup.name!r} ...", flush=True)
        with served(config, timeout) as found:
            for point in setup.points:
                yield Result(f"{setup.name}: {point.__name__}", *_verdict(point, found))
    except Exception as error:
        yield Result(f"{setup.name}: loads", _FAIL, f"{type(error).__name__}: {error}")


def _verdict(point: Point, found: Any) -> tuple[str, str]:
    try:
        point(found)
    except Skip as why:
        return _SKIP, str(why)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        for id in [*found.batcher._running, *found.batcher._queue]:
            found.batcher.cancel(id)
        return _FAIL, f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno}: {where.line})"
    return _PASS, ""


def log_probabilities_of_the_other_sampler(model: Path, timeout: float) -> Result:
    """Try log-probabilities with TRTLLMSampler, which the engine refuses.

    TensorRT-LLM 1.2.1 (executor/result.py) asserts as many log-probabilities as tokens, unless it searches beams.
    This sampler returns a growing list, so the second token may fail: only a GPU can tell.
    """
    script = """
import asyncio, sys
from tensorrt_llm import LLM, SamplingParams
async def main(llm):
    params = SamplingParams(max_tokens=8, logprobs=1, detokenize=False, end_id=-1, pad_id=0)
    result = llm.generate_async([5, 6, 7], sampling_params=params, streaming=True)
    async for _ in result: pass
    print(len(result.outputs[0].token_ids), len(result.outputs[0].logprobs))
if __name__ == "__main__":
    llm = LLM(sys.argv[1], sampler_type="TRTLLMSampler")
    asyncio.run(main(llm))
"""
    print(f"loading the model for {_OTHER_SAMPLER!r} ...", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        file, log = Path(scratch) / "script.py", Path(scratch) / "log"
        file.write_text(script)
        with log.open("w") as output:  # no pipe: processes that outlive it would hold that open
            done = subprocess.Popen(
                [sys.executable, str(file), str(model)], stdout=output, stderr=output, start_new_session=True
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                done.wait(timeout)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(done.pid, signal.SIGKILL)
            done.wait()
        said = log.read_text().strip().splitlines()[-1:]
    works = done.returncode == 0 and said == ["8 8"]
    broken = f"still broken in this TensorRT-LLM: {' '.join(said) or 'it said nothing'}"
    why = "they work: handler/engines/trtllm/arguments.py could ask for them" if works else broken
    return Result(_OTHER_SAMPLER, _SKIP, why)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory, or a model of the hub")
    parser.add_argument("--adapter", help="a LoRA adapter's directory")
    parser.add_argument("--only", default="", help="setups and points whose names have this in them")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a load may take")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=JSON",
                        help="a field of EngineConfig.options for all loads")  # fmt: skip
    arguments = parser.parse_args(argv)
    try:
        entry("trtllm")
        version = installed_version()
        if not any(_chosen(release_of(version), arguments)):
            raise ConfigError(f"no point matches --only {arguments.only}")
        model = prepare("trtllm", arguments.model, EngineConfig())
    except ConfigError as error:
        print(f"accept-trtllm: {error}", file=sys.stderr)
        return 2
    assert model is not None
    more = {name: json.loads(value) for name, _, value in (each.partition("=") for each in arguments.options)}
    print(f"TensorRT-LLM {version}, {model}", flush=True)
    began, results = time.monotonic(), []
    for result in _all(model, release_of(version), arguments, more):
        if result.why or result.verdict != _SKIP or not arguments.only:
            print(f"{result.verdict} {result.point}{f': {result.why}' if result.why else ''}", flush=True)
        results.append(result)
    by_verdict = {kind: [one.point for one in results if one.verdict == kind] for kind in (_PASS, _FAIL, _SKIP)}
    failed = bool(by_verdict[_FAIL]) or not by_verdict[_PASS]
    summary = {
        "verdict": _FAIL if failed else _PASS,
        "version": version,
        "passed": len(by_verdict[_PASS]),
        "failed": by_verdict[_FAIL],
        "skipped": by_verdict[_SKIP],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary))
    return int(failed)


def _all(model: Path, release: tuple[int, int], arguments: Any, more: dict[str, Any]) -> Iterator[Result]:
    with_conformance, chosen, with_other_sampler = _chosen(release, arguments)
    if with_conformance:
        yield from conformance(model)
    for setup in chosen:
        config = EngineConfig(
            Config(max_rolling_batch_size=16, engine_options={**_DEFAULTS, **setup.options, **more}), model=model
        )
        yield from tried(setup, config, arguments.timeout)
    if with_other_sampler:
        yield log_probabilities_of_the_other_sampler(model, arguments.timeout)


def _chosen(release: tuple[int, int], arguments: Any) -> tuple[bool, list[Setup], bool]:
    """What `--only` leaves: conformance, setups with their points, the other sampler's log-probabilities."""
    only, found = arguments.only, []
    for setup in setups(release, arguments.adapter):
        left = tuple(point for point in setup.points if only in setup.name or only in point.__name__)
        if left:
            found.append(setup._replace(points=left))
    return only in "conformance", found, (1, 1) <= release < (1, 3) and only in _OTHER_SAMPLER


if __name__ == "__main__":
    raise SystemExit(main())
