"""All of `make accept-aws` on doubles: the control plane on moto, the endpoint on the emulator and our own server."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from deploy.cli import main as cli
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import RuntimeEmulator
from deploy.spec.reading import read_spec
from tests.accept.aws import PASS, Ran, accept
from tests.accept.test_accept import ALL, CONTENT
from tests.deploy.aws.operations.test_operations import write
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployments import Deployer
from tests.deploy.doubles.endpoints import IMAGE, make_ready, set_quotas
from tests.deploy.local.servers import Loop
from tests.servers import serve


@pytest.fixture
def account(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """An account that has role, image, model and quota; whatever serves there is the echo engine.

    Requests go to the emulator, which has no policies: `client/` holds them to the invoker's.
    """
    make_ready(cloud)
    set_quotas(monkeypatch, {"ml.g6e.xlarge for endpoint usage": 4.0})
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="of-ours")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        s3.put_object(Bucket="of-ours", Key=f"llama/{name}", Body=b"{}")
    write(cloud, ["INFO serving"], group="/aws/sagemaker/Endpoints/accepted")
    cloud.sagemaker.polls = 0
    monkeypatch.setattr("deploy.cli.up.over_the_network", None)
    monkeypatch.setattr("deploy.cli.plan.over_the_network", None)
    loop = Loop()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        server = stack.enter_context(serve("--engine", "echo"))
        server.wait_ready()
        url = stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(server.url, name="accepted")).app()))
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", url)
        yield cloud


def in_process(command: Sequence[str]) -> Ran:
    """Without a process; `doctor` asks no hub."""
    began, out = time.monotonic(), io.StringIO()
    more = ["--aws-only"] if command[0] == "doctor" else []
    with contextlib.redirect_stdout(out):
        status = cli.main([*command, *more])
    return Ran(status, out.getvalue(), time.monotonic() - began)


def test_the_whole_of_it(account: Cloud, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    model = {**CONTENT["model"], "id": None, "s3": "s3://of-ours/llama/"}
    path.write_text(yaml.safe_dump({**CONTENT, "model": model, "image": {"uri": IMAGE, "cuda": "13.0"}}))
    Deployer(account, cli.main).takes(str(path))
    results = accept(read_spec(path), [str(path)], in_process)
    assert [(result.point, result.why) for result in results if result.verdict != PASS] == []
    assert [result.point for result in results] == ALL
    assert account.everything() == {}
    assert account.client("logs").describe_log_groups()["logGroups"] == []
