"""The constraints that keep an image's engine as it was built."""

from __future__ import annotations

import runpy

from tests.container.images.dockerfile import ROOT

constraints = runpy.run_path(str(ROOT / "docker" / "hold.py"))["constraints"]


def test_what_is_installed_stays_and_what_is_not_is_ours() -> None:
    installed = {"torch": "2.9.1+cu130", "prometheus_client": "0.22.1", "Starlette": "0.49.1"}
    ours = ["# comment", "", "prometheus-client==0.26.0", "starlette==1.10.0", "orjson==3.13.0"]
    assert constraints(installed, ours, ["starlette"]) == [
        "orjson==3.13.0",
        "prometheus_client==0.22.1",
        "starlette==1.10.0",
        "torch==2.9.1+cu130",
    ]
