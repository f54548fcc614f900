"""Calls with anthropic's message batches; the client checks every response against its types."""

from __future__ import annotations

import time
from typing import Any

from anthropic import Anthropic
from common import main


class MessageBatches:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        """Run a batch of `requests` to its end, and delete it.

        Args:
            options: `requests`; `beta` for the client of betas; `cancels` to cancel the batch first.

        Returns:
            The batch as it is created and when it has ended, and its results by custom_id.
        """
        settings = {"api_key": "ann", "timeout": 100, "max_retries": 0, "_strict_response_validation": True}
        with Anthropic(base_url=url, **settings) as client:
            batches = client.beta.messages.batches if options.get("beta") else client.messages.batches
            created = batches.create(requests=options["requests"])
            if options.get("cancels"):
                assert batches.cancel(created.id).processing_status in ("canceling", "ended")
            while (batch := batches.retrieve(created.id)).processing_status != "ended":
                time.sleep(0.05)
            other = batches.create(requests=options["requests"][:1])
            assert [listed.id for listed in batches.list(limit=1)][:2] == [other.id, batch.id], "it asks for each page"
            results = {line.custom_id: line.result.model_dump() for line in batches.results(batch.id)}
            deleted = batches.delete(batch.id)
            assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
            states = {"created": created.model_dump(mode="json"), "batch": batch.model_dump(mode="json")}
            return {**states, "results": results}


main(MessageBatches())
