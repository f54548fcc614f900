"""A server whose log is JSON: all lines of its life are objects, its engine's process included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.servers import http, options, serve

TWO = {"parameters": {"max_new_tokens": 2}}
MODEL_PY = """
import subprocess, sys
from handler.formatters import output_formatter
print("of model.py", file=sys.stderr)
subprocess.run(["sh", "-c", "echo of a child >&2"])
"""


def test_all_lines_are_objects(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL_PY)
    (tmp_path / "serving.properties").touch()
    engine = options("option.engine_isolation=process", "option.echo_cues=true")
    with serve(str(tmp_path), "--engine", "echo", *engine, env={"LMI_LOG_FORMAT": "json"}) as server:
        server.wait_ready()
        assert server.post({"inputs": "a b", **TWO}, headers={"x-request-id": "r-1"}).status_code == 200
        assert server.post({"inputs": "a <raise>"}, headers={"x-request-id": "r-2"}).status_code == 424
        server.wait_ready()
        assert http.get(server.url + "/nothing%0Ahere?key=k", headers={"x-request-id": "r-3"}).status_code == 404
        assert http.get(server.url + "/invocations", headers={"x-request-id": "r-4"}).status_code == 405
    lines: list[dict[str, Any]] = [json.loads(line) for line in server.log.splitlines()]
    assert all(line["time"].endswith("Z") and line["level"] and line["logger"] for line in lines)
    by_id = {line["request_id"]: line for line in lines if "request_id" in line}
    assert (by_id["r-1"]["outcome"], by_id["r-1"]["tokens"]) == ("ok", 2)
    assert by_id["r-1"]["message"].startswith("id=r-1 outcome=ok prompt_tokens=2 ")
    assert (by_id["r-2"]["outcome"], "engine failure" in by_id["r-2"]["error"]) == ("failed", True)
    of_paths = [{name: by_id[id][name] for name in ("status", "method", "path")} for id in ("r-3", "r-4")]
    assert of_paths == [
        {"status": 404, "method": "GET", "path": "/nothing\nhere"},
        {"status": 405, "method": "GET", "path": "/invocations"},
    ]
    (failed,) = [line for line in lines if line["message"] == "engine failed"]
    assert failed["traceback"].startswith("Traceback (most recent call last):")
    messages = " | ".join(line["message"] for line in lines)
    for part in ("of model.py", "of a child", "ready after", "the engine is ready again after", "SIGTERM: stopping"):
        assert part in messages
