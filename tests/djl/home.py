"""A whole DJL Serving that the user has: what it is started with, as values that need no server to be looked at."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def find() -> Path | None:
    """`DJL_SERVING_HOME`, else the home of the `djl-serving` on PATH."""
    if named := os.environ.get("DJL_SERVING_HOME"):
        return Path(named)
    program = shutil.which("djl-serving")
    if program is None:
        return None
    home = Path(program).resolve().parent.parent  # the package's /usr/bin/djl-serving is a link to its bin/serving
    return home if (home / "bin" / "serving").is_file() else None


def version(home: Path) -> str:
    """From the name of its own jar: lib/serving-0.28.0.jar."""
    for jar in sorted((home / "lib").glob("serving-*.jar")):
        if found := re.fullmatch(r"serving-(\d+(?:\.\d+)+)(?:[-.].*)?\.jar", jar.name):
            return found[1]
    raise FileNotFoundError(f"{home} is no DJL Serving: there is no lib/serving-<version>.jar")


def config(port: int, cluster_port: int) -> str:
    """config.properties: everything on loopback; the cluster's port defaults to one that two servers would share."""
    return (
        f"inference_address=http://127.0.0.1:{port}\n"
        f"management_address=http://127.0.0.1:{port}\n"
        f"cluster_address=http://127.0.0.1:{cluster_port}\n"
    )


def command(home: Path, config_file: Path, model: str, model_directory: Path) -> list[str]:
    registration = f"{model}::Python=file:{model_directory}"
    return [str(home / "bin" / "serving"), "-f", str(config_file), "-m", registration]


def environment(home: Path, scratch: Path) -> dict[str, str]:
    """What the start script reads. DJL looks for `plugins` in MODEL_SERVER_HOME and does without none."""
    server_home = home if (home / "plugins").is_dir() else scratch
    if server_home == scratch:
        (scratch / "plugins").mkdir(exist_ok=True)
    return {
        "MODEL_SERVER_HOME": str(server_home),
        "JAVA_OPTS": f"-Dai.djl.offline=true -Djava.io.tmpdir={scratch}",
        "DJL_CACHE_DIR": str(scratch / "cache"),
    }
