"""`lmi options`: what a user without the documents can read about an option."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from handler.cli import main, make_parser
from handler.config.loader import read_config
from handler.config.options import KNOWN, OPTIONS
from handler.config.options.command_line import describe, listing, table
from handler.config.options.names import SETTINGS, variable
from handler.config.options.option import Gone
from handler.config.sources import Setting, from_environment
from handler.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "tgi_compat",
            [
                "option.tgi_compat",
                "  meaning:     write responses in TGI's format",
                "  type:        true or false",
                "  default:     false",
                "  engines:     all",
                "  environment: OPTION_TGI_COMPAT",
            ],
        ),
        ("HF_MODEL_ID", ["  type:        a string", "  environment: OPTION_MODEL_ID, HF_MODEL_ID"]),
        ("SERVING_BATCH_SIZE", ["  environment: SERVING_BATCH_SIZE", "  other names: max_dynamic_batch_size"]),
        (
            "OPTION_ECHO_CUES",
            ["  engines:     echo; no effect with other engines: only the echo engine reads these words"],
        ),
        ("tensor_parallel_degree", ["  type:        a whole number of at least 1, or max"]),
        (
            "option.engine_args",
            ["  type:        a JSON object", "  engines:     vllm, trtllm; refused by other engines"],
        ),
        (
            "limit_mm_per_prompt",
            ["  type:        a number of images and audio clips, such as image=4", "  engines:     all"],
        ),
        (
            "load_format",
            ["  engines:     vllm; refused by other engines", "  engines:     trtllm; refused by other engines"],
        ),
        (
            "option.spec_length",
            ["  refused: use option.speculative_config"],
        ),
        ("device", ["  refused, except for auto: vLLM uses the device for which it was built"]),
        ("OPTION_ENTRYPOINT", ["option.entryPoint"]),
        ("PIPELINE_PARALLEL_DEGREE", ["  environment: OPTION_PIPELINE_PARALLEL_DEGREE, PIPELINE_PARALLEL_DEGREE"]),
        # foreign variables, and the flags of the same names
        ("num_shard", ["  environment: OPTION_TENSOR_PARALLEL_DEGREE, TENSOR_PARALLEL_DEGREE"]),
        ("max_total_tokens", ["  environment: OPTION_MAX_MODEL_LEN"]),
        ("enable_chunked_context", ["  other names: option.enable_chunked_context"]),
        ("QUANTIZE", ["QUANTIZE", "  same as `OPTION_QUANTIZE`", "  engines:     vllm; refused by other engines"]),
        ("SM_NUM_GPUS", ["  same as `TENSOR_PARALLEL_DEGREE`", "option.tensor_parallel_degree"]),
        (
            "ENABLE_CUDA_GRAPHS",
            ["  same as `OPTION_USE_CUDA_GRAPH` (trtllm), `OPTION_ENFORCE_EAGER` (vllm)", "option.enforce_eager"],
        ),
        ("PORT", ["  no effect: `lmi serve --port` and SAGEMAKER_BIND_TO_PORT set it"]),
        ("HF_TASK", ["  same as `OPTION_TASK`", "option.task"]),
        ("HF_API_TOKEN", ["  same as `HF_TOKEN`"]),
        ("HF_TOKEN", ["  left alone: huggingface_hub reads it"]),
        (
            "SM_VLLM_MAX_NUM_SEQS",
            [
                "  sets option.max_rolling_batch_size; "
                "like every SM_VLLM_* variable, it also sets these options, unless another source does:",
                "  option.llm_engine=vllm, option.openai_compat=true, option.lmi_version=0.36",
                "option.max_rolling_batch_size",
            ],
        ),
        ("SM_VLLM_NO_ENABLE_PREFIX_CACHING", ["option.enable_prefix_caching"]),
        ("SM_VLLM_SWAP_SPACE", ["  no effect: vLLM's scheduler no longer supports it"]),
        ("option.swap_space", ["  no effect: vLLM's scheduler no longer supports it"]),
        (
            "option.kv_transfer_config",
            ["  meaning:     an argument of the engine", "  engines:     vllm; refused by other engines"],
        ),
        ("option.s3url", ["option.model_id", "  other names: option.model, option.s3url"]),
    ],
)
def test_an_option_is_described(capsys: pytest.CaptureFixture[str], name: str, lines: list[str]) -> None:
    assert main(["options", name]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in lines] == lines


OF_VLLM = [
    key
    for key, options in KNOWN.items()
    if key.startswith("option.") and key.islower() and any("vllm" in (one.engines or ["vllm"]) for one in options)
]


def test_a_variable_of_vllms_image_names_the_options_that_it_sets() -> None:
    assert len(OF_VLLM) > 300
    for key in OF_VLLM:
        name = f"SM_VLLM_{key.removeprefix('option.').upper()}"
        origins = read_config(environ={name: "true"}).config.origins
        told = re.findall(r"option\.\w+", describe(name).partition("\n\n")[0])
        wanted = [one for one, origin in origins.items() if origin == f"environment variable {name}"]
        assert sorted(told) == sorted(wanted), name


def test_a_reader_may_leave() -> None:
    command = [sys.executable, "-m", "handler", "options"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert (process.communicate()[1], process.returncode) == (b"", 0)


def test_several_words_find_what_has_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "Draft", "model"]) == 0
    listing = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  option.")]
    assert "option.speculative_draft_model" in listing
    assert len(listing) < 10
    assert main(["options", "draft", "nonsense"]) == 2
    assert capsys.readouterr().err == "lmi: no option has all of these words: draft nonsense\n"


@pytest.mark.parametrize(("words", "flag"), [(["certificate"], "--ssl-certfile"), (["allow-origin"], "--allow-origin")])
def test_flags_of_serve_that_are_no_options_are_found(
    capsys: pytest.CaptureFixture[str], words: list[str], flag: str
) -> None:
    assert main(["options", *words]) == 0
    assert f"Flags of lmi serve:\n  {flag}  " in capsys.readouterr().out


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "tgi_compt"]) == 2
    assert capsys.readouterr().err == "lmi: unknown option 'option.tgi_compt'; did you mean 'option.tgi_compat'?\n"


def test_the_table_has_a_line_for_every_option_with_an_effect() -> None:
    listed = [line.split()[0] for line in table().splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(one.key for one in OPTIONS if one.field and not isinstance(one.parse, Gone))


def test_on_a_terminal_every_line_fits() -> None:
    for words in ([], ["certificate"], ["prefix"], ["load_format"], ["SM_VLLM_MAX_NUM_SEQS"], ["option.spec_length"]):
        wrapped = listing(words, "", FLAGS, 80)
        assert [line for line in wrapped.splitlines() if len(line) > 80 and " " in line.strip()] == []
        assert wrapped.split() == listing(words, "", FLAGS).split(), "the same words"


FLAGS = {"--ssl-certfile": "HTTPS, with this certificate chain (PEM), " + "and more words " * 9}


def test_the_variable_sets_the_option() -> None:
    named = {option.key: variable(option.key) for option in OPTIONS if option.field and variable(option.key)}
    assert len(named) > 300
    for key, name in named.items():
        assert list(from_environment({name: "x"})) == [Setting(key, "x", f"environment variable {name}")]
        assert key in describe(name).splitlines()


def test_a_word_lists_the_options_that_have_it() -> None:
    listed = listing(["prefix"], "vllm")
    assert "option.enable_prefix_caching" in listed
    assert "option.prefix_caching_hash_algo" in listed
    assert "option.dtype" not in listed
    assert "option.kv_cache_free_gpu_mem_fraction" not in listing([], "vllm")
    with pytest.raises(ConfigError, match=r"unknown option 'option\.no_such_word'"):
        listing(["no-such-word"])


def test_a_flags_name_is_an_options() -> None:
    assert listing(["max-model-len"]) == describe("max_model_len")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_servers_own_variables_are_described(name: str) -> None:
    first, second = describe(name).splitlines()
    assert (first, SETTINGS[name] in second) == (name, True)


@pytest.mark.parametrize(("value", "told"), [("9000", True), ("tcp://10.0.0.1:80", False), ("", False)])
def test_the_port_of_another_variable_is_told_unless_it_is_kubernetes(value: str, told: bool) -> None:
    config = read_config(environ={"LMI_PORT": value}).config
    assert any("LMI_PORT has no effect here" in line for line in config.warnings) is told


def test_the_host_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_HOST", "0.0.0.0")
    assert make_parser(tools=False).parse_all(["serve"]).host == "0.0.0.0"
    assert make_parser(tools=False).parse_all(["serve", "--host", "127.0.0.1"]).host == "127.0.0.1"
    monkeypatch.setenv("LMI_HOST", "")
    assert make_parser(tools=False).parse_all(["serve"]).host == "127.0.0.1"


def described(*words: str) -> dict[str, Any]:
    """What `lmi options WORDS --json` prints."""
    command = [sys.executable, "-m", "handler", "options", *words, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return found


def test_json_has_every_option_of_the_table() -> None:
    keys = [option["key"] for option in described()["options"]]
    assert sorted(keys) == sorted(re.findall(r"^  (\S+)  ", table(), re.MULTILINE))
    of_vllm = described("--engine", "vllm")
    assert {"option.engine_args", "option.dtype"} <= {option["key"] for option in of_vllm["options"]}
    assert of_vllm["engine_arguments"]


def test_json_has_the_facts_of_one_option_and_the_hits_of_a_search() -> None:
    (option,) = described("HF_MODEL_ID")["options"]
    assert (option["key"], option["environment"]) == ("option.model_id", ["OPTION_MODEL_ID", "HF_MODEL_ID"])
    assert [option["engines"] for option in described("load_format")["options"]] == [["vllm"], ["trtllm"]]
    assert "option.tgi_compat" in {option["key"] for option in described("tgi", "format")["options"]}
    assert "--api-key" in described("api", "key")["flags"]
    assert described("LMI_API_KEY")["options"] == []


def test_an_unknown_name_has_the_same_status_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "max_modl_len"]) == main(["options", "max_modl_len", "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len({*shown.err.splitlines()}) == 1
