"""Models of S3: what is downloaded where, what is kept, and what is refused in a line. moto plays S3."""

from __future__ import annotations

import errno
import functools
import gc
import multiprocessing
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.config.engines import ENGINES
from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.engines import downloads, s3
from handler.plugins.functions import model_py
from handler.serving.check import check
from handler.serving.engine import engine_spec, read_sources
from handler.serving.user_code import adapter_directories, model_py_directory
from tests.doubles import tiny
from tests.doubles.downloads import Bucket, serve_bucket

REGION = "eu-west-1"
MODEL = {"config.json": b"{}", "model-00001.safetensors": b"x" * 70_000, "adapters/legal/adapter_config.json": b"[]"}
CURE = "if they are the model's ModelDataSource and option.model_id is not set"


def _client() -> Any:
    import boto3

    return boto3.client("s3", region_name=REGION)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # not above: vLLM's environment lacks it, and collects this file

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def aws(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
                        "AWS_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true",
                        "SERVING_DOWNLOAD_DIR": str(tmp_path)}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


@pytest.fixture(scope="module", autouse=True)
def descriptions() -> Iterator[None]:
    """Let all sessions read botocore's descriptions of services once: each would anew, for 0.1 s of each download."""
    from botocore import session  # which a Python that an engine came with may lack

    with mock.patch.object(session, "create_loader", functools.cache(session.create_loader)):
        yield


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    name = f"models-{abs(hash(request.node.name))}"
    _client().create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
    return name


def put(bucket: str, objects: Mapping[str, bytes]) -> None:
    client = _client()
    for key, data in objects.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("end", ["", "/", "/*"])
def test_all_objects_below_the_prefix_lie_in_a_directory(bucket: str, tmp_path: Path, end: str) -> None:
    other = {"llama/": b"", "llama/adapters/": b"", "llama-2/config.json": b"other"}
    put(bucket, {**{f"llama/{name}": data for name, data in MODEL.items()}, **other})
    directory = s3.download(f"s3://{bucket}/llama{end}")
    assert files(directory) == MODEL
    assert directory.parent == tmp_path / "download"


def test_a_whole_bucket_may_be_the_model(bucket: str) -> None:
    put(bucket, MODEL)
    assert files(s3.download(f"s3://{bucket}")) == MODEL


def test_only_what_a_tokenizer_needs_is_downloaded_for_a_server_by_url(bucket: str) -> None:
    put(bucket, {f"a/{name}": data for name, data in MODEL.items()})
    assert files(s3.download(f"s3://{bucket}/a", ["*.json"])).keys() == MODEL.keys() - {"model-00001.safetensors"}


def test_a_second_start_downloads_what_has_changed_alone(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(bucket, MODEL)
    first = s3.download(f"s3://{bucket}/")
    assert s3.download(f"s3://{bucket}/") == first
    assert "was downloaded before" in capsys.readouterr().err
    put(bucket, {"config.json": b'{"a": 1}'})
    second = s3.download(f"s3://{bucket}/")
    assert second != first
    assert files(second) == {**MODEL, "config.json": b'{"a": 1}'}
    assert files(first) == MODEL  # a server may read it


@pytest.mark.parametrize(
    ("url", "objects", "message"),
    [
        ("s3://{}/none/", {}, "there are no files below it"),
        (
            "s3://{}/a",
            {"a/b/config.json": b"{}"},
            "contains no model: no config.json, .* but b/. Name the prefix that contains",
        ),
        ("s3://{}/a", {"a/model.tar.gz": b"x"}, "but model.tar.gz. .* archives are not unpacked"),
        ("s3://{}/a.gguf", {"a.gguf": b"x"}, "it is a single object; name the prefix of the directory"),
        ("s3://{}/a", {"a/config.json": b"{}", "a/../b": b"x"}, "'a/../b' is not a valid file path"),
        ("s3://{}/a", {"a/config.json": b"{}", "a//b": b"x"}, "'a//b' is not a valid file path"),
        ("s3://{}/a/m*", {}, "write it as s3://BUCKET/PREFIX/"),
        ("s3:///a", {}, "write it as s3://BUCKET/PREFIX/"),
        ("s3://no-such-bucket-here/a", {}, f"there is no bucket no-such-bucket-here .NoSuchBucket.*{CURE}"),
        ("s3://A b/a", {}, "'A b' is not the name of a bucket; write it as s3://BUCKET/PREFIX/"),
    ],
)
def test_what_is_no_model_is_refused_in_a_line(
    bucket: str, tmp_path: Path, url: str, objects: Mapping[str, bytes], message: str
) -> None:
    put(bucket, objects)
    with pytest.raises(ConfigError, match=message) as refused:
        s3.download(url.format(bucket))
    assert "\n" not in str(refused.value)
    assert not any(tmp_path.rglob("*.json"))


def test_a_bucket_s_root_of_many_models_is_not_downloaded(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_MOST_OBJECTS", 2)
    put(bucket, MODEL)
    with pytest.raises(ConfigError, match="has more than 2 objects: name the prefix of one model"):
        s3.download(f"s3://{bucket}")


def test_disk_space_is_asked_first(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(bucket, MODEL)
    usage = type("Usage", (), {"free": 70_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    message = f"70.0 kB do not fit into {tmp_path}/download, where 70.0 kB are free (4 B are missing). Free some space"
    with pytest.raises(ConfigError, match=re.escape(message)):
        s3.download(f"s3://{bucket}/")
    assert not any(tmp_path.rglob("*.json"))


def test_a_disk_that_fills_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **others: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    put(bucket, MODEL)
    monkeypatch.setattr("s3transfer.utils.OSUtils.rename_file", full)
    with pytest.raises(ConfigError, match="cannot be saved: No space left on device; free some space, or set SERVING"):
        s3.download(f"s3://{bucket}/")


def test_no_credentials_are_named(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=f"there are no AWS credentials here .*{CURE}"):
        s3.download(f"s3://{bucket}/")


def test_a_s3_out_of_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries
    with pytest.raises(ConfigError, match=f"S3 does not respond .EndpointConnectionError.*gateway endpoint.*{CURE}"):
        s3.download("s3://bucket/a")


def test_a_profile_that_does_not_exist_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    said = r"cannot be fetched: The config profile \(nobody\) could not be found \(ProfileNotFound\)"
    with pytest.raises(ConfigError, match=f"{said}.*{CURE}"):
        s3.download(f"s3://{bucket}/")


def of(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.mark.parametrize(
    ("failures", "headers", "message"),
    [
        ({"list": (403, "AccessDenied")}, {}, "s3:ListBucket on arn:aws:s3:::b, and s3:GetObject on arn:aws:s3:::b/a/"),
        ({"model": (403, "AccessDenied")}, {}, "kms:Decrypt on the KMS key"),
        ({"model": (403, "InvalidObjectState")}, {}, "an object is archived"),
        ({"model": (404, "NoSuchKey")}, {}, "was deleted during the download"),
        ({"/b": (400, "ExpiredToken")}, {}, "S3 refused the request .ExpiredToken"),
        ({"/b": (400, "AuthorizationHeaderMalformed")}, {}, "is in another region: set AWS_REGION to that region"),
        ({"/b": (301, "PermanentRedirect")}, {"x-amz-bucket-region": "us-west-2"}, "set AWS_REGION=us-west-2"),
    ],
)
def test_what_s3_refuses_has_its_cure(
    monkeypatch: pytest.MonkeyPatch,
    failures: Mapping[str, tuple[int, str]],
    headers: Mapping[str, str],
    message: str,
) -> None:
    model = {f"a/{name}": data for name, data in MODEL.items()}
    with serve_bucket(model, failures=failures, headers=headers) as bucket:
        of(bucket, monkeypatch)
        with pytest.raises(ConfigError, match=f"{message}.*{CURE}") as refused:
            s3.download("s3://b/a")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "s3://b has changed"),
        ("other.json", "s3://b has changed"),
        ("model-00001.safetensors", "an object was replaced"),
    ],
)
def test_an_object_that_is_replaced_meanwhile_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    with serve_bucket(MODEL) as bucket:
        of(bucket, monkeypatch)
        listed = s3._listed

        def replaced(*arguments: Any) -> Any:
            found = listed(*arguments)
            bucket.objects[name] = bytes(len(MODEL.get(name, b"")))  # as long as before
            return found

        monkeypatch.setattr(s3, "_PIECE", 10_000)  # the larger one comes in pieces
        monkeypatch.setattr(s3, "_listed", replaced)
        with pytest.raises(ConfigError, match=f"{message} during the download; start again"):
            s3.download("s3://b")
        monkeypatch.setattr(s3, "_listed", listed)
        assert files(s3.download("s3://b")) == bucket.objects


def test_an_object_that_does_not_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_bucket({"config.json": b"{}"}, rate=1 << 21) as bucket:
        of(bucket, monkeypatch)
        bucket.more = b"z" * (1 << 22)
        with pytest.raises(ConfigError, match=r"S3 sent more than 2 bytes of .*json; start again"):
            s3.download("s3://b")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # botocore leaves the connection, as the process ends


def test_a_list_of_directories_alone_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_MOST_OBJECTS", 2)
    with serve_bucket({f"{name}/": b"" for name in "abc"}) as bucket:
        of(bucket, monkeypatch)
        with pytest.raises(ConfigError, match="has more than 2 objects"):
            s3.download("s3://b")


def test_whole_files_of_a_start_that_was_killed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_bucket(MODEL) as bucket:
        of(bucket, monkeypatch)
        whole = s3.download("s3://b")
        part = whole.rename(whole.with_name(whole.name.partition("-")[0] + ".part"))
        (part / "model-00001.safetensors.Ab12cD34").write_bytes(b"half")  # of an older release
        (part / "model-00001.safetensors").write_bytes(b"z" * 70_000)  # not by us: it lacks the object's time
        bucket.asked.clear()
        assert files(s3.download("s3://b")) == MODEL
    assert not part.exists()
    assert [one for one in bucket.asked if one != "?list"] == ["model-00001.safetensors"]


def test_large_files_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_PIECE", 10_000)
    with serve_bucket(MODEL) as bucket:
        of(bucket, monkeypatch)
        assert files(s3.download("s3://b")) == MODEL
    assert sum("bytes=" in one for one in bucket.asked) == 7


def test_an_answer_that_breaks_off_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_PIECE", 10_000)
    with serve_bucket(MODEL) as bucket:
        of(bucket, monkeypatch)
        bucket.cut = 4
        assert files(s3.download("s3://b")) == MODEL
        bucket.objects.clear()
        bucket.objects["config.json"] = b"[]"
        bucket.cut = 5
        with pytest.raises(ConfigError, match=f"S3 does not respond .*{CURE}"):
            s3.download("s3://b")


@pytest.mark.parametrize("size", ["many", "-1", "1e3"])
def test_a_size_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    with serve_bucket(MODEL) as bucket:
        of(bucket, monkeypatch)
        bucket.size = size
        with pytest.raises(ConfigError, match=f"s3://b: the list of its objects cannot be read: .*{size}"):
            s3.download("s3://b")


def test_a_list_of_objects_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_bucket({**{f"a/{name}": data for name, data in MODEL.items()}, "b/xconfig.json": b"{}"}) as bucket:
        of(bucket, monkeypatch)
        bucket.strays = True
        with pytest.raises(ConfigError, match=r"cannot be read: .*'b/xconfig.json' is not below"):
            s3.download("s3://b/a")


def test_a_list_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_MOST_PAGES", 3)
    with serve_bucket({}) as bucket:
        of(bucket, monkeypatch)
        bucket.endless = True
        with pytest.raises(ConfigError, match="s3://b: the list of its objects does not end after 3 pages"):
            s3.download("s3://b")


def test_processes_that_start_together_download_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_bucket(MODEL, rate=50_000) as bucket:
        of(bucket, monkeypatch)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            first, second = pool.map(s3.download, ["s3://b", "s3://b/"])
    assert first == second
    assert sorted(one for one in bucket.asked if one != "?list") == sorted(MODEL)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(s3, "_SECONDS", 0.2)
    with serve_bucket(MODEL, rate=100_000) as bucket:
        of(bucket, monkeypatch)
        directory = s3.download("s3://b")
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"downloading s3://b: 3 files, 70.0 kB, to {directory.parent}"
    assert any("MB/s" in line and "s left" in line for line in told[1:])


def test_a_check_knows_what_a_start_would_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"OPTION_MODEL_ID": "s3://b/a/", "OPTION_LLM_ENGINE": "vllm"}

    def found() -> list[str]:
        return [str(one) for one in check(read_config(environ=environ)) if "not installed" not in one.message]

    assert found() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [line] = found()
    assert line.startswith("environment variable OPTION_MODEL_ID: s3://b/a/: downloads need boto3: pip install ")
    assert CURE in line


def test_time_of_a_file_is_its_object_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_bucket(MODEL) as bucket:
        of(bucket, monkeypatch)
        directory = s3.download("s3://b")
    assert os.stat(directory / "config.json").st_mtime == 1772359200


def test_engines_get_directories_in_the_place_of_urls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a draft model too. Adapters of the prefix are found, and code of it is not run."""
    model = tiny.make(tmp_path / "model")
    (model / "adapters" / "legal").mkdir(parents=True)
    (model / "model.py").write_text("raise SystemExit")
    asked: list[Any] = []

    def fetch(download: Any, url: str, *arguments: Any) -> str:
        asked.append((download, url, *arguments))
        return str(model)

    monkeypatch.setattr(downloads, "fetch", fetch)
    monkeypatch.setattr("handler.engines.entry", lambda name: ENGINES[name])
    given = {"OPTION_MODEL_ID": "s3://b/a", "OPTION_LLM_ENGINE": "vllm", "OPTION_SPECULATIVE_DRAFT_MODEL": "s3://b/d"}
    config = read_config(environ=given).checked()
    spec = engine_spec(config)
    assert asked == [(s3.download, "s3://b/a", []), (s3.download, "s3://b/d", [])]
    assert spec.config.model == model
    assert spec.config.options.engine_options["speculative_draft_model"] == str(model)
    assert adapter_directories(spec.config.options, None) == [model / "adapters"]
    assert "model.py of the model on S3 is ignored" in caplog.text


# -- HF_MODEL_ID names the model directory itself, as in LMI -----------------------------------------------------


OPTIONS = b"option.rolling_batch=vllm\noption.max_model_len=64\noption.chat_template=chat.jinja\n"
DIRECTORY = {"serving.properties": OPTIONS, "model.py": b"x = 1\n", "chat.jinja": b"{{ messages }}"}
ADAPTER = "adapters/legal/adapter_config.json"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Download in this process."""
    monkeypatch.setattr(downloads, "fetch", lambda download, url, *arguments: str(download(url, *arguments)))


@pytest.mark.usefixtures("here")
def test_the_directory_of_hf_model_id_has_options_and_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("handler.engines.entry", lambda name: ENGINES[name])
    monkeypatch.setenv("HF_MODEL_ID", "s3://b/a/")
    model = tiny.make(tmp_path / "model")
    objects = {**files(model), **DIRECTORY, ADAPTER: b"[]"}
    with serve_bucket({f"a/{name}": data for name, data in objects.items()}) as bucket:
        of(bucket, monkeypatch)
        config = read_sources(overrides=["option.max_input_len=32"]).checked()
        assert not [one for one in bucket.asked if "safetensors" in one or "adapters" in one]
        assert (config.engine, config.max_model_len, config.max_input_len) == ("vllm", 64, 32)
        assert config.where("option.max_model_len") == "serving.properties, line 2"
        assert config.model_id == "s3://b/a/"
        assert model_py(model_py_directory(config)) is not None
        spec = engine_spec(config)
    assert spec.config.model is not None
    assert files(spec.config.model) == objects
    assert spec.config.options.directory == spec.config.model
    assert spec.config.chat_template == "{{ messages }}"
    assert adapter_directories(spec.config.options, None) == [spec.config.model / "adapters"]
    assert "on S3 is ignored" not in caplog.text


@pytest.mark.usefixtures("here")
def test_it_may_name_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODEL_ID", "s3://b")
    with serve_bucket({"serving.properties": b"option.model_id=owner/model"}) as bucket:
        of(bucket, monkeypatch)
        assert read_sources().config.model_id == "owner/model"


@pytest.mark.usefixtures("here")
def test_a_directory_without_options_is_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODEL_ID", "s3://b")
    with serve_bucket({"a/b": b"", "model.safetensors": b""}) as bucket:
        of(bucket, monkeypatch)
        assert read_sources().config.model_id == "s3://b"
        bucket.objects.clear()
        with pytest.raises(ConfigError, match="there are no files below it"):
            read_sources()


@pytest.mark.parametrize(
    ("environ", "arguments"),
    [
        ({"OPTION_MODEL_ID": "s3://b"}, {}),
        ({"OPTION_MODEL_ID": "s3://b", "HF_MODEL_ID": "s3://b"}, {}),
        ({}, {"model": "s3://b"}),
        ({"HF_MODEL_ID": "s3://b"}, {"engine": "echo"}),
        ({"HF_MODEL_ID": "s3://b"}, {"properties": Path("serving.properties")}),
        ({"HF_MODEL_ID": "owner/model"}, {}),
    ],
    ids=str,
)
def test_other_names_read_nothing_of_s3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: Mapping[str, str], arguments: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serving.properties").write_text("")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(downloads, "fetch", lambda *arguments: pytest.fail("it downloads"))
    assert read_sources(**arguments).config.model_id in ("s3://b", "owner/model")
