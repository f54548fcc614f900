"""Route messages by three decisions about each message.

    lmi serve
    python router.py < messages.txt

Each line of stdin is a message. The server reads it once for all three questions, and generates no text.
LMI_URL is the server's address (default: http://127.0.0.1:8080), LMI_API_KEY its key. Needs: pip install httpx
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import httpx

QUESTIONS: dict[str, Any] = {
    "complaint": {"type": "noul", "instructions": "Does the customer complain about something?"},
    "team": {
        "type": "choice",
        "instructions": "Which team should answer?",
        "criteria": {
            "billing": "invoices, prices and refunds",
            "technical": "errors, setup and outages",
            "sales": "new orders and questions about products",
        },
    },
    "urgency": {
        "type": "score",
        "instructions": "How soon does the customer need an answer?",
        "criteria": ["whenever there is time", "this week", "today", "at once"],
    },
}
MIN_CONFIDENCE = 0.3  # below it, a person decides


def decide(client: httpx.Client, message: str) -> dict[str, Any]:
    """Return the decision on each question about a message."""
    response = client.post("/v1/systemone", json={"state": message, "questions": QUESTIONS})
    if not response.is_success:
        raise SystemExit(f"{response.url}: {response.status_code} {response.text}")
    answers: dict[str, Any] = response.json()["answers"]
    return answers


def route(answers: dict[str, Any]) -> str:
    """Return where a message goes, from the decisions on it."""
    team = answers["team"]
    queue = team["choice"] if team["confidence"] >= MIN_CONFIDENCE else "a person"
    urgent = answers["urgency"]["score"] >= 2.5 or answers["complaint"]["noul"] >= 0.9
    return f"{queue}, first in the queue" if urgent else queue


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    key = os.environ.get("LMI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = os.environ.get("LMI_URL", "http://127.0.0.1:8080")
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        for line in sys.stdin:
            if message := line.strip():
                print(f"{route(decide(client, message))}: {message}")


if __name__ == "__main__":
    main()
