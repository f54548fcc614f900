"""The script that renews the table of instances."""

from __future__ import annotations

import json
from typing import Any

from tests.tools.instances import CPU_FAMILIES, FILE, news, of_ec2, of_sagemaker, render, table


def described(gpu: str = "L4", architecture: str = "x86_64") -> dict[str, Any]:
    return {
        "VCpuInfo": {"DefaultVCpus": 8},
        "MemoryInfo": {"SizeInMiB": 32768},
        "ProcessorInfo": {"SupportedArchitectures": [architecture]},
        "GpuInfo": {"Gpus": [{"Name": gpu, "Manufacturer": "NVIDIA", "Count": 1, "MemoryInfo": {"SizeInMiB": 22888}}]},
    }


def test_the_shipped_table_is_what_the_script_writes() -> None:
    """But for what a newer botocore or moto adds, which running it again says."""
    shipped = json.loads(FILE.read_text())
    gpu, cpu, _ = table(of_sagemaker(), of_ec2())
    assert {name: gpu[name] for name in shipped["gpu"]} == shipped["gpu"]
    assert {name: cpu[name] for name in shipped["cpu"]} == shipped["cpu"]
    assert len(shipped["gpu"]) >= 50
    assert {name.split(".")[1] for name in shipped["cpu"]} == set(CPU_FAMILIES)


def test_what_is_new_is_said() -> None:
    rows = {"ml.a.xlarge": {"vcpu": 4, "ram": 8}, "ml.b.xlarge": {"vcpu": 4, "ram": 8}}
    new = {"ml.b.xlarge": {"vcpu": 4, "ram": 16}, "ml.c.xlarge": {"vcpu": 1, "ram": 2}}
    assert list(news(rows, new)) == [
        "gone     ml.a.xlarge",
        "changed  ml.b.xlarge: ram 8 -> 16",
        "new      ml.c.xlarge: {'vcpu': 1, 'ram': 2}",
    ]
    assert list(news(rows, rows)) == []


def test_a_gpu_of_unknown_capability_and_a_type_without_description_are_left_out_by_name() -> None:
    names = ["ml.g9.xlarge", "ml.p9.48xlarge", "ml.g6.xlarge", "ml.g5g.xlarge", "ml.c7i.large", "ml.p3.2xlarge"]
    ec2 = {
        "g9.xlarge": described("X100"),
        "g6.xlarge": described(),
        "g5g.xlarge": described("L4", "arm64"),
        "c7i.large": described() | {"GpuInfo": {}},
        "p3.2xlarge": described("V100"),
    }
    gpu, cpu, missing = table(names, ec2)
    row = {"gpu": "L4", "count": 1, "mib": 22888, "vcpu": 8, "ram": 32, "nvme": 0, "sm": "8.9"}
    assert gpu == {"ml.g6.xlarge": row}
    assert cpu == {"ml.c7i.large": {"vcpu": 8, "ram": 32}}
    assert missing == {
        "ml.g9.xlarge": "CAPABILITIES has no X100",
        "ml.p9.48xlarge": "EC2's description is not at hand",
    }
    assert json.loads(render(gpu, cpu, missing))["gpu"] == gpu
