"""Functions in user code that process requests: AWS's variables for their names, and `handle` in model.py.

`imports` lists the imports of this code without running it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from enum import Enum

HANDLERS = "write functions with @input_formatter and @output_formatter (from handler.formatters) in model.py"
MIDDLEWARE = "write a function with @input_formatter or @output_formatter (from handler.formatters) in model.py"
PING = "omit it: /ping returns 200 while the engine can serve requests, otherwise 503"
THROTTLE = "SERVING_JOB_QUEUE_SIZE limits the number of waiting requests; others get 503 (429 or 529 in some APIs)"

SCRIPT = "CUSTOM_SCRIPT_FILENAME"
VARIABLES = {
    "invoke": "CUSTOM_FASTAPI_INVOCATION_HANDLER",
    "ping": "CUSTOM_FASTAPI_PING_HANDLER",
    "throttle": "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE",
    "pre_post_process": "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "pre": "CUSTOM_PRE_PROCESS",
    "post": "CUSTOM_POST_PROCESS",
}
"""Maps the purpose of a user function to the environment variable that contains the name of the function."""

INSTEAD = {
    SCRIPT: "name the file model.py",
    VARIABLES["invoke"]: HANDLERS,
    VARIABLES["ping"]: PING,
    VARIABLES["throttle"]: THROTTLE,
    **dict.fromkeys((VARIABLES["pre_post_process"], VARIABLES["pre"], VARIABLES["post"]), MIDDLEWARE),
}
"""Maps each of these variables to what the user should do instead."""


class Role(Enum):
    """Role of the function `handle` in a model.py for an embedded server."""

    NONE = "not called"
    ALONE = "answers the requests on its routes; no engine is loaded"
    ENTRY = "answers the requests on its routes, and uses the engine by calling LMI's handler"
    FIRST = "is called first; requests for which it returns None go to the engine"


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the module and the name of each import. The name is "" if the module itself is imported."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)
