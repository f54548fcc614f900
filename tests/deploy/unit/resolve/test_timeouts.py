"""Timeouts out of a model's size."""

from __future__ import annotations

from deploy.resolve.resolver import times
from tests.one_test import in_one_test


@in_one_test(
    ("gib", "engine", "from_hub", "download", "startup"),
    [
        (15, "vllm", False, 660, 720),  # 300 + 15360 / 50; 600 + 15360 / 200
        (15, "trtllm", False, 660, 1620),  # fifteen minutes more
        (15, "vllm", True, 300, 1080),  # + 15360 / 40
        (0.25, "openvino", False, 360, 660),
        (None, "", False, 720, 720),
        (131, "trtllm", False, 3000, 2220),
    ],
)
def test_times(gib: float | None, engine: str, from_hub: bool, download: int, startup: int) -> None:
    assert times(gib, engine=engine, from_hub=from_hub) == (download, startup, ())


def test_an_image_that_compiles_gets_all_there_is() -> None:
    assert times(15, builds_engine=True).startup == 3600


def test_what_is_beyond_sagemakers_hour_is_said() -> None:
    found = times(756, from_hub=True)
    assert (found.download, found.startup) == (300, 3600)
    assert found.warnings == (
        "Loading 756 GiB may take longer than the 3600 s that SageMaker waits; put it into S3 (model.path), "
        "whose download is counted by itself.",
    )
    assert times(400).warnings == ("Model data of 400 GiB may take longer than the 3600 s that SageMaker waits.",)
