"""DJL's first call, and the conversion that DJL Serving 0.28 runs before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.djl import partition, startup
from handler.djl.startup import is_passive, note_load, prepare, read_properties, replaces_another, worker_sessions
from handler.serving import sessions
from handler.serving.sessions import configured_sessions

# -- what the handler makes of DJL's first call: options, and whether this rank has anything to do ---------------------


def read(directory: Path, text: str = "", *, asynchronous: bool = False, **properties: Any) -> Config:
    """As Java hands them over: without their prefix, among its own."""
    (directory / "serving.properties").write_text(text, encoding="utf-8")
    own = {"model_dir": str(directory), "device_id": "-1", "handler": "handle", "gpu.maxWorkers": "1", "failed": "0"}
    return read_properties({"llm_engine": "echo", **own, **properties}, asynchronous=asynchronous).checked()


class Java(NamedTuple):
    """In the place of DjlVersion, which needs djl_python."""

    always_steps: bool
    steps_all_ranks: bool
    passes_headers: bool


OLD: Any = Java(always_steps=True, steps_all_ranks=True, passes_headers=False)
NEW: Any = Java(always_steps=False, steps_all_ranks=False, passes_headers=True)


def test_options_come_without_their_prefix(tmp_path: Path) -> None:
    config = read(tmp_path, rolling_batch="auto", max_rolling_batch_size="7", job_queue_size="9", tgi_compat="true")
    assert (config.max_rolling_batch_size, config.job_queue_size, config.tgi_compat) == (7, 9, True)
    assert config.warnings == ()


def test_a_model_of_s3_is_the_directory_that_java_has_downloaded(tmp_path: Path) -> None:
    options = "option.model_id=s3://bucket/a/\noption.speculative_draft_model=s3://bucket/b/\n"
    downloaded: Any = {"model_id": "/tmp/download/1", "speculative_draft_model": "/tmp/download/2"}
    config = read(tmp_path, options, llm_engine="vllm", **downloaded)
    assert config.model_id == "/tmp/download/1"
    assert config.engine_options["speculative_draft_model"] == "/tmp/download/2"


def test_metrics_of_the_embedded_server_alone_are_said_to_have_no_effect(tmp_path: Path) -> None:
    warnings = read(tmp_path, "option.tgi_metrics=true", cloudwatch_metrics_interval="60").warnings
    assert len(warnings) == 2
    assert "option.tgi_metrics (serving.properties, line 1)" in "".join(warnings)
    assert "option.cloudwatch_metrics_interval (DJL Serving)" in "".join(warnings)


@pytest.mark.parametrize(
    "option",
    [
        "batches_store=/tmp/b",
        "batches_concurrency=2",
        "enable_tokenizer_info_endpoint=true",
        "batch_transform=true",
        "client_timeout=5",
        "keep_alive_timeout=5",
    ],
)
def test_options_of_the_embedded_server_alone_are_said_to_have_no_effect(tmp_path: Path, option: str) -> None:
    (warning,) = read(tmp_path, f"option.{option}\n").warnings
    assert warning.startswith(f"ignored: option.{option.partition('=')[0]} (serving.properties, line 1); DJL Serving ")


@pytest.mark.parametrize("name", ["LMI_API_KEY", "API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY"])
def test_keys_that_nobody_would_check_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "hidden")
    with pytest.raises(ConfigError, match=f"{name}: DJL Serving checks no keys: unset it") as found:
        read(tmp_path)
    assert "hidden" not in str(found.value)


def test_djl_servings_own_variables_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_CERTIFICATE_FILE", "cert.pem")
    monkeypatch.setenv("SERVING_INFERENCE_ADDRESS", "https://127.0.0.1:8443")
    assert read(tmp_path).warnings == ()


def test_several_models_are_djl_servings_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    assert read(tmp_path).warnings == ()


# -- text outside ASCII: Java reads the file as ISO 8859-1, and the environment by the locale --------------------------


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_value_that_java_has_misread_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    text = "gr\u00fc\u00df \U0001f600\u00a0"  # ends with a no-break space, which str.strip() removes
    misread = text.encode().decode(encoding, "replace")
    assert read(tmp_path, f"option.model_name={text}x\n", model_name=f"{misread}x").name == f"{text}x"
    assert read(tmp_path, f"option.model_name={text}\n", model_name=misread).name == text.strip()
    monkeypatch.setenv("OPTION_MODEL_NAME", text)
    assert read(tmp_path, model_name=misread).name == text.strip()


def test_a_value_that_java_has_changed_is_java_s(tmp_path: Path) -> None:
    for own, java in (("gr\u00fcn", "gr\u00c3\u00bcner"), ("green", "gr\u00fcn")):
        assert read(tmp_path, f"option.model_name={own}\n", model_name=java).name == java


def test_text_that_java_has_lost_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(tmp_path, "option.served_model_name=\ufffd\n", served_model_name="\ufffd")  # the file's own character
    read(tmp_path, model_name="gr\ufffd\ufffd")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["option.model_name"]


@pytest.mark.parametrize("first", ["option.rolling_batch=scheduler", " batch_size=2", "engine=Python"])
def test_a_line_after_a_byte_order_mark_is_said_to_be_lost(tmp_path: Path, first: str) -> None:
    (warning,) = read(tmp_path, f"\ufeff{first}\n").warnings
    key = first.strip().partition("=")[0]
    assert warning.startswith(f"DJL Serving does not read {key} (serving.properties, line 1): a byte order mark")


@pytest.mark.parametrize("text", ["\ufeff# a comment\nengine=Python\n", "\ufeff\nengine=Python\n", "\ufeff"])
def test_a_byte_order_mark_before_no_option_does_no_harm(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).warnings == ()


def test_the_environment_is_that_with_which_java_was_started() -> None:
    """Java's own process hands on question marks. Between it and the worker may be mpirun."""
    restored = "from handler.config.environment import restore_text; restore_text()"
    worker = f"import os; {restored}; print(ascii([os.environ[name] for name in 'ABC']))"
    run = "subprocess.run([sys.executable, '-c', {!r}], check=True{})"
    mpirun = f"import subprocess, sys; {run.format(worker, '')}"
    damaged = "{**os.environ, 'A': 'gr????', 'B': 'other', 'C': '?'}"
    java = f"import os, subprocess, sys; {run.format(mpirun, f', env={damaged}')}"
    whole = {**os.environ, "A": "gr\u00fc\u00df", "B": "\u00fcther", "C": "?"}
    done = subprocess.run([sys.executable, "-c", java], env=whole, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ascii(["gr\u00fc\u00df", "other", "?"])


def test_variables_of_the_file_are_set_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("A_TEXT", "gr\u00c3\u00bc\u00c3\u009f"), ("B_TEXT", "java's")):
        monkeypatch.setenv(name, value)
    file = tmp_path / "serving.properties"
    file.write_text("option.env=A_TEXT=gr\u00fc\u00df,B_TEXT=plain,=\u00fc\noption.llm_engine=echo\n", encoding="utf-8")
    prepare({"model_dir": str(tmp_path), "llm_engine": "echo"}, None, djl="0.36.0")
    assert (os.environ["A_TEXT"], os.environ["B_TEXT"]) == ("gr\u00fc\u00df", "java's")


def test_the_mode_is_what_java_does(tmp_path: Path) -> None:
    assert read(tmp_path).rolling_batch == "disable"  # Java steps a rolling batch only when it is told to
    assert read(tmp_path, rolling_batch="auto").rolling_batch == "auto"
    assert read(tmp_path, rolling_batch="disable").rolling_batch == "disable"
    assert read(tmp_path, rolling_batch="disable", asynchronous=True).rolling_batch == "auto"
    assert read(tmp_path, asynchronous=True).rolling_batch == "auto"
    with pytest.raises(ConfigError, match=r"option.async_mode=true needs option\.rolling_batch=disable"):
        read(tmp_path, rolling_batch="auto", asynchronous=True)
    assert read(tmp_path, rolling_batch="disable", asynchronous=True, tgi_compat="true").tgi_compat


def test_a_wrong_value_is_named_where_it_was_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^serving.properties, line 2: option.dtype=int9: must be"):
        read(tmp_path, "engine=Python\noption.dtype=int9\n", dtype="int9")
    with pytest.raises(ConfigError, match=r"^DJL Serving: option.dtype=int9: must be"):
        read(tmp_path, dtype="int9")
    with pytest.raises(ConfigError, match=r"^serving.properties, line 1: unknown option 'option.dtipe'"):
        read(tmp_path, "option.dtipe=fp32\n", dtipe="fp32")


def test_java_wins_where_it_knows_better(tmp_path: Path) -> None:
    """Its recommender fills in what is not set, and its management interface can set more."""
    assert read(tmp_path, "option.max_rolling_batch_size=8\n", max_rolling_batch_size="64").max_rolling_batch_size == 64
    assert read(tmp_path, tensor_parallel_degree="0").tensor_parallel_degree == "1"  # no GPU was counted
    assert read(tmp_path, tensor_parallel_degree=2).tensor_parallel_degree == "1"  # of the command line, not an option


def test_two_modes_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option\.async_mode=true needs option\.rolling_batch=disable"):
        read(tmp_path, asynchronous=True, rolling_batch="vllm")


def test_in_async_mode_the_number_of_sequences_is_not_the_recommenders(tmp_path: Path) -> None:
    """It says 32 where the user says nothing; the engines' own defaults are better."""

    def size(text: str = "", said: str = "32", *, asynchronous: bool = True) -> int:
        more = {"rolling_batch": "disable" if asynchronous else "auto", "max_rolling_batch_size": said}
        return read(
            tmp_path, text, asynchronous=asynchronous, llm_engine="trtllm", model_id="x", **more
        ).max_rolling_batch_size

    assert size() == 256
    assert size("option.max_rolling_batch_size=32\n") == 32
    assert size(said="64") == 64
    assert size(asynchronous=False) == 32  # so many does Java hand over in a rolling batch


RECOMMENDED: dict[str, dict[str, Any]] = {
    "0.27": {"engine": "MPI", "mpi_mode": "true", "rolling_batch": "lmi-dist", "tensor_parallel_degree": "0"},
    "0.28": {"rolling_batch": "disable", "tensor_parallel_degree": "0", "max_rolling_batch_size": "32"},
    "0.29": {"rolling_batch": "disable", "pipeline_parallel_degree": "1", "max_rolling_batch_size": "32"},
    "0.29, GPUs": {"rolling_batch": "scheduler", "pipeline_parallel_degree": "1", "tensor_parallel_degree": "4"},
    "0.30, tnx": {"rolling_batch": "tnx", "tensor_parallel_degree": "2", "n_positions": "4096"},
    "0.31, lmi-dist": {"rolling_batch": "lmi-dist", "mpi_mode": "true", "max_rolling_batch_size": "256"},
    "0.32, vllm": {"rolling_batch": "vllm", "pythonExecutable": "/opt/djl/vllm_venv/bin/python"},
    "0.34, trtllm": {"rolling_batch": "trtllm", "mpi_mode": "true", "max_num_tokens": "16384"},
    "0.36, PEFT": {"rolling_batch": "disable", "pipeline_parallel_degree": "1", "is_peft_model": "true"},
    "0.36, LoRA": {"rolling_batch": "disable", "load_on_devices": "0", "maxWorkers": "1"},
    "0.36, vllm": {"rolling_batch": "disable", "async_mode": "true", "tensor_parallel_degree": "4"},
}
"""What LmiConfigRecommender writes where a user writes nothing; each version also what those before it do."""


@pytest.mark.parametrize("engine", ["echo", "openvino", "openai"])
@pytest.mark.parametrize("recommended", RECOMMENDED.values(), ids=RECOMMENDED)
def test_java_s_recommendations_stop_no_engine(tmp_path: Path, recommended: dict[str, Any], engine: str) -> None:
    text = f"option.llm_engine={engine}\noption.model_id=x\n"
    own: dict[str, Any] = {"llm_engine": engine, "model_id": "x"}
    config = read(tmp_path, text, **own, **recommended)
    steps = recommended["rolling_batch"] != "disable"
    assert (config.engine, config.tensor_parallel_degree) == (engine, "1")
    assert config.engine_options == read(tmp_path, text, **own).engine_options
    assert (config.rolling_batch != "disable") is steps
    assert config.warnings == ()


def test_recommendations_yield_to_what_the_user_writes_by_another_name(tmp_path: Path) -> None:
    java: dict[str, Any] = {"tensor_parallel_degree": "4", "pipeline_parallel_degree": "1", "max_num_tokens": "16384"}
    own: dict[str, Any] = {
        "tensor_parallel_size": "2",
        "pipeline_parallel_size": "3",
        "max_rolling_batch_prefill_tokens": "99",
    }
    text = "".join(f"option.{name}={value}\n" for name, value in own.items())
    for properties in ({**own, **java}, {**java, **own}):
        config = read(tmp_path, text, llm_engine="trtllm", model_id="x", **properties)
        assert (config.tensor_parallel_degree, config.max_num_batched_tokens) == ("2", 99)
        assert config.engine_options["trtllm_pipeline_parallel_size"] == 3
        assert config.engine_options.keys().isdisjoint({"pipeline_parallel_size", "max_num_tokens"})


def test_recommendations_count_where_the_engine_has_them(tmp_path: Path) -> None:
    java: dict[str, Any] = {"tensor_parallel_degree": "4", "max_num_tokens": "16384", "rolling_batch": "trtllm"}
    config = read(tmp_path, llm_engine="auto", model_id="x", **java)
    assert (config.engine, config.tensor_parallel_degree) == ("trtllm", "4")
    assert config.engine_options["max_num_tokens"] == 16384
    assert read(tmp_path, "option.tensor_parallel_degree=max", **java, model_id="x").tensor_parallel_degree == "max"


def test_what_the_user_writes_is_no_recommendation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openvino: dict[str, Any] = {"llm_engine": "openvino", "model_id": "demo"}
    two: dict[str, Any] = {"pipeline_parallel_degree": "2", **openvino}
    with pytest.raises(ConfigError, match=r"^serving.properties, line 1: option.pipeline_parallel_degree is for vllm"):
        read(tmp_path, "option.pipeline_parallel_degree=2\n", **two)
    one: dict[str, Any] = {"pipeline_parallel_degree": "1", "rolling_batch": "vllm"}
    assert "pipeline_parallel_size" not in read(tmp_path, "option.pipeline_parallel_degree=1\n", **one).engine_options
    with pytest.raises(ConfigError, match=r"option.rolling_batch=vllm asks for vllm, but option.llm_engine=openvino"):
        read(tmp_path, "option.rolling_batch=vllm\n", **one, **openvino)
    monkeypatch.setenv("PIPELINE_PARALLEL_DEGREE", "2")
    with pytest.raises(ConfigError, match=r"^environment variable PIPELINE_PARALLEL_DEGREE: .* is for vllm"):
        read(tmp_path, **two)


def test_auto_that_java_turns_into_dynamic_batching_is_said(tmp_path: Path) -> None:
    """Its recommender does so for a model with a config.json, unless its image has vLLM or TensorRT-LLM."""
    auto = "engine=Python\noption.rolling_batch=auto\n"
    config = read(tmp_path, auto, rolling_batch="disable")
    assert config.rolling_batch == "disable"
    (warning,) = config.warnings
    origin = "(serving.properties, line 2)"
    assert warning.startswith(f"DJL Serving replaced option.rolling_batch=auto {origin} with disable, which is dynamic")
    assert "option.rolling_batch=scheduler" in warning
    assert read(tmp_path, auto, rolling_batch="auto").warnings == ()
    assert read(tmp_path, auto, rolling_batch="disable", asynchronous=True).warnings == ()
    assert read(tmp_path, rolling_batch="disable").warnings == ()


def test_servers_environment_is_the_java_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_SOMETHING_NEW", "1")
    monkeypatch.setenv("SERVING_JOB_QUEUE_SIZE", "5")
    monkeypatch.setenv("OPTION_MAX_MODEL_LEN", "99")
    config = read(tmp_path)
    assert (config.job_queue_size, config.max_model_len) == (1000, 99)


def test_requests_are_not_computed_without_end(tmp_path: Path) -> None:
    assert read(tmp_path).request_time_limit == 900
    assert read(tmp_path, request_time_limit="0").request_time_limit == 0


def test_a_model_beside_the_file_is_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option\.model_id is not set"):
        read(tmp_path, llm_engine="openvino")
    (tmp_path / "some.gguf").write_bytes(b"")
    assert read(tmp_path, llm_engine="openvino").model_id == str(tmp_path)
    assert read(tmp_path, llm_engine="openvino", model_id="elsewhere").model_id == "elsewhere"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_start_is_refused_with_all_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """In an MPI world whose last rank would answer, and without headers for a session's id."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    lines = ["engine=Python", "option.dtype=int9", "option.max_lora=2", "option.enable_stateful_sessions=true"]
    lines += ["option.rolling_batch=lmi-dist"]
    (tmp_path / "serving.properties").write_text("\n".join(lines))
    (tmp_path / "model.py").write_text("import nothing_of_that_name\n")
    properties = {"model_dir": str(tmp_path), "llm_engine": "vllm", "dtype": "int9", "rolling_batch": "lmi-dist"}
    assert not is_passive(properties, OLD)
    with pytest.raises(ConfigError) as caught:
        prepare({**properties, "llm_engine": "trtllm"}, OLD)
    told = [str(problem).partition(";")[0] for problem in caught.value.problems]
    for line in [
        "serving.properties, line 2: option.dtype=int9: must be one of auto, fp32, f32, float32, float, fp16, f16, "
        "float16, half, bf16, bfloat16",
        "serving.properties, line 3: unknown option 'option.max_lora'",
        "serving.properties, line 5: option.rolling_batch=lmi-dist asks for vllm, but option.llm_engine=trtllm "
        "(DJL Serving)",
        "DJL Serving: option.mpi_mode: several ranks need DJL Serving 0.29 or later, or option.rolling_batch=trtllm",
        "serving.properties, line 4: option.enable_stateful_sessions=true: sessions need DJL Serving 0.28 or later, "
        "because earlier releases drop the headers of a rolling batch",
        f"{tmp_path / 'model.py'}, line 1: ModuleNotFoundError: No module named 'nothing_of_that_name'",
    ]:
        assert line in told
    assert len(told) == 6


@pytest.mark.parametrize("version", [OLD, NEW, None], ids=["0.28", "0.36", "async"])
def test_what_awss_vllm_image_would_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: Any
) -> None:
    monkeypatch.setenv("CUSTOM_PRE_PROCESS", "pre.py:run")
    (tmp_path / "model.py").write_text("def custom_sagemaker_ping_handler(): ...\n")
    mode = {} if version is None else {"rolling_batch": "auto"}
    with pytest.raises(ConfigError) as caught:
        prepare({"model_dir": str(tmp_path), "llm_engine": "echo", **mode}, version)
    told = [problem.message for problem in caught.value.problems]
    assert len(told) == 2
    assert "CUSTOM_PRE_PROCESS=pre.py:run: write a function with @input_formatter" in told[0]
    assert "model.py, line 1: custom_sagemaker_ping_handler belongs to AWS's vLLM image" in told[1]


@pytest.mark.parametrize(
    ("entry", "text", "told"),
    [
        ("handler.entry", "def handle(inputs):\n    raise SystemExit\n", True),
        ("model.py", "from handler.entry import handle as ours\ndef handle(inputs):\n    return ours(inputs)\n", False),
        ("handler.entry", "", False),
    ],
)
def test_a_handle_that_java_does_not_call_is_said(
    entry: str, text: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "serving.properties").write_text(f"option.entryPoint={entry}\noption.llm_engine=echo\n")
    (tmp_path / "model.py").write_text(text)
    prepare({"model_dir": str(tmp_path), "entryPoint": entry, "llm_engine": "echo"}, None)
    assert ("model.py: handle is not called, because option.entryPoint is handler.entry" in caplog.text) == told


@pytest.mark.parametrize("version", [OLD, NEW, None])
@pytest.mark.parametrize("rolling", ["scheduler", "disable"])
@pytest.mark.parametrize(
    ("text", "java", "environ", "size"),
    [
        ("batch_size=4\n", {"batch_size": "4"}, {}, 4),
        ("max_dynamic_batch_size=4\n", {"batch_size": "4", "max_dynamic_batch_size": "4"}, {}, 4),
        ("", {}, {"SERVING_BATCH_SIZE": "4"}, 4),
        ("batch_size=1\n", {"batch_size": "1"}, {"SERVING_BATCH_SIZE": "4"}, 1),
        ("", {}, {"SERVING_MAX_DYNAMIC_BATCH_SIZE": "4"}, 1),  # Java does not read it
        ("max_batch_delay=7\n", {"max_batch_delay": "7"}, {}, 1),
        ("", {}, {}, 1),
    ],
)
def test_a_mode_in_which_java_would_fail_its_batches_is_refused(
    version: Any,
    rolling: str,
    text: str,
    java: dict[str, str],
    environ: dict[str, str],
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "serving.properties").write_text(f"option.llm_engine=echo\n{text}")
    mode = {"rolling_batch": "disable", "async_mode": "true"} if version is None else {"rolling_batch": rolling}
    properties = {"model_dir": str(tmp_path), "llm_engine": "echo", **mode, **java}
    steps = version is None or version is OLD or rolling != "disable"
    if size == 1 or not steps:
        prepare(properties, version)
        return
    with pytest.raises(ConfigError, match=r"batch_size=4: in .*, DJL Serving fails every batch of requests; remove"):
        prepare(properties, version)


def test_a_start_that_java_would_not_end_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever listens serves other models, or this one until its worker died."""
    code = (
        "import socket, sys, time\nif sys.argv[1]: s = socket.create_server(('127.0.0.1', 0))\n"
        "print(flush=True)\ntime.sleep(600)"
    )

    def ended(listens: str, program: str) -> bool:
        java = subprocess.Popen([sys.executable, "-c", code, listens], stdout=subprocess.PIPE)
        with java:
            assert java.stdout is not None
            java.stdout.readline()
            monkeypatch.setattr(startup, "_java", lambda: java.pid)
            monkeypatch.setattr(sys, "argv", [f"/cache/{program}"])
            ends = startup.ends_start("the reason")
            status = java.wait(60) if ends else java.poll()
            java.kill()
        assert ends == (status == -15)
        return ends

    assert ended("", "djl_python_engine.py")
    assert "ending DJL Serving, which would otherwise hang: the reason" in caplog.text
    assert not ended("yes", "djl_python_engine.py")
    assert not ended("", "another_program.py")

    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "tcp6" and exists(path))  # without IPv6
    assert ended("", "djl_python_engine.py")
    assert not ended("yes", "djl_python_engine.py")


def test_sessions_of_a_djl_serving_that_has_ended_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that Java starts in place of a killed one finds those of the same DJL Serving."""
    monkeypatch.setattr(sessions, "_MEMORY", tmp_path)
    config = read(tmp_path, enable_stateful_sessions="true")
    root = tmp_path / "sagemaker_sessions"

    def opened(java: int) -> Path:
        """A session of a worker that is killed."""
        store = configured_sessions(worker_sessions(config, java))
        assert store is not None
        directory = store.open().directory
        store._opened.clear()
        return directory

    with subprocess.Popen(["sleep", "600"]) as java:
        ended, of_another = opened(java.pid), root / "djl-1-1-1"
        of_another.mkdir()
        assert opened(java.pid).parent == ended.parent
        assert opened(os.getpid()).parent != ended.parent
        assert ended.exists(), "its server lives"
        java.kill()
    living = opened(os.getpid())
    assert (ended.parent.exists(), living.exists(), of_another.exists()) == (False, True, True)
    given = read(tmp_path, enable_stateful_sessions="true", sessions_path=str(tmp_path / "given"))
    assert worker_sessions(given, os.getpid()) == given
    off = read(tmp_path)
    assert worker_sessions(off, os.getpid()) == off


def test_a_worker_knows_whether_another_of_its_djl_serving_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The record lies beside the socket, and is readable text only if a worker has written it."""
    record = tmp_path / "djl_sock.9000.loaded"
    monkeypatch.setattr(sys, "argv", ["worker", "--sock-name", str(tmp_path / "djl_sock.9000")])
    assert not replaces_another()
    for content in (b"", b"\xff", b"djl-1-1-1"):
        record.write_bytes(content)
        assert not replaces_another()
        note_load()
        assert replaces_another()
    record.unlink()
    record.mkdir()
    note_load()
    assert not replaces_another()
    assert caplog.messages[0].startswith(f"cannot write {record}, so a worker that replaces this one ")
    record.rmdir()
    monkeypatch.setattr(sys, "argv", ["worker", "--port", "9000"])
    note_load()
    assert not replaces_another()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("size", "rank", "rolling_batch", "steps_all_ranks", "passive"),
    [
        ("", "", "auto", True, False),
        ("1", "0", "auto", True, False),
        ("2", "0", "trtllm", True, False),
        ("2", "1", "trtllm", True, True),
        ("2", "0", "auto", False, False),
        ("2", "1", "auto", False, True),
    ],
)
def test_of_an_mpi_world_one_rank_serves(
    monkeypatch: pytest.MonkeyPatch, size: str, rank: str, rolling_batch: str, steps_all_ranks: bool, passive: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", size)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert is_passive({"rolling_batch": rolling_batch}, OLD if steps_all_ranks else NEW) is passive


@pytest.mark.parametrize(
    ("properties", "passes_headers", "why"),
    [
        ({"rolling_batch": "auto"}, True, ""),
        ({"rolling_batch": "auto"}, False, "sessions need DJL Serving 0.28 or later"),
        ({}, False, ""),
        ({"batch_size": "4"}, True, "sessions need batch_size=1, not 4"),
    ],
)
def test_sessions_need_answers_with_headers_of_their_own(
    tmp_path: Path, properties: dict[str, str], passes_headers: bool, why: str
) -> None:
    for on in ("true", "false"):
        given = {"model_dir": str(tmp_path), "llm_engine": "echo", **properties, "enable_stateful_sessions": on}
        if why and on == "true":
            with pytest.raises(ConfigError, match=f"^DJL Serving: option.enable_stateful_sessions=true: .*{why}"):
                prepare(given, NEW if passes_headers else OLD)
        else:
            prepare(given, NEW if passes_headers else OLD)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("value", ["2", "auto"])
def test_java_s_workers_are_the_replicas(tmp_path: Path, value: str, asynchronous: bool) -> None:
    with pytest.raises(ConfigError, match=f"option.replicas={value}: .* write minWorkers and maxWorkers"):
        read(tmp_path, f"option.replicas={value}", asynchronous=asynchronous)
    assert read(tmp_path, "option.replicas=1\nminWorkers=2", asynchronous=asynchronous).replicas == "1"


@pytest.mark.parametrize(("value", "warned"), [("true", True), ("false", False)])
def test_a_java_without_async_mode_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: str, warned: bool
) -> None:
    prepare({"model_dir": str(tmp_path), "llm_engine": "echo", "async_mode": value}, NEW)
    assert ("async mode needs DJL Serving 0.33 or later" in caplog.text) == warned


# -- the stand-in for the conversion that DJL Serving 0.28 runs when option.rolling_batch=trtllm -----------------------


def convert(model: str, repo: Path) -> int:
    """As Java calls it."""
    degrees = ["--tensor_parallel_degree", "1", "--pipeline_parallel_degree", "1"]
    paths = ["--properties_dir", "/nowhere", "--trt_llm_model_repo", str(repo), "--model_path", model]
    return partition.main([*paths, *degrees])


@pytest.mark.parametrize("leads_nowhere", [False, True])
def test_the_directory_that_java_hands_on_is_the_model(
    tmp_path: Path, leads_nowhere: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    repo = tmp_path / "cache" / "trtllm" / "abc"
    if leads_nowhere:  # a link of an earlier start, whose model is gone
        repo.parent.mkdir(parents=True)
        repo.symlink_to(tmp_path / "gone")
    assert convert(str(model), repo) == 0
    assert capsys.readouterr().out == ""
    assert (repo / "config.json").read_text() == "{}"


@pytest.mark.parametrize("missing", ["--model_path", "--trt_llm_model_repo"])
def test_a_conversion_that_is_not_told_all_is_a_usage_error(
    tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"--model_path": str(tmp_path), "--trt_llm_model_repo": str(tmp_path / "repo")}
    del arguments[missing]
    with pytest.raises(SystemExit, match="2"):
        partition.main([part for pair in arguments.items() for part in pair])
    assert missing in capsys.readouterr().err


def test_what_is_no_directory_fails_as_java_expects_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("some/hub-id", tmp_path / "repo") == 1
    assert capsys.readouterr().out.startswith("ERROR option.model_id=some/hub-id")
    assert not (tmp_path / "repo").exists()


def test_warnings_of_the_configuration_are_logged_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "serving.properties").write_text("option.tgi_metrics=true")
    prepare({"model_dir": str(tmp_path), "llm_engine": "echo"}, None)
    assert any("option.tgi_metrics" in line for line in caplog.messages)


@pytest.mark.parametrize("asked", [True, False])
def test_the_worker_logs_as_json_if_the_environment_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    formats: list[str] = []
    monkeypatch.setattr(startup, "wants_json", lambda environ: asked)
    monkeypatch.setattr(startup, "format_as_json", lambda: formats.append("json"))
    prepare({"model_dir": str(tmp_path), "llm_engine": "echo"}, None)
    assert formats == ["json"] * asked
