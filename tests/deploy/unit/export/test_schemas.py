"""The exports by the schemas of those who read them: Kubernetes, KServe's models, HyperPod's operator and template."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.unit.export.environment import python
from tests.deploy.unit.export.test_kubernetes import EXPORTED, exported

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
WRONG: list[tuple[str, str, list[Any]]] = [
    ("kubernetes", "Deployment", ["spec", "template", "spec", "containers", 0, "readyProbe"]),
    ("kubernetes", "HorizontalPodAutoscaler", ["spec", "minReplica"]),
    ("kserve", "InferenceService", ["spec", "predictor", "minReplica"]),
    ("kserve", "InferenceService", ["spec", "predictor", "containers", 0, "readyProbe"]),
    ("hyperpod", "InferenceEndpointConfig", ["spec", "worker", "ports"]),
    ("hyperpod", "InferenceEndpointConfig", ["spec", "instanceTyp"]),
]
"""Fields that no schema has, by their path."""


def verdicts(manifests: list[list[dict[str, Any]]]) -> Iterator[list[str]]:
    program = [str(python()), str(HERE / "validator.py")]
    done = subprocess.run(program, input=json.dumps(manifests), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return iter(json.loads(done.stdout))


def spoiled(format: str, kind: str, path: list[Any]) -> list[dict[str, Any]]:
    manifest = copy.deepcopy(next(one for one in exported("scaled", format)[0] if one["kind"] == kind))
    place: Any = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = {}
    return [manifest]


def test_every_schema_takes_what_is_exported_and_nothing_else() -> None:
    good = [exported(case, format)[0] for case, format in EXPORTED]
    found = verdicts([*good, *(spoiled(*wrong) for wrong in WRONG)])
    for name in EXPORTED:
        assert next(found) == [], name
    for wrong in WRONG:
        assert any(str(wrong[2][-1]) in text for text in next(found)), wrong
