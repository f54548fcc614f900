"""Renew deploy/data/instances.json, and say what is new: `python -m tests.tools.instances [--prices]`.

botocore's model of SageMaker lists the types that an endpoint may have; moto holds EC2's description of them. What
neither says is the compute capability of a GPU: a new GPU is reported, and its types wait until a line is added here.
No package holds SageMaker's prices. With `--prices` and AWS credentials (`pricing:GetProducts`), the Pricing API's
prices of us-east-1 replace those in deploy/data/prices.json. Without it, GPU types without a price are reported.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import botocore.session

from deploy.aws import Aws
from deploy.resolve.prices import ask

FILE = Path(__file__).parents[2] / "deploy" / "data" / "instances.json"
PRICES = FILE.with_name("prices.json")
REGION = "us-east-1"

CAPABILITIES = {
    "T4": "7.5",
    "A100": "8.0",
    "A10G": "8.6",
    "L4": "8.9",
    "L40S": "8.9",
    "H100": "9.0",
    "H200": "9.0",
    "B200": "10.0",
    "B300": "10.3",
    "RTX PRO 4500": "12.0",
    "RTX PRO Server 6000": "12.0",
}
"""NVIDIA's compute capabilities (developer.nvidia.com/cuda-gpus), of Turing and newer."""

CPU_FAMILIES = ("m5", "c5", "c6i", "m6i", "r6i", "c7i", "m7i", "r7i")
"""Families of x86 hosts that the images for CPUs run on: with AVX-512, without other chips."""

ARM_FAMILIES = ("m6g", "c6g", "r6g", "c7g", "c8g", "m8g", "r8g")
"""Families of Graviton hosts, without those with a local disk or a faster network, which serving does not need."""

OLD_GPUS = ("K80", "M60", "V100")
"""GPUs older than Turing, for which no engine of the handler is built."""

Rows = dict[str, dict[str, Any]]


def of_sagemaker() -> list[str]:
    """Return the types in SageMaker's API, in its order."""
    model = botocore.session.Session().get_service_model("sagemaker")
    return list(model.shape_for("ProductionVariantInstanceType").enum)


def of_ec2() -> dict[str, Any]:
    """Return EC2's descriptions by type, as moto holds them."""
    with (files("moto") / "ec2/resources/instance_types.json.gz").open("rb") as file:
        described: dict[str, Any] = json.loads(gzip.decompress(file.read()))
    return described


def table(names: list[str], described: Mapping[str, Any]) -> tuple[Rows, Rows, dict[str, str]]:
    """Return the rows of types with GPUs, of those without, and why others that look like GPU types have none."""
    gpu: Rows = {}
    cpu: Rows = {}
    missing: dict[str, str] = {}
    for name in names:
        family = name.split(".")[1]
        it = described.get(name.removeprefix("ml."))
        if it is None:
            if family[0] in "gp":
                missing[name] = "EC2's description is not at hand"
            continue
        row = {"vcpu": it["VCpuInfo"]["DefaultVCpus"], "ram": it["MemoryInfo"]["SizeInMiB"] // 1024}
        if family in (*CPU_FAMILIES, *ARM_FAMILIES):
            cpu[name] = row
        elif gpus := [one for one in it.get("GpuInfo", {}).get("Gpus", ()) if one["Manufacturer"] == "NVIDIA"]:
            first = gpus[0]
            if first["Name"] in OLD_GPUS:
                continue
            if first["Name"] not in CAPABILITIES:
                missing[name] = f"CAPABILITIES has no {first['Name']}"
            elif "arm64" not in it["ProcessorInfo"]["SupportedArchitectures"]:
                gpu[name] = {
                    "gpu": first["Name"],
                    "count": first["Count"],
                    "mib": first["MemoryInfo"]["SizeInMiB"],
                    **row,
                    "nvme": it.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
                    "sm": CAPABILITIES[first["Name"]],
                }
    return gpu, cpu, missing


def news(old: Rows, new: Rows) -> Iterator[str]:
    """Return a line for each type that came, went or changed."""
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            yield f"new      {name}: {new[name]}"
        elif name not in new:
            yield f"gone     {name}"
        elif old[name] != new[name]:
            changed = [
                f"{key} {old[name].get(key)} -> {value}"
                for key, value in new[name].items()
                if old[name].get(key) != value
            ]
            yield f"changed  {name}: {', '.join(changed)}"


def render(gpu: Rows, cpu: Rows, missing: Mapping[str, str]) -> str:
    """Return the file's content: a line for each type."""
    source = (
        f"The types of botocore {version('botocore')}'s ProductionVariantInstanceType, with EC2's description as moto "
        f"{version('moto')} holds it; compute capabilities are NVIDIA's. `python -m tests.tools.instances` writes this."
    )
    parts = [f' "source": {json.dumps(source)}']
    for key, rows in (("gpu", gpu), ("cpu", cpu), ("without_data", missing)):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        parts.append(f' "{key}": {{\n{lines}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# -- prices ------------------------------------------------------------------------------------------------------------


def renewed(prices: Mapping[str, Any], listed: Mapping[str, float], gpu: Rows, cpu: Rows, today: str) -> dict[str, Any]:
    """Return the content of prices.json with the prices that the Pricing API lists. Others are kept, and named.

    Args:
        prices: content of prices.json.
        listed: US dollars per hour, by instance type.
        gpu, cpu: rows of instances.json.
        today: date of the prices, as YYYY-MM-DD.
    """
    by_type = prices["usd_per_hour"] | {name: listed[name] for name in gpu if name in listed}
    by_vcpu = prices["usd_per_vcpu_hour"] | {
        name.split(".")[1]: round(listed[name] / row["vcpu"], 4) for name, row in cpu.items() if name in listed
    }
    kept = [name for name in by_type if name not in listed]
    older = f" Older, as they are not listed: {', '.join(kept)}." if kept else ""
    return {
        "read": today,
        "region": REGION,
        "source": f"SageMaker's on-demand prices of endpoints, by AWS's Pricing API.{older}",
        "usd_per_hour": {name: by_type[name] for name in gpu if name in by_type},
        "usd_per_vcpu_hour": by_vcpu,
    }


def _renew_prices(gpu: Rows, cpu: Rows) -> None:
    found = ask(Aws(REGION))
    if found.listed is None:
        raise SystemExit(f"no prices: {found.reason}")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    content = renewed(json.loads(PRICES.read_text()), found.listed, gpu, cpu, today)
    PRICES.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prices", action="store_true", help="renew the prices too, which needs AWS credentials")
    arguments = parser.parse_args()
    gpu, cpu, missing = table(of_sagemaker(), of_ec2())
    old = json.loads(FILE.read_text()) if FILE.exists() else {"gpu": {}, "cpu": {}}
    lines = [*news(old["gpu"], gpu), *news(old["cpu"], cpu)]
    lines += [f"left out {name}: {why}" for name, why in missing.items()]
    FILE.write_text(render(gpu, cpu, missing))
    if arguments.prices:
        _renew_prices(gpu, cpu)
    known = json.loads(PRICES.read_text())["usd_per_hour"]
    lines += [f"no price {name}" for name in gpu if name not in known]
    print("\n".join(lines or ["nothing new"]))


if __name__ == "__main__":
    main()
