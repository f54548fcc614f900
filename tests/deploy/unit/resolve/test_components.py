"""Components with a model of their own: what each needs, one type for all, and whether all first copies have room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.main import main
from deploy.errors import DoesNotFit, SpecError
from deploy.resolve.fit import Resolution
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources
from deploy.resources.resource import Kind
from deploy.spec import Spec
from deploy.spec.components import servers
from deploy.spec.reading import read_spec
from tests.deploy.unit.resolve.test_resolver import GIVEN, spec

SMALL = {"id": "org/small", "shape": {"parameters": 6e8, "layers": 28, "kv_heads": 8, "head_dim": 128}, "context": 4096}
LARGE = {
    "id": "org/large",
    "shape": {"parameters": 7e10, "layers": 80, "kv_heads": 8, "head_dim": 128},
    "context": 4096,
}
FOUR = {"type": "ml.g6e.12xlarge"}


def resolution(*components: dict[str, Any], **changes: Any) -> Resolution:
    model = {**GIVEN["model"], "context": 8192}
    return resolve(spec(**{"model": model, "instance": FOUR, "components": list(components), **changes}), "us-east-1")


def read(tmp_path: Path, content: dict[str, Any]) -> Spec:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_spec(path)


def test_each_has_what_it_overrides_and_the_rest_of_the_top_level() -> None:
    whole = spec(
        options={"llm_engine": "vllm", "max_rolling_batch_size": 8},
        environment={"A": "1", "B": "2"},
        components=[
            {"name": "chat"},
            {
                "name": "small",
                "model": SMALL,
                "options": {"max_rolling_batch_size": None, "dtype": "fp16"},
                "environment": {"B": None, "C": "3"},
            },
            {"name": "again"},
        ],
    )
    chat, small = servers(whole)
    assert [item.name for item in chat.components] == ["chat", "again"]
    assert (chat.model, chat.options, chat.environment) == (whole.model, whole.options, whole.environment)
    assert small.model.id == "org/small"
    assert small.options == {"llm_engine": "vllm", "dtype": "fp16"}
    assert small.environment == {"A": "1", "C": "3"}


def test_different_accelerators_are_different_tensor_parallel_degrees() -> None:
    found = resolution({"name": "one"}, {"name": "two", "accelerators": 2}, {"name": "same"})
    assert {name: one.tensor_parallel for name, one in found.decision.components.items()} == {
        "one": 1,
        "two": 2,
        "same": 1,
    }
    whole = spec(
        model={**GIVEN["model"], "context": 8192},
        instance=FOUR,
        components=[{"name": "one"}, {"name": "two", "accelerators": 2}, {"name": "same"}],
    )
    built = resources(whole, found.decision)
    models = {item.name: item for item in built if item.kind is Kind.MODEL}
    used = [str(item.request["Specification"]["ModelName"]) for item in built if item.kind is Kind.COMPONENT]
    assert used[0] == used[2] != used[1]
    assert set(used) == set(models)
    variables = [models[name].request["PrimaryContainer"]["Environment"] for name in used]
    degrees = [one.get("OPTION_TENSOR_PARALLEL_DEGREE", "1") for one in variables]
    assert degrees == ["1", "2", "1"]


def test_the_timeouts_of_each_are_those_of_its_model() -> None:
    found = resolution({"name": "chat"}, {"name": "large", "model": LARGE, "accelerators": 4, "copies": 0})
    chat, large = (found.decision.components[name] for name in ("chat", "large"))
    assert chat.startup < large.startup == found.decision.startup


def test_the_fit_of_each_and_the_sum() -> None:
    found = resolution({"name": "chat", "accelerators": 2}, {"name": "small", "model": SMALL, "memory_mb": 4096})
    assert found.sums is not None
    chat, small = found.sums.placed
    assert chat.fit is not None
    assert small.fit is not None
    assert (chat.fit.degree, small.fit.degree) == (2, 1)
    assert chat.fit.weights > small.fit.weights
    assert list(found.sums.rows())[:2] == [("accelerators", 3, 4), ("memory_mb", 1024 + 4096, 384 * 1024)]


def test_a_component_that_does_not_fit_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"component large: instance.type: ml.g6e.12xlarge: weights of .* of the GPU"):
        resolution({"name": "small", "model": SMALL}, {"name": "large", "model": LARGE})


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([{"name": "a", "accelerators": 3}, {"name": "b", "model": SMALL, "copies": 2}], "need 5 GPUs, but 1 x"),
        (
            [{"name": "a", "memory_mb": 300_000}, {"name": "b", "model": SMALL, "memory_mb": 200_000}],
            "need 500000 MB of memory",
        ),
        ([{"name": "a", "cpus": 40}, {"name": "b", "model": SMALL, "cpus": 9}], "need 49 CPU cores"),
    ],
)
def test_first_copies_without_room_together_are_refused(components: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolution(*components)
    said = resolution(*components, instance={**FOUR, "unchecked": True}).decision.warnings
    assert any(message.partition(",")[0] in one for one in said)


def test_copies_that_fit_in_sum_and_on_no_instance_are_told() -> None:
    """Two instances of four GPUs hold three and three, and then no pair is left on either."""
    three = {"name": "a", "accelerators": 3, "copies": 2, "options": {"tensor_parallel_degree": 1}}
    two = {"name": "b", "accelerators": 2, "model": SMALL}
    said = resolution(three, two, instance={**FOUR, "count": 2}).decision.warnings
    assert any("component b may not find an instance with enough free resources" in one for one in said)
    said = resolution({**three, "copies": 1}, two, instance={**FOUR, "count": 2}).decision.warnings
    assert not any("may not find an instance" in one for one in said)


def test_models_side_by_side_without_gpus_share_the_memory() -> None:
    cpu = {"options": {"llm_engine": "openvino"}, "instance": {"type": "ml.c7i.2xlarge"}}
    two = ({"name": "a", "model": SMALL, "memory_mb": 2048}, {"name": "b", "model": SMALL, "memory_mb": 512})
    found = resolution(*two, **cpu)
    assert found.sums is not None
    assert [name for name, _, _ in found.sums.rows()] == ["memory_mb", "cpus", "models"]
    assert any("component b: memory_mb is 512, but the model needs about" in one for one in found.decision.warnings)
    with pytest.raises(SpecError, match=r"the initial copies need .* GiB of memory for their models, but 1 x"):
        resolution(*({**one, "copies": 5} for one in two), **cpu)


def test_auto_takes_a_type_that_holds_all() -> None:
    alone = resolution({"name": "small", "model": SMALL}, instance={"type": "auto"}).decision.instance_type
    both = resolution(
        {"name": "small", "model": SMALL},
        {"name": "large", "model": LARGE, "accelerators": 4},
        instance={"type": "auto"},
    )
    assert both.sums is not None
    assert both.sums.instance is not None
    assert both.decision.instance_type != alone
    assert both.sums.instance.gpus >= 5
    assert all(item.fit is not None and item.fit.fits for item in both.sums.placed)
    with pytest.raises(DoesNotFit, match="has enough resources for the initial copies of all components"):
        resolution(
            {"name": "small", "model": SMALL, "copies": 5}, {"name": "large", "model": LARGE, "accelerators": 8},
            instance={"type": "auto"},
        )  # fmt: skip


def test_images_of_different_hosts_are_refused() -> None:
    image = {"repository": "lmi-handler", "tag": "x-cu128"}
    with pytest.raises(SpecError, match=r"components\[\].image: the images need different host AMIs \(component a: "):
        resolution({"name": "a"}, {"name": "b", "image": image}, image={"repository": "lmi-handler", "tag": "x-cu130"})


def test_a_wrong_option_is_told_with_its_component() -> None:
    found = resolution({"name": "a"}, {"name": "b", "options": {"dtype": "nonsense"}})
    whole = spec(
        model={**GIVEN["model"], "context": 8192},
        instance=FOUR,
        components=[{"name": "a"}, {"name": "b", "options": {"dtype": "nonsense"}}],
    )
    with pytest.raises(SpecError, match=r"^component b: options.dtype: "):
        resources(whole, found.decision)


def test_no_model_at_the_top_level_is_needed_where_each_has_its_own(tmp_path: Path) -> None:
    rest = {name: value for name, value in GIVEN.items() if name not in ("model", "image")}
    image = {"repository": "lmi-handler", "tag": "x-cu130"}
    both = [{"name": "a", "model": SMALL, "image": image}, {"name": "b", "model": LARGE, "image": image}]
    found = read(tmp_path, {**rest, "components": both})
    assert [server.model.id for server in servers(found)] == ["org/small", "org/large"]
    with pytest.raises(SpecError) as raised:
        read(tmp_path, {**rest, "components": [both[0], {"name": "b"}], "xyz": 1})
    for line in (
        "components.1.model: set exactly one of id, s3, path",
        "components.1.image: set exactly",
        "xyz: there is no",
    ):
        assert line in str(raised.value)
    with pytest.raises(SpecError, match="model: is required"):
        read(tmp_path, {**rest, "image": image, "components": [{"name": "b"}]})


def test_two_models_are_not_uploaded_to_one_place(tmp_path: Path) -> None:
    own = [{"name": name, "model": {"path": name, "upload": "s3://models/x/"}} for name in ("a", "b")]
    with pytest.raises(SpecError, match="a and b would both be uploaded to s3://models/x/"):
        read(tmp_path, {**GIVEN, "components": own})


def test_plan_shows_the_fit_of_each_and_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    own = [{"name": "chat", "accelerators": 2}, {"name": "small", "model": SMALL}]
    model = {**GIVEN["model"], "context": 8192}
    path.write_text(
        yaml.safe_dump({**GIVEN, "region": "us-east-1", "model": model, "instance": FOUR, "components": own})
    )
    assert main(["plan", str(path), "--offline"]) == 0
    said = capsys.readouterr().out
    assert (
        "The components' first copies on 1 x ml.g6e.12xlarge: 3 of 4 GPUs, 2048 of 393216 MB of memory: they fit."
        in said
    )
    assert "org/small" in said
    assert main(["plan", str(path), "--offline", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["components"]
    assert told["sums"]["accelerators"] == {"taken": 3, "of": 4}
    assert [one["fit"]["problem"] for one in told["placed"]] == ["", ""]


def test_the_plan_of_one_model_as_json_has_its_memory_and_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text(
        "name: chat\nregion: us-east-1\nrole: arn:aws:iam::123456789012:role/model\n"
        "image: {repository: lmi-handler}\nmodel: {id: Qwen/Qwen3-8B, context: 8192}\n"
        "instance: {type: ml.g6e.xlarge, price: 2.5}\n"
    )
    assert main(["plan", str(path), "--offline", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["price"] == {"usd_per_hour": 2.5, "exact": True}
    assert said["fit"]["problem"] == ""
    assert said["fit"]["kv_tokens"] > 8192
    assert said["fit"]["requests"] == said["fit"]["kv_tokens"] // 8192
