"""docs/adopt.md: what becomes of public endpoints. `python -m tests.deploy.unit.test_adopt_document` writes it."""

from __future__ import annotations

from pathlib import Path

from deploy.adopt.live import Source
from deploy.adopt.specification import Adopted, Wishes, adopted
from tests.deploy.public_endpoints import OTHERS, PUBLIC, Public
from tests.docs.pages import fill

# -- document ----------------------------------------------------------------------------------------------------------
# docs/adopt.md: what becomes of public endpoints. `python -m tests.deploy.unit.test_adopt_document` writes it anew.


DOCUMENT = Path(__file__).parents[3] / "docs" / "adopt.md"


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
    maps, idle = 0, 0
    unmapped: set[str] = set()
    for public in PUBLIC.values():
        made, given = read(public), public.environment.keys()
        without_effect = given & {what.partition("=")[0] for what, _ in made.idle}
        maps += len(given - without_effect - {what.partition("=")[0] for what, _ in made.unmapped})
        idle += len(without_effect)
        unmapped |= {what for what, _ in made.unmapped}
    refused = "; ".join(
        f"{name} ({why if why.startswith('the ') else f'the image {why}'})" for name, (_, why) in OTHERS.items()
    )
    text = (
        f"A test adopts {len(PUBLIC) + len(OTHERS)} endpoints from public notebooks, examples and guides. "
        f"{len(PUBLIC)} are adopted. Of their variables, {maps} map, {idle} have no effect, "
        f"and {len(unmapped)} settings do not map. Refused: {refused}.\n"
    )
    return fill(DOCUMENT.read_text(encoding="utf-8"), "public", text)


# -- docs/adopt.md says what becomes of the public endpoints -----------------------------------------------------------


def test_the_document_is_up_to_date_in_adopt_document() -> None:
    assert len(PUBLIC) >= 30
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written == render(), "write it anew: python -m tests.deploy.unit.test_adopt_document"


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
