"""Renew deploy/data/models.json from the hub, and say what changed: `python -m tests.tools.models [NAME ...]`.

The hub's files are read as `lmi deploy plan` reads them: config.json, and the headers of the weights. Each row is asked
for by its first name; what the hub does not give stays as it is. A NAME that the table lacks gets a row.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.resolve.model.files import Hub, HubError, json_file
from deploy.resolve.model.shape import config_of, read_shape

FILE = Path(__file__).parents[2] / "deploy" / "data" / "models.json"

Row = dict[str, Any]


def read(hub: Hub, name: str) -> tuple[int, dict[str, Any]]:
    """Return a model's number of weights, and its config.json with the text part's fields at the top.

    Raises:
        HubError: the hub does not give them.
    """
    files = hub.files(name)
    config, shape = json_file(files, "config.json"), read_shape(files)
    if config is None or shape is None:
        raise HubError(f"{name} has no config.json")
    return int(shape.parameters), {**config, **config.get("text_config", {})}


def renewed(row: Row, rows: list[Row], found: tuple[int, Mapping[str, Any]]) -> Row:
    """Return a row with the hub's numbers; how its weights are quantized stays as it is written here."""
    parameters, config = found
    listed = config_of(row, rows)
    scalar = {key: value for key, value in listed.items() if not isinstance(value, dict) and key != "model_type"}
    changed = {key: config[key] for key in scalar if key in config and config[key] != scalar[key]}
    return {**row, "parameters": parameters, "config": {**row["config"], **changed}}


def added(name: str, rows: Sequence[Row], found: tuple[int, Mapping[str, Any]]) -> Row:
    """Return a new row, with the fields that other rows have."""
    parameters, config = found
    fields = dict.fromkeys(key for row in rows for key in row["config"])
    kept = {key: config[key] for key in fields if key in config}
    return {"names": [name], "parameters": parameters, "source": "the hub", "config": kept}


def renew(rows: list[Row], names: Sequence[str], hub: Hub) -> Iterator[str]:
    """Change the rows in place; yield a line for each that changes, comes, or cannot be read."""
    for place, row in enumerate(rows):
        name = row["names"][0]
        try:
            new = renewed(row, rows, read(hub, name))
        except HubError as error:
            yield f"as it was {name}: {error}"
            continue
        if new != row:
            rows[place] = new
            before, after = ({**one["config"], "parameters": one["parameters"]} for one in (row, new))
            changes = (f"{key} {before.get(key)} -> {after[key]}" for key in after if before.get(key) != after[key])
            yield f"changed   {name}: {', '.join(changes)}"
    known = {name for row in rows for name in row["names"]}
    for name in names:
        if name not in known:
            rows.append(added(name, rows, read(hub, name)))
            yield f"new       {name}"


def render(content: Mapping[str, Any]) -> str:
    """Return the file's content: a line for each row."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["models"])
    head = "".join(f' "{key}": {json.dumps(content[key])},\n' for key in ("read", "source"))
    return f'{{\n{head} "models": [\n{rows}\n ]\n}}\n'


def main() -> None:
    content = json.loads(FILE.read_text())
    print("\n".join(renew(content["models"], sys.argv[1:], Hub())) or "nothing new")
    FILE.write_text(render({**content, "read": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"}))


if __name__ == "__main__":
    main()
