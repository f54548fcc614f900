"""A web page in the place of AWS's answer, in every protocol of AWS: one line with its status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, as_deploy_error
from deploy.cli.main import main
from deploy.client import Patience, Predictor, RequestFailed
from tests.doubles.http_thread import serving
from tests.one_test import in_one_test

PAGE = "<!DOCTYPE html>\n<html><head><title>Login &amp;\n welcome</title></head>\n<body>" + "<p>row</p>\n" * 500
CALLS = {
    "sagemaker": "list_endpoints",  # JSON
    "sts": "get_caller_identity",  # query
    "cloudwatch": "describe_alarms",  # CBOR
    "s3": "list_buckets",  # XML
    "ec2": "describe_subnets",  # EC2's query
}


@contextmanager
def pages(status: int, kind: str = "text/html", body: str = PAGE) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@in_one_test(
    ("service", "status"), [(service, status) for service in CALLS for status in (200, 302, 403, 407, 502, 503)]
)
def test_every_protocol_tells_the_status_in_a_line(service: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(status) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises((BotoCoreError, ClientError)) as raised:
            getattr(Aws("us-east-1").client(service), CALLS[service])()
    assert isinstance(raised.value, BotoCoreError | ClientError)
    said = str(as_deploy_error(raised.value))
    if (service, status) == ("s3", 200):
        status = 500  # which botocore itself makes of it
    assert str(status) in said
    assert "\n" not in said
    assert len(said) < 200, said
    assert "<" not in said
    assert ("(Login & welcome)" in said) == (status < 500)


def test_a_command_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pages(403) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(["status", "chat"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "lmi deploy: DescribeEndpoint: HTTP 403: a web page (Login & welcome) in place of AWS's answer "
        "(a proxy's, or a login's?)\n"
    )


def test_a_body_that_is_neither_page_nor_answer_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pages(200, "text/plain", "no XML\n" * 100) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(["doctor", "--name", "chat", "--role", "arn:aws:iam::123456789012:role/lmi", "--image",
                     "123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi:1", "--model", "s3://models/a/",
                     "--instance-type", "ml.g5.xlarge", "--set", "instance.unchecked=true"]) in (1, 2)  # fmt: skip
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert max(map(len, (said.out + said.err).splitlines())) < 300
    assert "cannot be read" in said.out + said.err


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_client_of_an_endpoint_is_told_too(status: int) -> None:
    session = boto3.session.Session("a", "b", region_name="us-east-1")
    with pages(status) as url:
        predictor = Predictor("chat", "us-east-1", endpoint_url=url, session=session, patience=Patience(busy=0, cold=0))
        with pytest.raises(RequestFailed) as raised:
            predictor.predict({"inputs": "a"})
    said = str(raised.value)
    assert str(status) in said
    assert len(said.splitlines()) == 1
    assert "<p>" not in said
