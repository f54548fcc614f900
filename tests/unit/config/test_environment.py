"""What is read from environment variables, and from nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from handler.config import environment
from handler.config.options.names import KEY_VARIABLES, KEYS
from handler.core.errors import ConfigError


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set but what the test sets."""
    for name in os.environ:
        if name not in ("PATH", "HOME", "PYTEST_CURRENT_TEST"):
            monkeypatch.delenv(name)


def test_a_number_of_adapters_is_whole_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    name = environment._MAX_ADAPTERS
    assert environment.max_adapters() is None
    for text, number in (("1", 1), ("30", 30)):
        monkeypatch.setenv(name, text)
        assert environment.max_adapters() == number
    for text in ("0", "", "-1", "1.5", "many", "٣"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"{name}={text}: must be a whole number of at least 1"):
            environment.max_adapters()


def test_switches_are_on_only_by_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_on in (("true", True), (" TRUE ", True), ("1", True), ("", False), ("false", False), ("yes", False)):
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", text)
        assert environment.runtime_lora_updating() is is_on
        assert environment.secure_mode({environment.SECURE_MODE: text}) is (is_on and text != "1")
    assert not environment.secure_mode({})


def test_what_is_not_set_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.mpi_world() == ("", "")
    assert environment.download_directory() is None
    assert environment.aws_region() is None
    assert environment.custom_code() == {}
    assert environment.model_path({}) == environment.model_path({"SAGEMAKER_MODEL_PATH": ""}) == Path("/opt/ml/model")
    assert environment.netty_buffer_bytes() == 20 << 20
    assert environment.otlp_protocol() == "http/protobuf"
    assert (environment.api_key(), environment.server_key(), environment.secrets()) == ("", "", ())
    for name, value in {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "SERVING_DOWNLOAD_DIR": "/down",
        "AWS_REGION": "eu-west-1",
        "MAX_NETTY_BUFFER_SIZE": "77",
        "OPENAI_API_KEY": " key ",
        KEYS: " first , second",
    }.items():
        monkeypatch.setenv(name, value)
    assert environment.mpi_world() == ("4", "3")
    assert environment.download_directory() == Path("/down")
    assert environment.aws_region() == "eu-west-1"
    assert environment.model_path({"SAGEMAKER_MODEL_PATH": "/m"}) == Path("/m")
    assert environment.netty_buffer_bytes() == 77
    assert (environment.api_key(), environment.server_key()) == ("first", "key")
    assert {"first", "second"} <= {*environment.secrets()}
    assert "" not in environment.secrets()


def test_traces_are_exported_to_an_endpoint_unless_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not environment.exports_traces()
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "http://collector")
            assert environment.exports_traces()
            for off, value in (("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")):
                with patch.context() as more:
                    more.setenv(off, value)
                    assert not environment.exports_traces()
                    more.setenv(off, "otlp")
                    assert environment.exports_traces()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert environment.otlp_protocol() == "grpc"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    assert environment.otlp_protocol() == "http/json", "the more exact variable goes before"


def test_only_addresses_that_others_reach_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert environment.warning_without_keys(host) == ""
        assert environment.is_loopback(host) is (host != "localhost")
    for host in ("0.0.0.0", "::", "10.0.0.1", "host.example", ""):
        assert not environment.is_loopback(host)
        words = environment.warning_without_keys(host)
        assert f"no API key is set, and the server listens on {host}" in words
        assert f"set {KEYS}=KEY" in words
        djl = environment.warning_without_keys(host, checks_keys=False)
        assert "DJL Serving checks no API keys" in djl
        assert "LMI_FRONT=embedded" in djl
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/role")
    assert environment.warning_without_keys("0.0.0.0") == "", "only SageMaker reaches its containers"
    assert environment.key_variables() == (KEYS,)
    monkeypatch.setenv("ECS_CONTAINER_METADATA_URI_V4", "http://169.254.170.2/v4")
    assert environment.warning_without_keys("0.0.0.0"), "ECS gives its tasks a role too"
    assert environment.key_variables() == KEY_VARIABLES


def test_other_processes_get_the_environment_without_what_is_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVING_PORT", "SAGEMAKER_MULTI_MODEL", "SAGEMAKER_MODEL_PATH", *KEY_VARIABLES):
        monkeypatch.setenv(name, "x")
    assert os.environ.keys() - environment.of_worker().keys() == {"SERVING_PORT", "SAGEMAKER_MULTI_MODEL"}
    removed = os.environ.keys() - environment.of_embedded_server().keys()
    assert removed == {*KEY_VARIABLES} - {KEYS}


def test_a_token_of_another_server_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.name_hub_token()
    assert "HF_TOKEN" not in os.environ
    monkeypatch.setenv("HF_TOKEN", "")  # so that the fixture takes back what is set
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_API_TOKEN", "token")
    environment.name_hub_token()
    assert os.environ["HF_TOKEN"] == "token"


def test_only_text_that_java_has_broken_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the parent has the text; here, question marks stand for its bytes."""
    read = Path.read_bytes
    parent = "BROKEN=ä€\0OTHER=ä\0PLAIN=a\0".encode()
    texts = {f"/proc/{os.getppid()}/environ": parent, f"/proc/{os.getppid()}/stat": b"7 (a ) b) S 0 7"}
    monkeypatch.setattr(Path, "read_bytes", lambda path: texts[str(path)] if str(path) in texts else read(path))
    for name, value in (("BROKEN", "?????"), ("OTHER", "another"), ("PLAIN", "?")):
        monkeypatch.setenv(name, value)
    environment.restore_text()
    assert [os.environ[name] for name in ("BROKEN", "OTHER", "PLAIN")] == ["ä€", "another", "?"]


def test_the_gpus_of_a_model_are_the_product_of_its_parts() -> None:
    for stages in environment.STAGES:
        for contexts in environment.CONTEXTS:
            spread = environment.spread("2", {stages: 3, contexts: "5"})
            assert (spread, spread.least) == ((2, 3, 5), 30)
    assert environment.spread("max", {}) == (None, 1, 1)
    assert environment.spread("max", {}).least == 1
    assert environment.spread("2", {environment.STAGES[0]: "x", environment.CONTEXTS[0]: 0}) == (2, 1, 1)
    arguments = {"tensor_parallel_size": 4, environment.STAGES[0]: 2}
    assert environment.spread("2", {environment.STAGES[0]: 9, "engine_args": arguments}) == (4, 2, 1)
    assert str(environment.Spread(None, 1, 1)) == "option.tensor_parallel_degree=max"
    words = str(environment.Spread(2, 3, 5))
    assert words == "option.tensor_parallel_degree=2 and 3 stages and 5 parts of the context"
