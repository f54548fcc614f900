"""boto3's sessions are not safe among threads: only one of them may make a client at a time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from botocore.hooks import HierarchicalEmitter

from deploy.client.runtime import Runtime


def test_threads_make_one_client_at_a_time() -> None:
    made: list[object] = []
    making = threading.Lock()

    def client(*_: Any, **__: Any) -> object:
        assert making.acquire(blocking=False), "two clients are being made at once"
        time.sleep(0.02)
        making.release()
        made.append(SimpleNamespace(meta=SimpleNamespace(events=HierarchicalEmitter())))
        return made[-1]

    runtime = Runtime("e", "us-east-1", session=SimpleNamespace(client=client, region_name="us-east-1"))
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda kind=kind: found.append(getattr(runtime, kind)))
        for kind in 4 * ["_client", "_streaming"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert len(found) == 8
