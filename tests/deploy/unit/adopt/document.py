"""docs/adopt.md: what becomes of public endpoints. `python -m tests.deploy.unit.adopt.document` writes it anew."""

from __future__ import annotations

from pathlib import Path

from deploy.adopt.source import Source
from deploy.adopt.specification import Adopted, Wishes, adopted
from tests.deploy.public_endpoints import OTHERS, PUBLIC, Public
from tests.docs.pages import fill

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


def render() -> str:
    made = {name: read(public) for name, public in PUBLIC.items()}
    idle = sum(what.partition("=")[0] in PUBLIC[name].environment for name, one in made.items() for what, _ in one.idle)
    left = {name: {what.partition("=")[0] for what, _ in (*one.unmapped, *one.idle)} for name, one in made.items()}
    maps = sum(len(public.environment.keys() - left[name]) for name, public in PUBLIC.items())
    unmapped = sorted({f"`{what}`" for one in made.values() for what, _ in one.unmapped})
    refused = "".join(
        f"* {name}: {why if why.startswith('the ') else f'the image {why}'}\n" for name, (_, why) in OTHERS.items()
    )
    text = (
        f"Of {len(PUBLIC) + len(OTHERS)} endpoints, {len(PUBLIC)} are adopted. "
        f"Of their variables, {maps} map, and {idle} have no effect. These do not map: {', '.join(unmapped)}.\n\n"
        f"The others are refused:\n\n{refused}"
    )
    return fill(DOCUMENT.read_text(encoding="utf-8"), "public", text)


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
