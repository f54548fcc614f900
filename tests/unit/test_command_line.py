"""The map of `lmi --help`, and completion as bash does it."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli.main import COMMANDS, add_commands
from handler import __version__
from handler.cli import main, make_parser
from handler.config.options import KNOWN, VARIABLES_OF
from handler.config.options.command_line import lead_of_flag
from handler.config.options.names import VARIABLES
from handler.core.command_line import Parser
from handler.core.package import install

ROOT = Path(__file__).parents[2]
_COMPLETE = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_lmi lmi "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_the_map_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    named = re.findall(r"^  lmi (\w+)(?: ([\w|]+))?", shown, re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["nonesuch"])
    known = re.findall(r"\w+", capsys.readouterr().err.partition("choose from")[2])
    assert {command for command, _ in named} == set(known)
    assert {name for command, below in named if command == "deploy" for name in below.split("|")} == {
        *COMMANDS,
        "bench",
    }
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("words", [
    ["--api-key", "a,b"], ["--api-key-file", "keys"], ["--admin-api-key", "x"], ["--ssl-certfile", "/missing.pem"],
    ["--ssl-cert-file", "c.pem"], ["--ssl-key-file", "k.pem"], ["--ssl-keyfile", "k.pem"], ["--ssl-ca-certs", "c.pem"],
    ["--ssl-keyfile-password", "x"], ["--cors-allow-origin", "https://a.b"], ["--allowed-origins", '["https://a.b"]'],
    ["--http-restricted-api", "health:k=v"], ["--grpc-use-ssl"], ["--grpc-server-cert", "c.pem"],
    ["--middleware", "m"], ["-o", "option.api_key=x"],
], ids=" ".join)  # fmt: skip
def test_a_flag_that_protects_another_server_is_not_dropped(words: list[str]) -> None:
    try:
        status = main(["serve", "--engine", "echo", "--check", *words])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2


@pytest.mark.parametrize(("commit", "said"), [("", ""), ("0123abcd", " (commit 0123abcd)")])
def test_the_version_has_the_commit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, commit: str, said: str
) -> None:
    monkeypatch.setattr("handler.cli.__commit__", commit)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"lmi-handler {__version__}{said}\n"


def test_without_a_command_the_map_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "  lmi serve [MODEL]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--dtyp", "fp32", "demo"], "usage: lmi serve .*unknown flag --dtyp; did you mean --dtype?"),
        (["serve", "--nothing-like-it"], "usage: lmi serve .*unknown flag --nothing-like-it .*-o KEY=VALUE"),
        (["serve", "demo", "another"], "usage: lmi serve .*unexpected arguments: another"),
        (["serve", "--gpu-mem", "0.5"], "usage: lmi serve .*unknown flag --gpu-mem; did you mean --gpu-memory-util"),
        (["serve", "--max_modl_len", "9"], "usage: lmi serve .*did you mean --max-model-len?"),
        (["serve", "--max-model-len"], "usage: lmi serve .*argument --max-model-len: needs a value"),
        (["serve", "--enforce-eager=yes"], "usage: lmi serve .*--no-enforce-eager: takes no value, but got 'yes'"),
        (["serve", "--host", "127.0.0.1:9000"], "usage: .*must not contain a port: write --host 127.0.0.1 --port 9000"),
        (["serve", "--host", "[::1]:80"], r"usage: .*must not contain a port: write --host \[::1\] --port 80"),
        (["serve", "--host", "http://a"], "usage: .*--host: must be an address or a host name, such as 0.0.0.0"),
        (["serve", "-hf", "owner/model"], "usage: lmi serve .*no flag -hf here; use lmi serve OWNER/MODEL, or"),
        (["serve", "demo", "--ctx-size", "100"], "usage: lmi serve .*unknown flag --ctx-size; use --max-model-len"),
        (["serve", "-c=100"], "usage: lmi serve .*no flag -c here; use --max-model-len"),
        (["serve", "--num-shard", "2"], "usage: lmi serve .*unknown flag --num-shard; use --tensor-parallel-degree"),
        (["options", "--engines", "vllm"], "usage: lmi options .*unknown flag --engines; did you mean --engine?"),
        (["options", "--engine", "vll"], "usage: lmi options .*invalid choice: 'vll'; did you mean vllm?"),
        (["bench", "--client", "3"], "usage: lmi bench .*unknown flag --client; did you mean --clients?"),
        (["server"], r"usage: lmi COMMAND .*invalid choice: 'server'; did you mean serve\?"),
        (["deploy", "plna"], r"usage: lmi deploy .*invalid choice: 'plna'; did you mean plan\?"),
        (["deploy", "plan", "x.yaml", "--sett", "a"], r"usage: lmi deploy plan .*--sett; did you mean --set\?"),
    ],
)
def test_an_unknown_flag_has_the_nearest_one_and_its_own_usage(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert re.match(said, capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run"], "lmi serve MODEL"),
        (["pull"], "lmi models get MODEL"),
        (["list"], "lmi models"),
        (["models", "list"], "lmi models"),
        (["models", "remove"], "lmi models rm MODEL"),
    ],
)
def test_commands_of_other_programs_name_ours(capsys: pytest.CaptureFixture[str], words: list[str], meant: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, "x"])
    assert capsys.readouterr().err.endswith(f"'{words[-1]}' is not supported here; use {meant}\n")


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers_below(command)


def test_a_command_of_deploy_imports_no_other_commands() -> None:
    program = "import sys; from deploy.cli.main import make_parser; make_parser('', 'invoke'); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    commands = {name for name in modules if name.startswith("deploy.cli.")}
    assert commands == {f"deploy.cli.{name}" for name in ("arguments", "invoke", "main")}
    assert not {"aiohttp", "proof.bench", "moto"} & {*modules}


def test_help_says_alike_what_is_repeatable_and_what_is_the_default() -> None:
    deploy = Parser(prog="lmi deploy")
    add_commands(deploy)
    actions = [one for parser in (make_parser(), deploy) for below in parsers_below(parser) for one in below._actions]
    assert len(actions) > 300
    for action in actions:
        text = (action.help or "") % {"default": action.default, "prog": ""}
        repeatable = isinstance(action, argparse._AppendAction)
        assert bool(re.search(r"; repeatable( \(default: .*\))?$", text)) is repeatable, (action.dest, text)
        assert "default" not in text or "(default: " in text, (action.dest, text)
        assert str(action.metavar).rpartition("=")[::2] != ("NAME", "VALUE"), action.dest


@pytest.mark.parametrize("command", ["", "launch", "completion", "conform", "replay"])
def test_help_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("usage:")] == []


@pytest.mark.parametrize("command", ["launch", "conform", "replay"])
def test_a_descriptions_paragraphs_are_filled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    description = capsys.readouterr().out.partition("\n\n")[2].partition("\n\npositional arguments:")[0]
    lines = description.splitlines()
    filled = [(line, below) for line, below in itertools.pairwise(lines) if line.strip() and below[:1].strip()]
    assert len(filled) > 2
    assert [line for line, below in filled if len(f"{line} {below.split()[0]}") <= 78] == []


def options_of(*words: str) -> list[str]:
    found: list[str] = make_parser().parse_args(["serve", "demo", *words]).options
    return found


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--dtype", "fp32"], ["option.dtype=fp32"]),
        (["--max-model-len=512"], ["option.max_model_len=512"]),
        (["--max_model_len", "512"], ["option.max_model_len=512"]),
        (["-tp", "2", "-q", "awq"], ["option.tensor_parallel_size=2", "option.quantization=awq"]),
        (["--tensor-parallel-size", "2"], ["option.tensor_parallel_size=2"]),
        (["--enforce-eager", "--no-async-scheduling"], ["option.enforce_eager=true", "option.async_scheduling=false"]),
        (
            ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-requests"],
            [
                "option.enable_auto_tool_choice=true",
                "option.tool_call_parser=hermes",
                "option.disable_log_requests=true",
            ],
        ),
        (["--job-queue-size", "9"], ["job_queue_size=9"]),
        (["-o", "option.dtype=fp16", "--dtype", "fp32"], ["option.dtype=fp16", "option.dtype=fp32"]),  # the last counts
        (["--speculative-config", '{"method": "ngram"}'], ['option.speculative_config={"method": "ngram"}']),
    ],
)
def test_an_option_is_a_flag(words: list[str], options: list[str]) -> None:
    assert options_of(*words) == options


def test_every_option_is_a_flag() -> None:
    parser = make_parser().parse_args(["serve"]).parser
    flags = parser._option_string_actions
    assert [key for key in KNOWN if f"--{key.removeprefix('option.').replace('_', '-')}" not in flags] == []


def test_what_vllms_server_has_and_this_has_not_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--check", "--trust-request-chat-template"]) == 2
    assert "set option.chat_template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("some/model", r"at startup it is downloaded from the hub; unless .* converted once and cached; .*\[convert\]"),
        ("OpenVINO/model", "at startup it is downloaded from the hub$"),
        ("some/model/file.gguf", "at startup it is downloaded from the hub$"),
        (
            "nosuch",
            "it is not a file .* looked up on the hub at startup; most names on the hub have the form OWNER/MODEL$",
        ),
    ],
)
def test_check_says_what_a_model_of_the_hub_takes(capsys: pytest.CaptureFixture[str], model: str, said: str) -> None:
    assert main(["serve", model, "--engine", "openvino", "--check"]) == 0
    assert re.match(f"{model}: not checked; {said}", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("environ", "said", "status"),
    [
        ({"SM_LLAMA_CPP_MODEL": "{data}/a.gguf"}, "{data}/a.gguf: not checked; SageMaker puts the model there", 0),
        ({"SM_LLAMA_CPP_MODEL_DIR": "{data}"}, "{data}: not checked; SageMaker puts the model there", 0),
        ({"HF_MODEL_ID": "{data}"}, "{data}: not checked; SageMaker puts the model there", 0),
        (
            {"SM_LLAMA_CPP_THREADS": "2"},
            "{data}: not checked; a container serves the model that SageMaker puts there",
            0,
        ),
        ({"HF_MODEL_ID": "{data}s"}, "there is no model at '{data}s'", 2),
        ({}, "no problems; engine: openvino, option.model_id: not set", 0),
    ],
)
def test_check_needs_no_model_data_outside_of_a_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environ: dict[str, str],
    said: str,
    status: int,
) -> None:
    data = tmp_path / "model"
    for name, value in {"SAGEMAKER_MODEL_PATH": "{data}", **environ}.items():
        monkeypatch.setenv(name, value.format(data=data))
    assert main(["serve", "--engine", "openvino", "--check"]) == status
    shown = capsys.readouterr()
    assert said.format(data=data) in shown.out + shown.err
    assert shown.out.count("not checked") == ("not checked" in said)


def test_check_reads_the_model_data_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGEMAKER_MODEL_PATH", str(tmp_path))
    monkeypatch.setenv("SM_LLAMA_CPP_MODEL", str(tmp_path / "a.gguf"))
    assert main(["serve", "--engine", "openvino", "--check"]) == 2
    assert f"there is no model at '{tmp_path / 'a.gguf'}'" in capsys.readouterr().err


def test_check_shows_what_is_ignored_beside_the_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTION_DANCE", "1")
    assert main(["serve", "--engine", "echo", "--check", "-o", "option.dtype=int3"]) == 2
    shown = capsys.readouterr()
    assert "ignored: option.dance (environment variable OPTION_DANCE)" in shown.out
    assert "must be one of" in shown.err


@pytest.mark.parametrize(
    ("words", "status", "problems"),
    [
        ([], 0, []),
        (["-o", "option.max_modl_len=3"], 2, ["-o option.max_modl_len=3: unknown option"]),
        (["--properties", "/missing"], 2, ["cannot read /missing"]),
        (["-o", "option.dtype=int3", "--allow-host", "a/b"], 2, ["-o option.dtype=int3: must be", "a/b"]),
        (["-o", "no pair"], 2, ["no pair"]),
    ],
)
def test_check_says_as_json_what_it_says_as_text(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    status: int,
    problems: list[str],
) -> None:
    monkeypatch.setenv("OPTION_DANCE", "1")
    command = ["serve", "--engine", "echo", "--check", *words]
    assert main(command) == status
    shown = capsys.readouterr()
    assert main([*command, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) == len(problems)
    for problem, expected in zip(found["problems"], problems, strict=True):
        assert expected in problem["text"]
        assert problem["text"] in shown.err
    last = [] if status else ["no problems; engine: echo, option.model_id: not set"]
    assert [*found["notes"], *last] == shown.out.splitlines()


def test_json_is_refused_for_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--json"])
    assert stopped.value.code == 2
    assert "--json applies only with --check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            "# \u00fc\n".encode("latin-1"),
            "{file} is not UTF-8: DJL Serving itself does not start with it; save it as UTF-8\n",
        ),
        (
            "\ufeffoption.dtype=auto\n".encode(),
            "DJL Serving does not read option.dtype (serving.properties, line 1): a byte order mark precedes it; "
            "save the file without the mark\n",
        ),
        ("\ufeff# \u00fc\n".encode(), ""),
        ("option.model_name=\u00fc\n".encode(), ""),
    ],
)
def test_check_names_what_java_would_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, said: str
) -> None:
    file = tmp_path / "serving.properties"
    file.write_bytes(data)
    assert main(["serve", "--engine", "echo", "--check", "--properties", str(file)]) == 0
    warnings, _, _ = capsys.readouterr().out.partition("no problems")
    assert warnings == said.format(file=file)


OWN_FORMATTERS = """
from elsewhere import imported
from handler.formatters import input_formatter

@input_formatter
def own(body):
    return body

def another(body):
    return body
assigned = input_formatter(another)
"""


@pytest.mark.parametrize("kind", ["input", "output"])
def test_check_reports_a_formatter_whose_name_is_not_in_model_py(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    def check(name: str) -> str:
        words = ["--engine", "echo", "--check", "--properties", str(tmp_path / "serving.properties")]
        code = main(["serve", *words, "-o", f"option.{kind}_formatter={name}"])
        error = capsys.readouterr().err
        assert code == (2 if error else 0)
        return error

    (tmp_path / "serving.properties").touch()
    wanted = f"option.{kind}_formatter=nosuch: must be the name of an @{kind}_formatter function of model.py; "
    assert check("nosuch").endswith(f"{wanted}there is no model.py\n")
    (tmp_path / "model.py").write_text(OWN_FORMATTERS)
    assert check("nosuch").endswith(f"{wanted}it is not in {tmp_path / 'model.py'}\n")
    assert [check(name) for name in ("own", "assigned", "imported")] == ["", "", ""]
    (tmp_path / "model.py").write_text(f"{OWN_FORMATTERS}from elsewhere import *\n")
    assert check("nosuch") == "", "the name may be imported"


@pytest.mark.parametrize("command", ["serve", "options", "bench", "replay", "conform", "completion"])
def test_a_commands_help_shows_how_to_call_it(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: lmi {command} [-h]")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = "from handler.cli import main; raise SystemExit(main(['completion', 'bash']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    path = tmp_path_factory.mktemp("completion") / "lmi.bash"
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["lmi", "se"], {"serve"}),
        (["lmi", "skill", "install", "cl"], {"claude"}),
        (["lmi", "serve", "--proper"], {"--properties"}),
        (["lmi", "serve", "--tensor-parallel-d"], {"--tensor-parallel-degree"}),
        (["lmi", "serve", "./pypr"], {"./pyproject.toml"}),
        (["lmi", "bench", "--compare", "./pypr"], {"./pyproject.toml"}),
        (["lmi", "deploy", "do"], {"down", "doctor"}),
        (["lmi", "deploy", "bench", "--outp"], {"--output"}),
        (["lmi", "completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(script: Path, words: list[str], completions: set[str]) -> None:
    command = ["bash", "-c", _COMPLETE, "bash", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert set(done.stdout.split()) == completions, done.stderr


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef lmi"), ("fish", "complete -c lmi")])
def test_other_shells(shell: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert first in shown
    assert "doctor" in shown


def test_completion_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == f"lmi completion: shtab is not installed: {install('lmi-handler[cli]')}\n"


def test_a_pipe_that_closes_is_no_failure() -> None:
    code = "from handler.cli import main; raise SystemExit(main(['options']))"
    command = f'{sys.executable} -c "{code}" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


FOREIGN = {
    f"--{name.removeprefix(prefix).lower().replace('_', '-')}": name
    for group, prefix in {"aws-sglang": "SM_SGLANG_", "aws-llama-cpp": "SM_LLAMA_CPP_", "tgi": ""}.items()
    for name in VARIABLES_OF[group]
    if name.startswith(prefix)
}


def test_each_flag_of_another_server_that_is_known_leads_to_what_its_variable_does() -> None:
    """A flag's name is that of its variable in each of these servers."""
    known = make_parser(tools=False)
    (commands,) = (action for action in known._actions if isinstance(action, argparse._SubParsersAction))
    serve = commands.choices["serve"]
    unknown = {flag: name for flag, name in FOREIGN.items() if flag not in serve._option_string_actions}
    assert len(unknown) > 150
    leads = {flag: lead_of_flag(flag) for flag in unknown}
    assert [flag for flag, lead in leads.items() if not lead and not VARIABLES[unknown[flag]].unread] == []
    named = {word for lead in leads.values() for word in re.findall(r"(?<=use )--[a-z-]+|(?<= of )--[a-z-]+", lead)}
    assert {"--max-model-len", "--served-model-name", "--llama-server-args", "--max-input-len"} <= named
    assert named - {*serve._option_string_actions} == set(), "what a lead names must be a flag"


@pytest.mark.parametrize(
    ("flag", "lead"),
    [
        ("--alias", "use --served-model-name"),
        ("--max_total_tokens", "use --max-model-len"),
        ("--n-gpu-layers", 'with the llamacpp engine, use --llama-server-args "--n-gpu-layers ..."'),
        ("--temp", "use the field temperature of --override-generation-config"),
        ("--jinja", "it has no equivalent here: this server does so anyway"),
        ("--nosuch", ""),
    ],
)
def test_a_lead_says_what_to_use(flag: str, lead: str) -> None:
    assert lead_of_flag(flag).removeprefix("; ") == lead


@pytest.mark.parametrize("command", ["bench", "conform", "launch", "replay"])
def test_commands_that_call_a_server_say_where_its_key_goes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert re.search("LMI_API_KEY|--key", capsys.readouterr().out)
