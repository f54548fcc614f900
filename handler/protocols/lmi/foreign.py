"""Names of LMI's `inputs` in bodies with `messages` or `prompt`: reported, where OpenAI's own routes refuse them.

vLLM drops what it does not know, and LMI's documented input formatters add `parameters` to every body.
"""

from __future__ import annotations

from handler.protocols.kernel.base import ParsedRequest
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import Table
from handler.protocols.openai.parameters import FOREIGN

_NOTICE = (
    "{} has no effect in bodies with messages or prompt, as in LMI: their parameters stand at the top level under "
    "vLLM's names. The header x-lmi-ignored-parameters names it (documents: wire/openai)"
)


def without_foreign(table: Table) -> Table:
    """Return the table without the names that OpenAI's routes refuse; they become unknown ones."""
    return Table({name: one for name, one in table.parameters.items() if name not in FOREIGN}, table.prefix)


def noting_foreign(request: ParsedRequest, context: ServerContext) -> ParsedRequest:
    """Return the request; the log says once of each such name that it was ignored."""
    for name in FOREIGN.keys() & {*request.ignored}:
        context.notices.once(_NOTICE.format(name))
    return request
