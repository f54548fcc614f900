"""Each keyword of a JSON schema is followed by OpenVINO GenAI's xgrammar, or refused by its name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from handler.core.values import StructuredOutput
from handler.engines.openvino.structured_output import count_logits, genai_arguments
from tests.model.openvino.scripted_model import Speaker
from tests.unit.engines.schema_cases import CASES, NONE, Case, written

pytestmark = [pytest.mark.model, pytest.mark.long]


def lost(case: Case) -> str:
    return case.lost if case.lost_openvino is None else case.lost_openvino


FOLLOWED = [case for case in CASES if not lost(case)]
REFUSED = [case for case in CASES if lost(case)]


@pytest.fixture(scope="module")
def num_logits(model: Path) -> int:
    found = count_logits(model)
    assert found
    return found


@pytest.fixture(scope="module")
def speaker(model: Path, num_logits: int) -> Speaker:
    lines = [written(one) for case in FOLLOWED for one in (case.valid, case.invalid) if one is not NONE]
    return Speaker(model, num_logits, lines)


@pytest.mark.parametrize("case", FOLLOWED, ids=lambda case: json.dumps(case.schema)[:80])
def test_it_is_followed(speaker: Speaker, case: Case) -> None:
    structured_output = genai_arguments(StructuredOutput("json_schema", json.dumps(case.schema)))
    if case.valid is not NONE:
        assert speaker.says(written(case.valid), structured_output)
    if case.invalid is not NONE:
        assert not speaker.says(written(case.invalid), structured_output)


def test_none_of_many_values_is_taken_for_another(model: Path, num_logits: int) -> None:
    """Words of few letters, which GenAI's xgrammar confuses where they stand side by side."""
    chance = random.Random(1)

    def drawn(count: int) -> list[str]:
        return list(dict.fromkeys("".join(chance.choices("abc", k=chance.randint(1, 4))) for _ in range(count)))

    values = drawn(60)
    texts = [*values, *drawn(120)]
    speaker = Speaker(model, num_logits, [*texts, *map(json.dumps, texts)])
    choice = genai_arguments(StructuredOutput("choice", json.dumps(values)))
    enum = genai_arguments(StructuredOutput("json_schema", json.dumps({"enum": values})))
    assert [text for text in texts if speaker.says(text, choice) != (text in values)] == []
    assert [text for text in texts if speaker.says(json.dumps(text), enum) != (text in values)] == []


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: json.dumps(case.schema)[:80])
def test_it_is_refused_by_name(case: Case) -> None:
    with pytest.raises(ValueError, match="cannot be followed by OpenVINO") as refusal:
        genai_arguments(StructuredOutput("json_schema", json.dumps(case.schema)))
    assert f"the schema's {lost(case)} cannot" in str(refusal.value)
