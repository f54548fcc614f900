"""The Dockerfile, checked against SageMaker's rules for containers and against the repository."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import handler
from deploy.data import table
from deploy.resolve.images import push_instructions
from handler.config.model_files import DEMO_MEMBER
from handler.container.djl import S5CMD
from tests.container.images.dockerfile import ROOT, SECOND, context, read

ARGUMENTS, STAGES = read()
IMAGES = ("cpu", "llamacpp", "lmi", "trtllm")
EMBEDDED = ("cpu", "llamacpp")


@pytest.mark.parametrize("name", IMAGES)
def test_image_is_run_as_sagemaker_runs_it(name: str) -> None:
    stage = STAGES[name]
    assert stage.command("ENTRYPOINT")[1:] == ["-m", "handler.container"]
    assert stage.command("CMD") == ["serve"]
    assert stage.values("EXPOSE") == ["8080"]
    assert stage.values("USER") == stage.values("HEALTHCHECK") == stage.values("VOLUME") == []
    assert stage.labels()["com.amazonaws.sagemaker.capabilities.accept-bind-to-port"] == "true"
    assert stage.labels()["com.amazonaws.sagemaker.capabilities.bidirectional-streaming"] == "true"
    assert stage.labels()["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert stage.labels().get("com.amazonaws.sagemaker.capabilities.multi-models", "false") == "false"


def test_each_image_has_its_front_and_engine() -> None:
    chosen = {name: STAGES[name].environment() for name in IMAGES}
    fronts = {name: (found["LMI_FRONT"], found.get("OPTION_LLM_ENGINE")) for name, found in chosen.items()}
    assert fronts == {
        "cpu": ("embedded", None),
        "llamacpp": ("embedded", "llamacpp"),
        "lmi": ("djl", "vllm"),
        "trtllm": ("djl", "trtllm"),
    }
    assert Path(chosen["cpu"]["LMI_DEFAULT_MODEL"]).name == Path(DEMO_MEMBER).name


def test_bases_are_pinned() -> None:
    bases = {stage.base for stage in STAGES.values()}
    assert bases == {
        ARGUMENTS["CPU_BASE"],
        "scratch",
        *("tools", "cpu-packages", "cpu-app", "llamacpp-tools", "llamacpp-packages"),  # stages of the same file
        "eclipse-temurin:17.0.19_10-jre-noble",
        "deepjavalibrary/djl-serving:0.36.0-cpu",
        "nvcr.io/nvidia/tensorrt-llm/release:1.2.1",
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.38.0-lmi29.0.0-cu130",
    }
    assert re.fullmatch(r"debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", ARGUMENTS["CPU_BASE"])


def test_llamacpp_with_cuda_takes_two_bases_and_no_other_argument() -> None:
    """The first has the compiler. Python and its packages are those of the second, from the same distribution."""
    devel, runtime = "nvidia/cuda:13.0.1-devel-ubuntu24.04", "nvidia/cuda:13.0.1-runtime-ubuntu24.04"
    _, stages = read(given={"LLAMACPP_BUILD_BASE": devel, "LLAMACPP_BASE": runtime})
    assert (stages["llamacpp-tools"].base, stages["llamacpp"].base) == (devel, runtime)
    assert {stages[f"llamacpp-{name}"].base for name in ("build", "packages")} == {"llamacpp-tools"}
    assert stages["tools"].base == ARGUMENTS["CPU_BASE"]
    assert STAGES["llamacpp"].base == STAGES["llamacpp-tools"].base == ARGUMENTS["CPU_BASE"]
    document = (ROOT / "docs" / "container.md").read_text()
    assert f"--build-arg LLAMACPP_BUILD_BASE={devel} --build-arg LLAMACPP_BASE={runtime} " in document


def test_llama_server_is_built_for_other_processors_than_the_builders() -> None:
    [step] = [value for value in STAGES["llamacpp-build"].values("RUN") if "cmake " in value]
    flags = dict(re.findall(r" -D(\w+)=(\S+)", step))
    assert {name: flags[name] for name in ("GGML_NATIVE", "GGML_BACKEND_DL", "GGML_CPU_ALL_VARIANTS")} == {
        "GGML_NATIVE": "OFF",
        "GGML_BACKEND_DL": "ON",
        "GGML_CPU_ALL_VARIANTS": "ON",
    }
    assert flags["LLAMA_USE_PREBUILT_UI"] == "OFF", "it would be downloaded"
    assert "/opt/llama.cpp" in STAGES["llamacpp"].environment()["PATH"].split(":")
    assert "LICENSE" in step


KERNELS = """\
function(ggml_add_cpu_backend_variant tag_name)
    ggml_add_cpu_backend_variant_impl(${tag_name})
        ggml_add_cpu_backend_variant(x64)
        ggml_add_cpu_backend_variant(sse42              SSE42)
            ggml_add_cpu_backend_variant(ivybridge      SSE42 AVX F16C)
        ggml_add_cpu_backend_variant(haswell            SSE42 AVX F16C FMA AVX2 BMI2)
            ggml_add_cpu_backend_variant(armv8.6_2    DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8 SVE2)
            ggml_add_cpu_backend_variant(armv9.2_1    DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8 SME)
            ggml_add_cpu_backend_variant(apple_m1             DOTPROD)
    ggml_add_cpu_backend_variant_impl("")
"""
"""Lines as in ggml/src/CMakeLists.txt."""


def test_the_kernels_of_sagemakers_hosts_are_built_and_no_others(tmp_path: Path) -> None:
    [step] = [value for value in STAGES["llamacpp-build"].values("RUN") if "cmake " in value]
    (tmp_path / "ggml" / "src").mkdir(parents=True)
    file = tmp_path / "ggml" / "src" / "CMakeLists.txt"
    file.write_text(KERNELS)
    subprocess.run(["sh", "-euc", step.split(" && ")[0]], cwd=tmp_path, check=True)
    kept = [line for line in KERNELS.splitlines() if not re.search("sse42 |ivybridge|armv9|apple", line)]
    assert file.read_text().splitlines() == kept


def test_the_compiler_keeps_amx_s_configuration(tmp_path: Path) -> None:
    """GCC 12 drops the stores to it that _tile_loadconfig does not claim to read; tiles are then not configured."""
    [step] = [value for value in STAGES["llamacpp-build"].values("RUN") if "cmake " in value]
    file = tmp_path / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    file.parent.mkdir(parents=True)
    file.write_text("    tc.palette_id = 1;\n\n    _tile_loadconfig(&tc);\n    done = true;\n")
    subprocess.run(["sh", "-euc", step.split(" && ")[1]], cwd=tmp_path, check=True)
    assert file.read_text().splitlines()[2].split(";") == [
        '    asm volatile("" : : "r"(&tc) : "memory")',
        "     _tile_loadconfig(&tc)",
        "",
    ]


def test_the_second_base_of_trtllm_is_one_argument_away() -> None:
    assert read(given={"TRTLLM_VERSION": SECOND})[1]["trtllm"].base == f"nvcr.io/nvidia/tensorrt-llm/release:{SECOND}"
    document = (ROOT / "docs" / "container.md").read_text()
    assert f" --target trtllm --build-arg TRTLLM_VERSION={SECOND} " in document


def test_every_documented_build_makes_what_sagemaker_takes() -> None:
    """One platform, no index, and Docker's format of the manifest."""
    lines = [line for path in sorted((ROOT / "docs").rglob("*.md")) for line in path.read_text().splitlines()]
    built = [line for line in lines if line.startswith(("docker build", "buildah b", "podman build"))]
    assert len(built) > 4
    for line in built:
        assert re.search(" --platform linux/(amd64|arm64) ", line)
        assert ("linux/arm64" in line) == ("-arm64:" in line)
        assert "--provenance=false" in line or "--format docker" in line
    assert all("--format v2s2" in line for line in lines if line.startswith(("podman push", "buildah push")))


def test_documents_examples_and_deploy_name_the_dockerfile_s_images() -> None:
    known = table("image_accounts")
    newest = max(known["lmi_tags"], key=lambda version: tuple(map(int, version.split("."))))
    assert known["lmi_tags"][newest] == ARGUMENTS["LMI_TAG"]
    assert known["registries"][ARGUMENTS["LMI_REGION"]] == ARGUMENTS["LMI_ACCOUNT"]
    document = (ROOT / "docs" / "container.md").read_text()
    rows = {name: next(line for line in document.splitlines() if line.startswith(f"| `{name}` |")) for name in IMAGES}
    assert ARGUMENTS["LMI_TAG"] in rows["lmi"]
    assert ARGUMENTS["TRTLLM_BASE"].rpartition(":")[2] in rows["trtllm"]
    assert f"DJL Serving {ARGUMENTS['DJL_VERSION']}" in rows["trtllm"]
    named = {}
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        image = yaml.safe_load(path.read_text())["image"]
        if "repository" not in image:
            continue
        name = f"{image['repository']}:{image.get('tag', handler.__version__)}"
        advised = push_instructions(f"111122223333.dkr.ecr.us-east-1.amazonaws.com/{name}")
        target = re.search(r"--target (\w+) ", advised)
        assert target is not None
        named[name] = target[1]
        assert image.get("cuda", "none") in rows[target[1]]
        assert any(
            line.startswith("docker build ") and f"--target {target[1]} " in line and f"-t {name} " in line
            for line in document.splitlines()
        ), f"{path.name}: docs/container.md does not build {name}"
    assert sorted(named.values()) == sorted(IMAGES)


def test_copied_files_are_there_and_in_the_context() -> None:
    files = set(context())
    for stage in STAGES.values():
        for value in stage.values("COPY"):
            *sources, _ = value.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in STAGES
                continue
            for source in map(Path, sources):
                assert any(source == file or source in file.parents for file in files), source


def test_java_has_what_downloads_models_of_s3() -> None:
    """The lmi image's base has it, as the base of this copy."""
    assert f"--from=djl {S5CMD} {S5CMD}" in STAGES["trtllm"].values("COPY")


def test_every_builder_has_what_it_uses() -> None:
    """OCI images keep no SHELL; buildah 1.28 loses a stage that RUN mounts and its cache has."""
    for stage in STAGES.values():
        assert stage.values("SHELL") == []
        assert not [value for value in stage.values("RUN") if "--mount" in value or "<<" in value]


def test_context_holds_nothing_but_what_is_built() -> None:
    files = set(context())
    assert {file.parts[0] for file in files} == {
        "LICENSE",
        "pyproject.toml",
        "README.md",
        "lmi_handler.py",
        "handler",
        "deploy",
        "proof",
        "docker",
    }
    assert not [file for file in files if "__pycache__" in file.parts or file.suffix == ".pyc"]
    assert Path("handler/py.typed") in files


def test_no_layer_keeps_package_lists_or_secrets() -> None:
    for stage in STAGES.values():
        for value in stage.values("RUN"):
            assert "apt-get update" not in value or "rm -rf /var/lib/apt/lists/*" in value
            assert "pip install" not in value or "--no-cache-dir" in value
        for name in [*stage.environment(), *stage.values("ARG")]:
            assert not re.search("TOKEN|SECRET|KEY|PASSWORD", name)


def test_hadolint_finds_nothing() -> None:
    found = subprocess.run(
        [Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("name", IMAGES)
def test_our_own_code_is_the_last_layer_of_files(name: str) -> None:
    """A changed line of ours is then all that is pushed."""
    copies = [value for value in STAGES[name].values("COPY") if re.match("--from=(wheel|.*-app) ", value)]
    source = f"{name}-app" if name in EMBEDDED else "wheel"
    assert copies == [f"--from={source} /opt/lmi-handler/app /opt/lmi-handler/app"]
    instructions = [(one.name, one.value) for one in STAGES[name].instructions]
    after = instructions[instructions.index(("COPY", copies[0])) + 1 :]
    assert [value for kind, value in after if kind in ("COPY", "ADD")] == []
    assert all(value.startswith("python3 -m compileall") for kind, value in after if kind == "RUN")
    for kind, value in instructions[: instructions.index(("COPY", copies[0]))]:
        assert kind != "ARG" or not value.startswith(("VERSION", "REVISION", "SOURCE=")), "it changes each layer below"


@pytest.mark.parametrize("name", IMAGES)
def test_labels_say_what_it_was_built_from(name: str) -> None:
    for field in ("version", "revision", "source"):
        assert STAGES[name].labels()[f"org.opencontainers.image.{field}"] == f"${{{field.upper()}}}"
        assert f"{field.upper()}=unknown" in STAGES[name].values("ARG")


def test_the_dockerfile_imports_names_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    names = re.findall(r"from (handler[\w.]*) import (\w+)", text)
    assert names
    modules = [name for imported in re.findall(r"c 'import (handler[^']*)'", text) for name in imported.split(", ")]
    assert "handler.engines.llamacpp.engine" in modules
    for name in modules:
        importlib.import_module(name)
    assert [name for module, name in names if not hasattr(importlib.import_module(module), name)] == []
