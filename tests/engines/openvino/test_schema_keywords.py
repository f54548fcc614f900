"""Each keyword of a JSON schema is followed by OpenVINO GenAI's xgrammar, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from handler.core import Guide
from handler.engines.openvino.guides import _num_logits, structured_output
from handler.engines.openvino.model import prepared
from tests.engines.openvino.scripted_model import Speaker
from tests.engines.schema_cases import CASES, NONE, Case, written

pytestmark = pytest.mark.model


def lost(case: Case) -> str:
    return case.lost if case.lost_openvino is None else case.lost_openvino


FOLLOWED = [case for case in CASES if not lost(case)]
REFUSED = [case for case in CASES if lost(case)]


@pytest.fixture(scope="module")
def speaker(demo_model: Path) -> Speaker:
    model = prepared(str(demo_model), "auto")
    num_logits = _num_logits(model)
    assert num_logits
    lines = [written(one) for case in FOLLOWED for one in (case.valid, case.invalid) if one is not NONE]
    return Speaker(model, num_logits, lines)


@pytest.mark.parametrize("case", FOLLOWED, ids=lambda case: json.dumps(case.schema)[:80])
def test_it_is_followed(speaker: Speaker, case: Case) -> None:
    guide = structured_output(Guide("json_schema", json.dumps(case.schema)))
    if case.valid is not NONE:
        assert speaker.says(written(case.valid), guide)
    if case.invalid is not NONE:
        assert not speaker.says(written(case.invalid), guide)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: json.dumps(case.schema)[:80])
def test_it_is_refused_by_name(case: Case) -> None:
    with pytest.raises(ValueError, match="cannot be followed by OpenVINO") as refusal:
        structured_output(Guide("json_schema", json.dumps(case.schema)))
    assert f"the schema's {lost(case)} cannot" in str(refusal.value)
