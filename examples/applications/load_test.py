"""Find the rate of requests that a server holds: raise it until answers are late or fail.

`lmi bench` sends the requests: it times each token, and keeps the rate also while answers are late.

    python load_test.py http://127.0.0.1:8080 --rates 1,2,4,8 --ttft 500 --itl 50

Ends with status 1 if the server does not hold --need. Needs: lmi-handler, in the Python that runs this
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def measure(url: str, rate: float, seconds: float, tokens: int) -> dict[str, Any]:
    """Return what `lmi bench` saw at one rate."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        load = ["--rate", str(rate), "--seconds", str(seconds), "--tokens", str(tokens), "--repeat", "1"]
        once = ["--quiet", "1000", "--output", str(output)]  # other processes may take 1000 cores
        command = [sys.executable, "-m", "handler", "bench", url, *load, *once]
        done = subprocess.run(command, capture_output=True, text=True)
        if not output.exists():
            raise SystemExit(done.stderr)
        result: dict[str, Any] = json.loads(output.read_text())["results"][0]
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument(
        "--rates", type=numbers, default="1,2,4,8,16,32", help="requests a second, rising (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=30, help="at each rate (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: %(default)s)")
    parser.add_argument("--ttft", type=float, default=1000, help="limit of the first token's p99, in ms")
    parser.add_argument("--itl", type=float, default=100, help="limit of the p99 between tokens, in ms")
    parser.add_argument("--need", type=float, default=0, metavar="RATE", help="rate that the server has to hold")
    arguments = parser.parse_args()
    held = 0.0
    for rate in arguments.rates:
        result = measure(arguments.url, rate, arguments.seconds, arguments.tokens)
        errors = sum(result["errors"].values())
        ttft, itl = (result[name]["p99"] or 0.0 for name in ("ttft_ms", "itl_ms"))  # None where nothing was answered
        times = f"p99 of the first token {ttft:.0f} ms, between tokens {itl:.1f} ms"
        print(f"{rate:g}/s: {result['num_requests']} requests, {errors} failed, {times}", flush=True)
        if errors or ttft > arguments.ttft or itl > arguments.itl:
            break
        held = rate
    print(f"held: {held:g} requests/s")
    return int(held < arguments.need)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
