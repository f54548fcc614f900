"""Ask for a long response in the background, in a conversation that the server keeps.

    lmi serve -o option.responses_store=responses            # answers and conversations survive a restart
    python background.py "Write a report about bridges."     # prints the ids of the conversation and the response
    python background.py --read resp_…                       # the same response again, from its beginning
    python background.py "Make it shorter." --conversation conv_…
    python background.py --cancel resp_…

Ctrl-C and lost connections do not stop the response. After a lost connection, the program prints what it missed.
LMI_URL is another server, LMI_API_KEY its key. Needs: pip install httpx
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import httpx

BUSY = (429, 502, 503, 504)
ATTEMPTS = 8


def checked(response: httpx.Response) -> httpx.Response:
    """Return a successful response; raise SystemExit with the server's words for any other."""
    if response.is_error:
        raise SystemExit(f"{response.url}: {response.status_code} {response.read().decode()}")
    return response


def question(client: httpx.Client, text: str, conversation: str | None, max_tokens: int | None) -> httpx.Request:
    """Return the request for a response, in a new conversation unless one is given."""
    conversation = conversation or checked(client.post("/v1/conversations")).json()["id"]
    print(f"conversation {conversation}", file=sys.stderr)
    body = {
        "input": text,
        "conversation": conversation,
        "background": True,
        "stream": True,
        "max_output_tokens": max_tokens,
        "context_management": [{"type": "compaction"}],  # for a conversation that becomes too long for the model
    }
    return client.build_request("POST", "/v1/responses", json=body)


def events(client: httpx.Client, id: str, after: int | None = None) -> httpx.Request:
    """Return the request for the events of a response, all of them or those that follow the one with this number."""
    query: dict[str, str | int] = {"stream": "true"} if after is None else {"stream": "true", "starting_after": after}
    return client.build_request("GET", f"/v1/responses/{id}", params=query)


def show(client: httpx.Client, request: httpx.Request, id: str = "") -> dict[str, Any]:
    """Print the text of a response while it is generated, over as many connections as needed; return the response."""
    last, failures = None, 0
    while True:
        try:
            response = client.send(request, stream=True)
            if response.status_code in BUSY and last is not None:
                raise httpx.TransportError(f"{response.status_code} {response.read().decode()}")
            for line in checked(response).iter_lines():
                if not line.startswith("data:"):  # the event's name, or a comment that keeps the connection open
                    continue
                event = json.loads(line.removeprefix("data:"))
                last, failures = event["sequence_number"], 0
                if event["type"] == "response.created" and not id:
                    id = event["response"]["id"]
                    print(f"response {id}", file=sys.stderr)
                if event["type"] == "response.output_text.delta":
                    print(event["delta"], end="", flush=True)
            return dict(checked(client.get(f"/v1/responses/{id}")).json())  # a cancelled one has no last event
        except httpx.TransportError as error:
            failures += 1
            if last is None or failures == ATTEMPTS:
                raise
            print(f"\n{error!r}", file=sys.stderr)
        time.sleep(2 ** (failures - 1))
        request = events(client, id, last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("question", nargs="?", help="what to ask")
    which.add_argument("--read", metavar="ID", help="a response to print, from its beginning")
    which.add_argument("--cancel", metavar="ID", help="a response to cancel")
    parser.add_argument("--conversation", metavar="ID", help="the conversation to continue (default: a new one)")
    parser.add_argument("--max-tokens", type=int, help="of the response (default: the rest of the model's context)")
    arguments = parser.parse_args()
    url, key = os.environ.get("LMI_URL", "http://127.0.0.1:8080"), os.environ.get("LMI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        if arguments.cancel:
            found = checked(client.post(f"/v1/responses/{arguments.cancel}/cancel")).json()
        elif arguments.read:
            found = show(client, events(client, arguments.read), arguments.read)
        else:
            asked = question(client, arguments.question, arguments.conversation, arguments.max_tokens)
            found = show(client, asked)
    print()
    print(found["error"]["message"] if found.get("error") else found["status"], file=sys.stderr)
    return int(found["status"] not in ("completed", "incomplete") and not arguments.cancel)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except httpx.RequestError as error:
        sys.exit(f"{error.request.url}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
