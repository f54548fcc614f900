"""The parts that a GPU machine without a package registry needs: packages for its Python, and the demo model's file."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from handler.config import model_files
from tests import install

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MAX_PART = 41 << 20
"""Bytes in a part: one fits beside the repository in the 64 MiB that a call carries."""

_PYTHON, _PLATFORM = "3.12", "x86_64-manylinux_2_39"
_UNUSED = (  # by the tests of a Llama on a Hopper GPU
    *("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_moe_C*", "vllm/vllm-rs", "vllm/third_party/*/include"),
    *("vllm/third_party/fmha_sm100", "vllm/third_party/deep_gemm/_C.cpython-31[0134]*", "nvidia_cutlass_dsl"),
    *("pycountry/locales", "mistral_common/data/tekken*", "xgrammar/lib/*.a", "bin"),
)


def pack(directory: Path) -> list[Path]:
    """Write the parts of one compressed archive into an empty directory, and return their paths in order.

    The archive contains `site`, the packages of requirements.txt, and `cache`, which is for `LMI_CACHE`.

    Raises:
        RuntimeError: a package cannot be installed. The message has the installer's output.
        subprocess.CalledProcessError: the archive cannot be written.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        root = Path(temporary)
        _install(root / "site")
        model = model_files.locate(model_files.DEMO).path
        (root / "cache").mkdir()
        shutil.copy(model, root / "cache")
        prefix = str(directory / "part.")
        archive = f"tar c -C {temporary!r} site cache | xz -T0 -2 | split -b {MAX_PART} -d - {prefix!r}"
        subprocess.run(["bash", "-o", "pipefail", "-c", archive], check=True)
    return sorted(directory.glob("part.*"))


def calls(parts: list[Path], run: str) -> Iterator[tuple[str, Path]]:
    """Yield the command of each call with the part that the call carries. The last command also unpacks and runs.

    Args:
        run: arguments of `python -m tests.gpu.lease run`.
    """
    for part in parts:
        command = f"mkdir -p /tmp/lease && cp {part} /tmp/lease/"
        if part == parts[-1]:
            unpack = "cat /tmp/lease/part.* | XZ_OPT=-T0 tar xJ -C /tmp/lease"
            path = "import sys; sys.path.insert(0, '/tmp/lease/site')"  # in the tests' processes too
            where = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
            command += f' && {unpack} && echo "{path}" > {where}/lease.pth'
            command += f" && LMI_CACHE=/tmp/lease/cache python3 -u -m tests.gpu.lease run --out $OUT {run}"
        yield command, part


def _install(site: Path) -> None:
    install.packages(
        *("--link-mode", "copy", "--no-deps", "--only-binary", ":all:", "--python-version", _PYTHON),
        *("--python-platform", _PLATFORM, "--target", str(site), "--requirements", str(REQUIREMENTS)),
    )
    for pattern in _UNUSED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in [*site.rglob("*.cuh"), *site.rglob("*.hpp")]:
        if "flashinfer" not in path.parts:  # which compiles its own
            path.unlink()
