"""DJL's Python engine from Maven Central and our front end for it: fetched and compiled once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from handler.config.model_files import cache_directory

FRONT = Path(__file__).parent / "front"
VERSIONS = ["0.25.0", "0.34.0"]  # what Maven Central has of 0.25 and later


QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Flags for a Java that lives for seconds: it computes a third to a half less."""


class Unavailable(Exception):
    """There is no DJL here, for the reason given."""


def engine(version: str) -> Path:
    """The directory of one version: `lib/` with the jars, `python/<version>/` with its djl_python.

    It serves as DJL_CACHE_DIR too: unpacked here, or two engines that start at once would both unpack it.
    """

    def fetch(scratch: Path) -> None:
        require("mvn")
        print(f"fetching DJL's Python engine {version} from Maven Central (8 MB) ...", file=sys.stderr, flush=True)
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={scratch / 'lib'}"]
        maven = ["mvn", "-q", "-B", "-f", str(FRONT / "pom.xml"), f"-Ddjl.version={version}", *goal]
        env = {**os.environ, "MAVEN_OPTS": " ".join([os.environ.get("MAVEN_OPTS", ""), *QUICK])}
        done = subprocess.run(maven, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise Unavailable(f"mvn ended with status {done.returncode}:\n{done.stdout}")
        with zipfile.ZipFile(scratch / "lib" / f"python-{version}.jar") as jar:
            scripts = [name for name in jar.namelist() if name.startswith("djl_python")]
            jar.extractall(scratch / "python" / version, scripts)

    return once(cache_directory() / "djl" / version, fetch)


def front(version: str) -> Path:
    """The directory of front.jar, the compiled front end; one for each state of its source."""
    require("java")
    sources = sorted(FRONT.glob("*.java"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    jars = engine(version) / "lib"

    def build(scratch: Path) -> None:
        modules = subprocess.run(["java", "--list-modules"], capture_output=True, text=True, check=True).stdout
        if "jdk.compiler@" not in modules:
            raise Unavailable("the java on PATH has no compiler (Debian: apt install default-jdk-headless)")
        javac = ["java", *QUICK, "-m", "jdk.compiler/com.sun.tools.javac.Main", "-Xlint:all", "-Werror"]
        classpath = ":".join(str(jar) for jar in jars.glob("*.jar"))
        subprocess.run([*javac, "-cp", classpath, "-d", str(scratch), *map(str, sources)], check=True)
        with zipfile.ZipFile(scratch / "front.jar", "w") as jar:
            for file in sorted(scratch.glob("*.class")):
                jar.write(file, file.name)

    return once(cache_directory() / "djl" / f"{version}-jar-{digest}", build)


def classpath(version: str) -> str:
    """The front end and the jars that it needs."""
    return f"{front(version) / 'front.jar'}:{engine(version)}/lib/*"


def require(program: str) -> None:
    """
    Raises:
        Unavailable: `program` is not on PATH.
    """
    if not shutil.which(program):
        raise Unavailable(f"there is no {program} on PATH (Debian: apt install default-jdk-headless maven)")


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """Makes a directory beside its place and moves it there at once; who comes second uses the first's."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            make(made)
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
    return target
