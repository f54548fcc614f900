"""`lmi deploy schema`: print the specification's JSON schema."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deploy.spec.reading import schema


def add(commands: Any) -> None:
    commands.add_parser("schema", help="print the specification's JSON schema").set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    print(json.dumps(schema(), indent=2))
    return 0
