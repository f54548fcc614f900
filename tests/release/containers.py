"""The images of a release, each as an archive for `docker load`, by buildah or podman."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TIME = "1767225600"
"""Of all files in the layers (the Dockerfile's SOURCE_DATE_EPOCH)."""

LOCKS = {
    "cpu": ("docker/constraints-cpu.txt",),
    "llamacpp": ("docker/constraints-llamacpp.txt", "docker/constraints-llamacpp-source.txt"),
}
"""The files that pin an image's packages, by the Dockerfile's target."""

_ARGUMENTS = {"cpu": ("DEMO_MODEL=true",), "llamacpp": ()}
_PLATFORM_OF = {"x86_64": "amd64", "aarch64": "arm64"}


class Image(NamedTuple):
    """A target of the Dockerfile for an architecture (amd64, arm64)."""

    target: str
    architecture: str

    @property
    def name(self) -> str:
        return f"lmi-handler-{self.target}" + ("" if self.architecture == "amd64" else f"-{self.architecture}")


IMAGES = tuple(Image(target, architecture) for target in LOCKS for architecture in ("amd64", "arm64"))


def builder() -> str | None:
    """Return the program that builds: buildah, else podman, else None."""
    return next(filter(None, map(shutil.which, ("buildah", "podman"))), None)


def obstacle(image: Image) -> str:
    """Return why an image cannot be built here, or ""."""
    if builder() is None:
        return "neither buildah nor podman is on PATH"
    if _PLATFORM_OF.get(os.uname().machine) != image.architecture and not _emulates(image.architecture):
        return f"this machine runs no programs of {image.architecture} (qemu-user with binfmt_misc would)"
    return ""


def _emulates(architecture: str) -> bool:
    machine = next(name for name, platform in _PLATFORM_OF.items() if platform == architecture)
    return Path(f"/proc/sys/fs/binfmt_misc/qemu-{machine}").exists()


def build(image: Image, context: Path, archive: Path, version: str, revision: str) -> None:
    """Build an image and write it as an archive.

    Args:
        image: the image.
        context: a directory with the Dockerfile and what it copies.
        archive: the file to write, for `docker load` and `skopeo copy docker-archive:`.
        version: the package's version, which is the tag.
        revision: the commit's id.

    Raises:
        subprocess.CalledProcessError: if a step of the build fails.
    """
    program = builder()
    assert program is not None
    tag = f"{image.name}:{version}"
    arguments = [f"VERSION={version}", f"REVISION={revision}", *_ARGUMENTS[image.target]]
    command = [program, "build", "--platform", f"linux/{image.architecture}", "--format", "docker"]
    command += ["--timestamp", TIME, "--target", image.target, "--tag", tag]
    command += [word for argument in arguments for word in ("--build-arg", argument)]
    subprocess.run([*command, str(context)], check=True)
    archive.unlink(missing_ok=True)
    subprocess.run([program, "push", tag, f"docker-archive:{archive}:{tag}"], check=True)


def debian_packages(image: Image, version: str) -> Iterator[dict[str, Any]]:
    """Yield the components of a bill for the Debian packages of an image that was built here."""
    program = builder()
    assert program is not None
    tag = f"{image.name}:{version}"
    if Path(program).name == "podman":
        listed = _output(program, "run", "--rm", "--entrypoint", "cat", tag, "/var/lib/dpkg/status")
    else:
        container = _output(program, "from", "--pull-never", tag).strip()
        try:
            listed = _output(program, "run", container, "--", "cat", "/var/lib/dpkg/status")
        finally:
            subprocess.run([program, "rm", container], check=True, stdout=subprocess.DEVNULL)
    yield from components(listed)


def components(status: str) -> Iterator[dict[str, Any]]:
    """Yield the components of a bill for the packages in the text of dpkg's file `status`."""
    for paragraph in status.strip().split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", paragraph, re.MULTILINE))
        name, number, architecture = (fields[field] for field in ("Package", "Version", "Architecture"))
        yield {
            "type": "library",
            "bom-ref": f"debian-{name}-{architecture}",
            "name": name,
            "version": number,
            "purl": f"pkg:deb/debian/{name}@{number.replace('+', '%2B').replace(':', '%3A')}?arch={architecture}",
        }


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
