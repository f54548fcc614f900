"""`lmi deploy status NAME`: print an endpoint's status; exit status 0 only if it serves."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deploy.aws import Aws
from deploy.cli.arguments import add_endpoint
from deploy.cli.console import out
from deploy.cli.views.status import as_json, view
from deploy.operations.status import look

_NOT_SERVING = 5


def add(commands: Any) -> None:
    parser = commands.add_parser("status", help="print an endpoint's status")
    add_endpoint(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    status = look(Aws(arguments.region), arguments.name)
    if arguments.json:
        print(json.dumps(as_json(status), indent=2))
    else:
        out().print(view(status))
    return 0 if status.serving else _NOT_SERVING
