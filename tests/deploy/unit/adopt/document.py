"""docs/adopt.md: the table of public endpoints. `python -m tests.deploy.unit.adopt.document` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.adopt.images import KINDS, container_kind
from deploy.adopt.source import Source
from deploy.adopt.specification import Adopted, Wishes, adopted
from deploy.errors import Refused
from tests.deploy.public_endpoints import OTHERS, PUBLIC, Public
from tests.docs.pages import fill, table

DOCUMENT = Path(__file__).parents[4] / "docs" / "adopt.md"


def read(public: Public) -> Adopted:
    """What adopt makes of the endpoint."""
    components = [
        {
            "InferenceComponentName": name,
            "Specification": {"ModelName": "by-hand-model", "ComputeResourceRequirements": needs},
            "RuntimeConfig": {"DesiredCopyCount": 1},
        }
        for name, needs in public.components.items()
    ]
    models = {"by-hand-model": public.model}
    return adopted(Source("chat", "a test", "us-east-1", {}, public.endpoint_config, models, components), Wishes())


def rows() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, public in PUBLIC.items():
        made = read(public)
        left = {what.partition("=")[0] for what, _ in (*made.unmapped, *made.idle)}
        maps = len(public.environment.keys() - left)
        idle = sum(what.partition("=")[0] in public.environment for what, _ in made.idle)
        unmapped = ", ".join(f"`{what}`" for what, _ in made.unmapped)
        kind = KINDS[container_kind(public.model["PrimaryContainer"]["Image"], None).kind].partition(" (")[0]
        found.append((name, kind, f"{maps} of {len(public.environment)}", str(idle), unmapped))
    for name, (public, _) in OTHERS.items():
        found.append((name, public.image.partition(":")[0], _refusal(public), "", ""))
    return found


def _refusal(public: Public) -> str:
    try:
        read(public)
    except Refused as error:
        return f"refused: {REASON.sub('', str(error))}"
    return ""


REASON = re.compile(r"the image \S+ ")


def render() -> str:
    head = ("endpoint", "container", "variables that map", "no effect", "does not map")
    return fill(DOCUMENT.read_text(encoding="utf-8"), "public", table(head, rows()))


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
