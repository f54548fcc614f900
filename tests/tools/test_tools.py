"""The tools: the packages' sizes, the files that a request walks through, its frames, instances, and mutations."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from deploy.resolve.instances import architecture, family
from deploy.resolve.model.files import Hub
from tests.deploy.doubles.hub import serving
from tests.tools import models
from tests.tools.code_size import ROOT, measure, num_nodes
from tests.tools.instances import (
    ARM_FAMILIES,
    CPU_FAMILIES,
    FILE,
    PRICES,
    news,
    of_ec2,
    of_sagemaker,
    render,
    renewed,
    table,
)
from tests.tools.mutate import SWITCH, Place, Recorded, clone, covering, draw, places, run, switched

# -- the files that one request walks through: a reader has to follow them all -----------------------------------------


MOST = {"LMI by HTTP": 37, "TGI by HTTP": 38, "OpenAI by HTTP": 42, "Anthropic by HTTP": 46, "LMI in DJL Serving": 29}


def test_a_streamed_request_walks_through_few_files() -> None:
    """In a process of its own, where no other server runs."""
    code = "import json; from tests.tools.code_size import walks; print(json.dumps(walks()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    walks = json.loads(done.stdout)
    assert walks.keys() == MOST.keys()
    assert {name: files for name, files in walks.items() if len(files) > MOST[name]} == {}
    assert all("core/text.py" in files and "scheduler/batcher.py" in files for files in walks.values())


CEILINGS = {"handler": 646_400, "deploy": 197_200, "proof": 90_800}
"""Syntax nodes of each package. A ceiling may only fall; a feature that raises one says by how much in its commit."""


@pytest.mark.parametrize("package", CEILINGS)
def test_a_package_is_below_its_ceiling(package: str) -> None:
    assert measure(package).nodes <= CEILINGS[package]


@pytest.mark.parametrize(
    ("source", "nodes"),
    [
        ("", 1),
        ("x = 1\n", 5),  # module, assignment, name, its context, number
        ("x = (\n    1  # a comment\n)\n", 5),
        ("x = 1\ny = 2\n", 9),
        ("x = 1; y = 2\n", 9),
    ],
)
def test_line_breaks_and_comments_do_not_count(source: str, nodes: int) -> None:
    assert num_nodes(source) == nodes


FRAMES_MOST = 13
"""Frames between a plain stream's bytes and the engine's command. What only forwards belongs into what it calls."""


def test_few_frames_lie_between_the_socket_and_the_engines_command() -> None:
    command = [sys.executable, "-m", "tests.tools.frames", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    walks = json.loads(done.stdout)
    assert walks.keys() == {"LMI stream, HTTP", "LMI stream, DJL", "chat with tools, HTTP", "embeddings, HTTP"}
    too_deep = {name: walk["stack"] for name, walk in walks.items() if len(walk["stack"]) > FRAMES_MOST}
    assert too_deep == {}
    assert all(
        walk["stack"][-2:] == ["engines/process/supervisor._send", "engines/process/supervisor.put"]
        for walk in walks.values()
    )


# -- the script that renews the table of instances ---------------------------------------------------------------------


def described(gpu: str = "L4", architecture: str = "x86_64") -> dict[str, Any]:
    return {
        "VCpuInfo": {"DefaultVCpus": 8},
        "MemoryInfo": {"SizeInMiB": 32768},
        "ProcessorInfo": {"SupportedArchitectures": [architecture]},
        "GpuInfo": {"Gpus": [{"Name": gpu, "Manufacturer": "NVIDIA", "Count": 1, "MemoryInfo": {"SizeInMiB": 22888}}]},
    }


def test_the_shipped_table_is_what_the_script_writes() -> None:
    """But for what a newer botocore or moto adds, which running it again says."""
    shipped = json.loads(FILE.read_text())
    gpu, cpu, _ = table(of_sagemaker(), of_ec2())
    assert {name: gpu[name] for name in shipped["gpu"]} == shipped["gpu"]
    assert {name: cpu[name] for name in shipped["cpu"]} == shipped["cpu"]
    assert len(shipped["gpu"]) >= 50
    assert {name.split(".")[1] for name in shipped["cpu"]} == {*CPU_FAMILIES, *ARM_FAMILIES}
    assert [name for name in shipped["cpu"] if (family(name) in ARM_FAMILIES) != (architecture(name) == "arm64")] == []


def test_what_is_new_is_said() -> None:
    rows = {"ml.a.xlarge": {"vcpu": 4, "ram": 8}, "ml.b.xlarge": {"vcpu": 4, "ram": 8}}
    new = {"ml.b.xlarge": {"vcpu": 4, "ram": 16}, "ml.c.xlarge": {"vcpu": 1, "ram": 2}}
    assert list(news(rows, new)) == [
        "gone     ml.a.xlarge",
        "changed  ml.b.xlarge: ram 8 -> 16",
        "new      ml.c.xlarge: {'vcpu': 1, 'ram': 2}",
    ]
    assert list(news(rows, rows)) == []


def test_unknown_gpus_and_undescribed_types_are_omitted_by_name() -> None:
    names = ["ml.g9.xlarge", "ml.p9.48xlarge", "ml.g6.xlarge", "ml.g5g.xlarge", "ml.c7i.large", "ml.p3.2xlarge"]
    ec2 = {
        "g9.xlarge": described("X100"),
        "g6.xlarge": described(),
        "g5g.xlarge": described("L4", "arm64"),
        "c7i.large": described() | {"GpuInfo": {}},
        "p3.2xlarge": described("V100"),
    }
    gpu, cpu, missing = table(names, ec2)
    row = {"gpu": "L4", "count": 1, "mib": 22888, "vcpu": 8, "ram": 32, "nvme": 0, "sm": "8.9"}
    assert gpu == {"ml.g6.xlarge": row}
    assert cpu == {"ml.c7i.large": {"vcpu": 8, "ram": 32}}
    assert missing == {
        "ml.g9.xlarge": "CAPABILITIES has no X100",
        "ml.p9.48xlarge": "EC2's description is not at hand",
    }
    assert json.loads(render(gpu, cpu, missing))["gpu"] == gpu


def test_listed_prices_replace_the_tables_and_the_others_are_named() -> None:
    gpu = {name: {"vcpu": 4} for name in ("ml.g6.xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge", "ml.p7.48xlarge")}
    cpu = {"ml.c7i.xlarge": {"vcpu": 4, "ram": 8}, "ml.m5.large": {"vcpu": 2, "ram": 8}}
    before = {
        "usd_per_hour": {"ml.g6.xlarge": 1.13, "ml.p5e.48xlarge": 70.0},
        "usd_per_vcpu_hour": {"c7i": 0.06, "m5": 0.05},
    }
    listed = {"ml.g6.xlarge": 1.1267, "ml.p5en.48xlarge": 72.795, "ml.c7i.xlarge": 0.2142, "ml.inf2.xlarge": 0.99}
    after = renewed(before, listed, gpu, cpu, "2026-12-01")
    assert after["usd_per_hour"] == {"ml.g6.xlarge": 1.1267, "ml.p5e.48xlarge": 70.0, "ml.p5en.48xlarge": 72.795}
    assert after["usd_per_vcpu_hour"] == {"c7i": 0.0536, "m5": 0.05}
    assert (after["read"], after["region"]) == ("2026-12-01", "us-east-1")
    assert after["source"].endswith("Older, as they are not listed: ml.p5e.48xlarge.")
    assert after.keys() == json.loads(PRICES.read_text()).keys()


# -- the script that renews the table of models ------------------------------------------------------------------------


def test_the_shipped_table_of_models_is_in_the_scripts_form() -> None:
    text = models.FILE.read_text()
    assert models.render(json.loads(text)) == text


def test_rows_are_renewed_from_the_hub_and_added(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 64,
    }  # fmt: skip
    first = {"names": ["a/base"], "parameters": 1, "config": {**config, "num_hidden_layers": 1}}
    second = {"names": ["a/long"], "of": "a/base", "parameters": 1, "config": {}}
    gone = {"names": ["a/gone"], "parameters": 5, "config": config}
    rows: list[dict[str, Any]] = [first, second, dict(gone)]
    with serving() as hub:
        hub.add("a/base", config)
        hub.add("a/long", {"text_config": {**config, "max_position_embeddings": 128}})
        hub.add("a/new", {**config, "rms_norm_eps": 1e-6})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        lines = list(models.renew(rows, ["a/new", "a/base"], Hub()))
    count = 100 * 8 + 2 * (4 * 8 * 8 + 3 * 8 * 16)
    assert rows == [
        {**first, "parameters": count, "config": config},
        {**second, "parameters": count, "config": {"max_position_embeddings": 128}},
        gone,
        {"names": ["a/new"], "parameters": count, "source": "the hub", "config": config},
    ]
    assert lines[0] == f"changed   a/base: num_hidden_layers 1 -> 2, parameters 1 -> {count}"
    assert lines[2].startswith("as it was a/gone: a/gone on 127.0.0.1 is gated, private, or missing")
    assert lines[3:] == ["new       a/new"]


SOURCE = '''"""Say 1 == 1."""

def top(values: list[1]) -> int:
    """Return 2."""
    best = 0
    for value in values:
        if value > best and not (
            value == 7
        ):
            best = value
    print(f"{best + 1}")
    return best

def unused():
    return True

TABLE = {1: True}

def look(key):
    return TABLE[key]
'''


def changed(place: Place) -> str:
    whole = SOURCE.encode()
    return (whole[: place.begin] + place.text.encode() + whole[place.end :]).decode()


def test_each_place_is_one_change_of_code_that_still_parses() -> None:
    found = list(places("a.py", SOURCE))
    assert [(place.line, place.text) for place in found] == [
        (5, "(1)"),
        (7, "(value > best or not value == 7)"),
        (7, "(value >= best)"),
        (7, "(value == 7)"),
        (8, "(value != 7)"),
        (8, "(8)"),
        (11, "pass"),
        (12, "return None"),
        (15, "return None"),
        (15, "False"),
        (17, "(2)"),
        (17, "False"),
        (20, "return None"),
    ]
    for place in found:
        compile(changed(place), "a.py", "exec")
        assert changed(place) != SOURCE


def outcome(source: str) -> list[Any]:
    """What the functions return or raise."""
    names: dict[str, Any] = {}
    exec(source, names)
    found = list[Any]()
    for call in ("top([3, 9, 7])", "top([0, 8])", "unused()", "look(1)"):
        try:
            found.append(eval(call, names))
        except KeyError as error:
            found.append(repr(error))
    return found


def test_a_file_with_all_changes_does_what_the_chosen_one_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutated: Any = types.ModuleType("mutated")
    exec(SWITCH, mutated.__dict__)
    monkeypatch.setitem(sys.modules, "mutated", mutated)
    found = dict(enumerate(places("a.py", SOURCE)))
    whole = switched(SOURCE.encode(), found, 100).decode()
    assert outcome(whole) == outcome(SOURCE)
    assert mutated.executed == {*found}
    capsys.readouterr()
    for number, place in found.items():
        mutated.chosen = number
        of_whole = outcome(whole), capsys.readouterr()
        assert of_whole == (outcome(changed(place)), capsys.readouterr()), place


def test_each_function_of_a_file_tells_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[int]()
    monkeypatch.setitem(sys.modules, "mutated", types.SimpleNamespace(on=told.append))
    names: dict[str, Any] = {}
    exec(switched(SOURCE.encode(), {}, 100), names)
    assert told == []
    names["look"](1)
    assert told == [100]


LATE = "LIMIT = 3\n\ndef limit():\n    return LIMIT\n"
"""A module that tests import as they run, the first of them without a look at it."""


@pytest.mark.nightly
def test_a_change_is_caught_by_a_test_that_executes_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also what is made when the module is imported; a second run begins with the record of the first."""
    repository, record = tmp_path / "repository", tmp_path / "record.json"
    for name, text in {
        "handler/__init__.py": "",
        "handler/a.py": SOURCE,
        "tests/test_a.py": "from handler.a import look, top\n\ndef test_top():\n    assert top([3, 9, 7]) == 9\n\n"
        "def test_bad():\n    assert top([]) == 1\n\ndef test_look():\n    assert look(1) is True\n",
        "handler/b.py": LATE,
        "tests/test_b.py": "def test_first():\n    import handler.b\n\n"
        "def test_late():\n    from handler.b import limit\n    assert limit() == 3\n",
        "handler/c.py": LATE,
        "tests/test_c.py": "import sys\n\ndef test_fails_in_a_new_process():\n    from handler.c import limit\n"
        "    assert limit() and '-x' not in sys.argv\n",
    }.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    drawn = draw(repository, 100, 1)
    sources = {"handler/a.py": SOURCE, "handler/b.py": LATE, "handler/c.py": LATE}
    found = [place for path, source in sources.items() for place in places(path, source)]
    assert sorted(drawn, key=str) == sorted(found, key=str)
    assert [
        place for place in found if draw(repository, 100, 1, at=[f"handler/b.py:{place.line}"]) == [place]
    ] == found[-4:-2]
    assert drawn == draw(repository, 100, 1) != draw(repository, 100, 2)

    def verdicts(name: str) -> dict[str, str]:
        assert run(clone(tmp_path / name, "HEAD", repository), drawn, ["tests"], 10, record) == 0
        lines = capfd.readouterr().out.splitlines()
        told = dict(line.removeprefix("handler/a.py:").split("  ") for line in lines if line.startswith("handler/"))
        caught = sum(verdict == "caught" for verdict in told.values())
        assert any(line.startswith(f"{caught} of 17 caught ({caught / 17:.1%})") for line in lines)
        return told

    of_top = {"7: (value == 7)": "caught", "8: (value != 7)": "caught", "12: return None": "caught"}
    of_look = {"17: (2)": "caught", "17: False": "caught", "20: return None": "caught"}
    of_late = {"handler/b.py:1: (4)": "caught", "handler/b.py:4: return None": "caught"}
    of_late |= {
        "handler/c.py:1: (4)": "MISSED, its tests fail without it too",
        "handler/c.py:4: return None": "caught",
    }
    unseen = {"5: (1)", "7: (value > best or not value == 7)", "7: (value >= best)", "8: (8)", "11: pass"}
    unexecuted = dict.fromkeys(("15: return None", "15: False"), "MISSED, no test executes it")
    assert verdicts("first") == of_top | of_look | of_late | dict.fromkeys(unseen, "MISSED") | unexecuted
    of_places, tests = json.loads(record.read_text())
    assert [test[0] for test in tests.values()] == [True, False, True, True, True, True]
    tests["tests/test_a.py::test_top"][0] = False
    record.write_text(json.dumps([of_places, tests]))
    assert verdicts("second") == of_look | of_late | dict.fromkeys(
        (*of_top, *unseen, *unexecuted), "MISSED, no test executes it"
    )


def test_the_fastest_tests_run_within_the_budget_file_by_file() -> None:
    recorded = {
        "a::slow": Recorded(True, 9, [3]),
        "a::fast": Recorded(True, 1, [4, 5]),
        "b::middle": Recorded(True, 2, [3]),
        "b::failed": Recorded(False, 0, [4]),
        "b::elsewhere": Recorded(True, 0, [5]),
    }
    assert covering([3, 4], recorded, 12) == ["a::fast", "a::slow", "b::middle"]
    assert covering([3, 4], recorded, 11) == ["a::fast", "b::middle"]
    assert covering([3, 4], recorded, 0.5) == ["a::fast"]
    assert covering([6], recorded, 10) == []
    assert covering([5], recorded, 9, beside=True) == ["b::elsewhere", "b::middle", "a::fast"]


def test_places_that_two_commits_share_are_drawn_alike(tmp_path: Path) -> None:
    """Though other lines were added before them, one was changed, and one is there a second time."""
    new = SOURCE.replace("    best = 0\n", "    other = 7\n    best = 3\n") + "\ndef more():\n    return True\n"
    for name, source in (("old", SOURCE), ("new", new)):
        (tmp_path / name / "handler").mkdir(parents=True)
        (tmp_path / name / "handler" / "a.py").write_text(source)
    old, new_root = tmp_path / "old", tmp_path / "new"
    before, after = draw(old, 100, 1, new_root), draw(new_root, 100, 1, old)
    assert [place.text for place in before] == [place.text for place in after]
    assert {after.line - before.line for before, after in zip(before, after, strict=True)} == {1}
    assert len(before) == len(list(places("a.py", SOURCE))) - 1
