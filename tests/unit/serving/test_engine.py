"""Choice of the engine, its downloads, and the check of structured output before it."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from handler import engines
from handler.config.config import Config
from handler.config.loader import read_config
from handler.core.errors import BadRequest, ConfigError
from handler.core.user_functions import Role
from handler.core.values import Task
from handler.engines import downloads, s3
from handler.engines.base import EngineConfig, EngineInfo
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import ANYWHERE, Placement
from handler.http import server
from handler.plugins.functions import Formatters
from handler.scheduler.lora import AdapterHome
from handler.serving import engine as serving_engine
from handler.serving import start
from handler.serving.engine import (
    check_replicas,
    choose_engine,
    downloads_of,
    engine_spec,
    hub_note,
    read_sources,
    start_engine,
)
from handler.serving.start import load_tokenizer, make_validator, server_context
from handler.serving.user_code import adapter_home, model_formatters
from tests.limits import undocumented
from tests.user_files import write_adapter


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("llm_engine=openvino", "the engine openvino runs on one device"),
        ("engine_python=/opt/python", "pass it to the server of option.engine_python as a flag"),
    ],
)
def test_an_engine_of_one_device_refuses_tensor_parallelism(option: str, advice: str) -> None:
    settings = read_config(overrides=["option.llm_engine=openvino", "option.tensor_parallel_degree=2"]).config
    if option.startswith("engine_python"):
        settings = replace(settings, engine_options={**settings.engine_options, "engine_python": "/opt/python"})
    with pytest.raises(ConfigError, match=advice):
        choose_engine(settings)


def test_only_an_engine_that_fetches_models_downloads_from_s3() -> None:
    settings = read_config(overrides=["option.model_id=s3://bucket/a/"]).config
    assert downloads_of(settings, "echo") == {}
    assert downloads_of(settings, "vllm") == {"option.model_id": "s3://bucket/a/"}


def test_structured_output_is_checked_for_generation_only() -> None:
    assert make_validator(Spec("openvino", EngineConfig(Config(), task=Task.EMBEDDING))) is None


def configured(*options: str, **fields: Any) -> Config:
    return replace(read_config(overrides=[*options], environ={}).config, **fields)


def alone(*options: str) -> Config:
    """Without an engine: `handle` of model.py answers all requests."""
    return configured(*options, handle_role=Role.ALONE)


# -- what is fetched and prepared before an engine starts --------------------------------------------------------


def test_the_urls_of_a_drafts_files_and_of_a_lone_handles_are_downloads() -> None:
    draft = "option.speculative_draft_model=s3://bucket/draft/"
    config = configured("option.model_id=a/b", "option.llm_engine=vllm", draft)
    assert downloads_of(config, "vllm") == {"option.speculative_draft_model": "s3://bucket/draft/"}
    assert downloads_of(alone("option.model_id=s3://bucket/a/"), "echo") == {"option.model_id": "s3://bucket/a/"}
    assert downloads_of(alone("option.model_id=a/b"), "echo") == {}


def test_a_model_of_the_hub_is_told_to_be_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()

    def note(model: str, engine: str = "vllm", make: Any = configured) -> str:
        return hub_note(make(f"option.model_id={model}"), engine)

    assert note("owner/model") == "owner/model: not checked; at startup it is downloaded from the hub"
    assert note("owner/model", "openvino").startswith(
        "owner/model: not checked; at startup it is downloaded from the hub; "
    )
    assert note("model").startswith("model: not checked; it is not a file or directory on this machine")
    assert note(str(tmp_path / "there")) == note("owner/model", "echo") == note("owner/model", make=alone) == ""


class Fetches:
    """Engines that fetch a model of S3 into a directory, and prepare it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.fetched: list[str | None] = []
        self.directory = directory
        self.task = Task.GENERATION
        monkeypatch.setattr(engines, "fetch", self.fetch)
        monkeypatch.setattr(engines, "prepare", lambda name, model, config: Path(model))
        monkeypatch.setattr(serving_engine, "choose_engine", lambda config: "echo")
        monkeypatch.setattr(serving_engine, "served_task", lambda config, engine, model: self.task)

    def fetch(self, name: str, model_id: str | None, config: EngineConfig) -> str | None:
        self.fetched.append(model_id)
        return str(self.directory) if model_id is not None and model_id.startswith("s3:") else model_id


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fetches:
    return Fetches(monkeypatch, tmp_path)


def test_urls_of_s3_become_the_directories_of_their_files(
    fetches: Fetches, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("model.py", "serving.properties", "config.json"):
        (tmp_path / name).touch()
    draft = "option.speculative_draft_model=s3://bucket/draft/"
    spec = engine_spec(configured("option.model_id=s3://bucket/a/", "option.llm_engine=vllm", draft))
    options = spec.config.options
    assert (options.model_id, options.directory) == (str(tmp_path), None)
    assert options.engine_options["speculative_draft_model"] == str(tmp_path)
    assert fetches.fetched == ["s3://bucket/a/", "s3://bucket/draft/"]
    assert (spec.config.model, spec.config.source, spec.config.task) == (tmp_path, None, Task.GENERATION)
    assert caplog.messages == [
        f"{name} of the model on S3 is ignored: options and code are read from this machine"
        for name in ("serving.properties", "model.py")
    ]


def test_settings_that_came_from_s3_are_those_in_the_models_directory(
    fetches: Fetches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.py").touch()
    monkeypatch.setattr(s3, "is_download", lambda directory: True)
    spec = engine_spec(configured("option.model_id=s3://bucket/a/", directory=Path("/elsewhere")))
    assert spec.config.options.directory == tmp_path
    assert caplog.messages == []


def test_a_converted_model_keeps_its_source(fetches: Fetches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = tmp_path / "converted"
    monkeypatch.setattr(engines, "prepare", lambda name, model, config: converted)
    spec = engine_spec(configured(f"option.model_id={tmp_path}"))
    assert (spec.config.model, spec.config.source) == (converted, tmp_path)
    assert engine_spec(configured("option.model_id=owner/model")).config.source is None


def test_files_that_cannot_be_fetched_stop_the_start(fetches: Fetches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "fetch", mock.Mock(side_effect=OSError("no route")))
    with pytest.raises(ConfigError, match=r"^the model's files cannot be fetched: no route$"):
        engine_spec(configured("option.model_id=s3://bucket/a/"))


def test_a_whole_model_directory_of_s3_brings_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_MODEL_ID names one; `option.model_id` names the model's files alone."""
    fetched = mock.Mock(return_value=str(tmp_path))
    monkeypatch.setattr(downloads, "fetch", fetched)
    for name in [name for name in os.environ if name.startswith(("OPTION_", "HF_", "SERVING_"))]:
        monkeypatch.delenv(name)
    assert read_sources("s3://bucket/a/", "openvino").config.directory is None
    monkeypatch.setenv("HF_MODEL_ID", "s3://bucket/a/")
    assert read_sources(engine="echo").config.directory is None, "it reads no files"
    assert fetched.call_count == 0
    read = read_sources(engine="openvino", overrides=iter(["option.max_model_len=99"])).config
    assert (read.model_id, read.directory) == ("s3://bucket/a/", tmp_path)
    assert fetched.call_args.args[1] == "s3://bucket/a/"
    (tmp_path / "serving.properties").write_text("option.model_id=own/model\noption.max_model_len=7\n")
    read = read_sources(engine="openvino", overrides=iter(["option.max_rolling_batch_size=99"])).config
    assert (read.model_id, read.directory, read.max_rolling_batch_size) == ("own/model", tmp_path, 99)
    monkeypatch.setenv("OPTION_MODEL_ID", "s3://bucket/a/")
    fetched.reset_mock()
    assert read_sources(engine="openvino").config.directory is None
    assert fetched.call_count == 0


# -- how engines start -------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What `EngineSupervisor` and `ReplicaSet` are called with; the replicas have GPUs 0 and 1."""
    calls = mock.Mock()
    monkeypatch.setattr(serving_engine, "EngineSupervisor", calls.engine)
    monkeypatch.setattr(serving_engine, "ReplicaSet", calls.replicas)
    places = [Placement({"CUDA_VISIBLE_DEVICES": "0"}), Placement({}, frozenset({3, 2}))]
    monkeypatch.setattr(serving_engine, "replica_places", lambda config, devices, cores: places)
    return calls


def spec_of(config: Config, engine: str = "echo") -> Spec:
    return Spec(engine, EngineConfig(config))


@pytest.mark.parametrize(
    ("options", "isolated"), [((), True), (("option.engine_isolation=thread",), False), (("option.replicas=1",), True)]
)
def test_one_engine_starts_anywhere(started: mock.Mock, options: tuple[str, ...], isolated: bool) -> None:
    config = configured("option.llm_engine=echo", "option.engine_timeout=7", "option.model_loading_timeout=9", *options)
    with mock.patch.object(engines, "entry", return_value=SimpleNamespace(isolated=True)):
        assert start_engine(config, spec_of(config)) is started.engine.return_value
    started.engine.assert_called_once_with(
        spec_of(config), isolated=isolated, placement=ANYWHERE, timeout=7.0, load_timeout=9.0
    )
    assert not started.replicas.called


def test_a_server_at_a_url_may_take_any_time_to_load(started: mock.Mock) -> None:
    config = configured("option.llm_engine=openai", "option.base_url=http://127.0.0.1:1/v1")
    start_engine(config, spec_of(config, "openai"))
    assert started.engine.call_args.kwargs["load_timeout"] == math.inf


@pytest.mark.parametrize(
    ("timeout", "patience", "caching", "follows"),
    [("4", 2.0, None, True), ("100", 25.0, "false", False), ("8", 2.0, "true", True)],
)
def test_replicas_run_as_processes_and_share_requests(
    started: mock.Mock,
    caplog: pytest.LogCaptureFixture,
    timeout: str,
    patience: float,
    caching: str | None,
    follows: bool,
) -> None:
    caplog.set_level(logging.INFO, "handler.launch")
    more = [f"option.enable_prefix_caching={caching}"] if caching else []
    config = configured(
        "option.llm_engine=vllm", "option.replicas=2", f"option.engine_timeout={timeout}",
        "option.max_rolling_batch_size=5", *more,
    )  # fmt: skip
    entry = SimpleNamespace(isolated=False)
    with mock.patch.object(engines, "entry", return_value=entry):
        assert start_engine(config, spec_of(config, "vllm")) is started.replicas.return_value
    assert [call.kwargs["isolated"] for call in started.engine.call_args_list] == [True, True]
    assert started.replicas.call_args == mock.call(
        [started.engine.return_value] * 2, 5, follows_prompts=follows, patience=patience
    )
    assert caplog.messages == ["replica 0: CUDA_VISIBLE_DEVICES=0", "replica 1: cores 2,3"]


def test_replicas_of_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"replicas run as processes, but option\.engine_isolation=thread"):
        check_replicas(configured("option.llm_engine=echo", "option.replicas=2", "option.engine_isolation=thread"))
    check_replicas(configured("option.llm_engine=echo", "option.replicas=1", "option.engine_isolation=thread"))


def test_an_engine_of_one_device_takes_degrees_of_one_device() -> None:
    chosen = configured("option.llm_engine=openvino", "option.tensor_parallel_degree=2")
    with pytest.raises(ConfigError, match=r"the engine openvino runs on one device$"):
        choose_engine(chosen)
    with pytest.raises(ConfigError, match=r"runs on one device; option\.llm_engine selects another engine$"):
        choose_engine(replace(chosen, llm_engine="auto"))
    for degree in ("1", "max"):
        chosen = configured("option.llm_engine=openvino", f"option.tensor_parallel_degree={degree}")
        assert choose_engine(chosen) == "openvino"
    assert choose_engine(configured("option.llm_engine=echo", "option.tensor_parallel_degree=2")) == "echo"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("\n  first  \nsecond\n"), "first"),
        (RuntimeError("Check 'a' failed at b.cpp:1:\n\nno such op\n"), "no such op"),
        (RuntimeError("Exception from c.cpp:2:\nbroken"), "broken"),
        (RuntimeError("Exception from c.cpp:2:"), "Exception from c.cpp:2:"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_says_why_in_a_line(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "load_tokenizer", mock.Mock(side_effect=error))
    spec = Spec("echo", EngineConfig(Config(), Path("/m")))
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(spec)
    assert str(raised.value) == f"the tokenizer of /m cannot be loaded: {words}"
    monkeypatch.setattr(engines, "load_tokenizer", mock.Mock(side_effect=ConfigError("install it")))
    with pytest.raises(ConfigError, match=r"^install it$"):
        load_tokenizer(spec)


# -- what dialects know of a server ------------------------------------------------------------------------------


def context_of(*options: str, model: Path | None = None, **fields: Any) -> Any:
    config = configured("option.llm_engine=echo", *options, **fields)
    return server_context(config, Spec("echo", EngineConfig(config, model)), mock.Mock())


def test_a_model_is_known_by_its_names_and_its_source(tmp_path: Path) -> None:
    assert context_of().model_names == ("model", "lmi")
    assert context_of().source == ""
    named = context_of("option.model_id=owner/model", "option.served_model_name=a,b", model=tmp_path)
    assert named.model_names[-3:] == ("owner/model", "a", "b")
    assert named.source == "model"
    assert context_of(model=tmp_path).source.startswith("SmolLM2-135M-Instruct."), "the demo model's"
    assert named.fingerprint.endswith("-echo")
    assert named.labels == ("LABEL_0", "LABEL_1")


def test_media_are_refused_by_the_option_of_their_number() -> None:
    context = context_of('option.limit_mm_per_prompt={"image": 0, "audio": 3}')
    assert context.no_media["image"] == "option.limit_mm_per_prompt is 0"
    assert (context.no_media["audio"], context.max_media["audio"]) == ("", 3)
    assert (context_of().no_media, context_of().max_media) == ({"image": "", "audio": ""}, {"image": 32, "audio": 32})


def test_a_tokenizer_is_shown_only_if_the_option_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"tokenizer_class": "Own"}
    monkeypatch.setattr(start, "tokenizer_config", lambda path: own if path == tmp_path else {})
    shown = "option.enable_tokenizer_info_endpoint=true"
    assert context_of(shown, model=tmp_path).tokenizer_config == own
    assert context_of(model=tmp_path).tokenizer_config == context_of(shown).tokenizer_config == {}
    converted = tmp_path / "converted"
    monkeypatch.setattr(start, "locate", lambda model: SimpleNamespace(path=tmp_path if model == "there" else None))
    monkeypatch.setattr(engines, "fetch", lambda engine, model, config: "there")
    assert context_of(shown, model=converted).tokenizer_config == own
    monkeypatch.setattr(engines, "fetch", mock.Mock(side_effect=OSError))
    assert context_of(shown, model=converted).tokenizer_config == {}


# -- the user's code ---------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    sys.modules.pop("model", None)


def test_the_requirements_beside_model_py_are_installed_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install = mock.Mock()
    monkeypatch.setattr("handler.serving.user_code.user_files.install", install)
    (home / "requirements.txt").write_text("a\n")
    config = configured("option.llm_engine=echo", directory=home)
    model_formatters(config)
    install.assert_called_once_with(home / "requirements.txt")
    model_formatters(config, home)
    model_formatters(configured("option.llm_engine=echo", "option.install_requirements=false", directory=home))
    assert install.call_count == 1


def test_a_formatter_that_an_option_names_must_be_there(home: Path) -> None:
    assert model_formatters(configured("option.output_formatter=jsonlines", directory=home)) == Formatters(
        configs=mock.ANY
    )
    for kind in ("input", "output"):
        key = f"option.{kind}_formatter"
        with pytest.raises(ConfigError) as raised:
            model_formatters(configured(f"{key}=missing", directory=home))
        assert f": {key}=missing: " in str(raised.value)


def test_a_formatter_of_texts_needs_rolling_batch(home: Path) -> None:
    (home / "model.py").write_text(
        "from djl_python.output_formatter import output_formatter\n\n"
        "@output_formatter\ndef write(output):\n    return ''\n"
    )
    found = model_formatters(configured("option.llm_engine=echo", directory=home))
    assert found.output is not None
    assert found.output.name == "write"
    disabled = ("option.llm_engine=echo", "option.rolling_batch=disable")
    with pytest.raises(ConfigError, match=r"^model.py's output formatter 'write' requires rolling batch, but "):
        model_formatters(configured(*disabled, directory=home))
    model_formatters(configured(*disabled, directory=home, handle_role=Role.ALONE))
    assert model_formatters(configured(*disabled, "option.output_formatter=json", directory=home)).output is None


# -- adapters beside a model -------------------------------------------------------------------------------------


def home_of(engine: str, *options: str, directory: Path | None = None, **fields: Any) -> AdapterHome:
    config = configured(f"option.llm_engine={engine}", *options, **fields)
    return adapter_home(config, spec_of(config, engine), directory)


def test_adapters_are_found_beside_the_model_and_the_options(home: Path) -> None:
    for placement in ("model", "options"):
        (home / placement).mkdir()
        write_adapter(home / placement / "adapters" / f"of_{placement}")
    found = home_of("echo", "option.enable_lora=true", f"option.model_id={home / 'model'}", directory=home / "options")
    assert {name: path.parent.parent.name for name, path in found.at_start.items()} == {
        "of_model": "model",
        "of_options": "options",
    }
    assert found.registry.base == home / "options" / "adapters"
    bare = home_of("echo", "option.enable_lora=true", directory=home)
    assert (bare.at_start, bare.registry.base) == ({}, home / "adapters")
    assert home_of("echo", "option.enable_lora=true", directory=home / "none").registry.base is None


def test_adapters_that_an_engine_does_not_take_are_not_loaded(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_adapter(home / "adapters" / "a")
    found = home_of("echo", directory=home)
    assert found.at_start == {}
    with pytest.raises(BadRequest, match=r"^LoRA is not enabled: echo: "):
        found.registry.check()
    (message,) = caplog.messages
    assert message.startswith(f"the adapters in {home / 'adapters'} are not loaded: echo: ")
    with pytest.raises(BadRequest, match=r"^LoRA is not enabled: no engine is loaded: handle of model\.py answers the"):
        home_of("echo", directory=home, handle_role=Role.ALONE).registry.check()


def test_the_time_for_requests_to_finish_is_documented() -> None:
    assert not undocumented("scaling.md", f"open requests have {start.DRAIN:g} s to finish")
    assert not undocumented("serving.md", f"Running requests have {server.DRAIN:g} s to finish")


def test_the_end_of_a_start_is_told_with_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    times = start.StartTimes()
    now += 1.5
    times.files_are_here()
    now += 2.25
    info = EngineInfo("able", "1.2", "GPU.0", "bf16", 1000)
    model: Any = SimpleNamespace(config=Config(), info=info, replicas=())
    told = "ready after 3.8 s (files 1.5 s, engine 2.2 s): "
    assert times.ready(model) == f"{told}able 1.2 on GPU.0, dtype bf16, 1000 tokens"
    model.replicas = (1, 2)
    model.info = replace(info, device="none")
    assert times.ready(model) == f"{told}2 replicas of able 1.2, 1000 tokens"
    model.config = alone()
    assert times.ready(model) == f"{told}handle of model.py, without an engine"
