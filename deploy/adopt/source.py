"""What is read of an endpoint, from AWS or from a file, before it becomes a specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.errors import Refused
from deploy.resources.resource import Json, containers


@dataclass(frozen=True)
class Source:
    """An endpoint's parts, each in the fields of AWS's descriptions.

    Attributes:
        name: of the endpoint; "" where a file names none.
        origin: a few words for the specification's first line.
        region: "" where it is not known.
        endpoint: DescribeEndpoint's answer; empty where there is no endpoint.
        config: DescribeEndpointConfig's, or what CreateEndpointConfig takes.
        models: DescribeModel's answers, or what CreateModel takes, by the model's name; "" is the only one of a file.
        components: DescribeInferenceComponent's answers.
        targets, policies: Application Auto Scaling's.
        tags: the endpoint's.
    """

    name: str
    origin: str
    region: str = ""
    endpoint: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    models: Mapping[str, Json] = field(default_factory=dict)
    components: Sequence[Json] = ()
    targets: Sequence[Json] = ()
    policies: Sequence[Json] = ()
    tags: Mapping[str, str] = field(default_factory=dict)

    def model(self, name: str) -> Json:
        """Return a model by its name, or the only one."""
        found = self.models.get(name) or (next(iter(self.models.values())) if len(self.models) == 1 else None)
        if found is None:
            raise Refused(f"the model {name} was not found", "It was deleted: give its CreateModel as a file (--file).")
        return found


def container_of(model: Json, name: str) -> dict[str, Any]:
    """Return the only container of a model.

    Raises:
        Refused: it has several, many models in one, or one that cannot be read.
    """
    found = containers(model)
    whose = f"model {name}" if name else "the model"
    if len(found) != 1:
        raise Refused(
            f"{whose} has {len(found)} containers, and lmi deploy serves one",
            "Adopt an endpoint of one container; a pipeline's other steps stay where they are.",
        )
    (container,) = found
    if container.get("Mode") == "MultiModel" or container.get("MultiModelConfig"):
        raise Refused(
            f"{whose} is a multi-model endpoint's: its container loads many models by name",
            "Give each model a component (components:), or serve LoRA adapters (documents: adapters).",
        )
    if (package := container.get("ModelPackageName")) is not None and not container.get("Image"):
        raise Refused(
            f"{whose} is the model package {package}, whose container and weights are in the package",
            "Write the package's description to a file, `aws sagemaker describe-model-package`, and give it by --file.",
        )
    return dict(container)
