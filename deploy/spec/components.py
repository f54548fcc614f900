"""Components with a model, an image, options or variables of their own: the servers that a specification has.

A server is what one model in AWS describes. Components with the same one share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.spec.sections import Component

if TYPE_CHECKING:
    from deploy.spec import Spec

Value = TypeVar("Value")

_OWN = ("model", "image")
"""Parts that a component may have in place of the top level's, and that each component needs."""


def servers(spec: Spec) -> list[Spec]:
    """Return a specification for each server: the whole without components, else one of those that share it.

    What a component has of its own lies over the top level in it, and `components` has only those of this server.
    """
    if not spec.components:
        return [spec]
    found: dict[str, list[Component]] = {}
    whole: dict[str, Spec] = {}
    for item in spec.components:
        own = _server(spec, item)
        parts = own.model_dump_json(include={"model", "image", "options", "environment"})
        key = f"{item.accelerators} {parts}"
        whole.setdefault(key, own)
        found.setdefault(key, []).append(item)
    return [server.model_copy(update={"components": tuple(found[key])}) for key, server in whole.items()]


def uploads(spec: Spec) -> list[str]:
    """Return the S3 prefixes that models are uploaded to, each once."""
    found = [server.model.upload for server in servers(spec)]
    return list(dict.fromkeys(prefix for prefix in found if prefix is not None))


def title(server: Spec) -> str:
    """Return the names of a server's components, e.g. `component chat` or `components chat, batch`."""
    names = [item.name for item in server.components]
    return f"component{'s' * (len(names) > 1)} {', '.join(names)}"


def with_parts_of_components(content: Any) -> Any:
    """Return a file's content with a model and an image at the top level, where only the components have them.

    Those are the first component's, and no component takes them: one without gets an empty part, which is refused in
    its place like any other.
    """
    items = content.get("components") if isinstance(content, Mapping) else None
    if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
        return content
    for part in _OWN:
        own = [item[part] for item in items if item.get(part) is not None]
        if content.get(part) is None and own:
            items = [item if item.get(part) is not None else {**item, part: {}} for item in items]
            content = {**content, part: own[0], "components": items}
    return content


def component_contradictions(spec: Spec) -> Iterator[str]:
    """Say what is wrong between the components."""
    names = [component.name for component in spec.components]
    names += [adapter.name for component in spec.components for adapter in component.adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        yield f"components: {', '.join(sorted(twice))} is given twice"
    places: dict[str, str] = {}
    for model in [server.model for server in servers(spec)]:
        if model.path is None or model.upload is None or places.setdefault(model.upload, model.path) == model.path:
            continue
        yield (
            f"components[].model.upload: {places[model.upload]} and {model.path} would both be uploaded to "
            f"{model.upload}; give each a prefix of its own"
        )


def _server(spec: Spec, item: Component) -> Spec:
    return spec.model_copy(
        update={
            "model": item.model or spec.model,
            "image": item.image or spec.image,
            "options": _laid_over(spec.options, item.options),
            "environment": _laid_over(spec.environment, item.environment),
        }
    )


def _laid_over(whole: Mapping[str, Value], own: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in {**whole, **own}.items() if value is not None}
