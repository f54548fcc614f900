"""Calls with openai's files and batches; the client checks every answer against its types."""

from __future__ import annotations

import time
from typing import Any

from common import main
from openai import OpenAI


class Batches:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        """Upload `prompt` and begin a batch of it; with `begun`, its id, wait for its end instead.

        Returns the batch, and by purpose the files' contents as they are downloaded.
        """
        settings = {"api_key": "ann", "timeout": 100, "max_retries": 0, "_strict_response_validation": True}
        with OpenAI(base_url=f"{url}/v1", **settings) as client:
            if "begun" not in options:
                expiry = {"anchor": "created_at", "seconds": 3600}
                file = client.files.create(file=("a.jsonl", prompt.encode()), purpose="batch", expires_after=expiry)
                assert file.expires_at == file.created_at + 3600
                batch = client.batches.create(input_file_id=file.id, output_expires_after=expiry, **options)
                return {"batch": batch.model_dump()}
            while (batch := client.batches.retrieve(options["begun"])).status not in ("completed", "failed"):
                time.sleep(0.05)
            assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
            ids = [batch.input_file_id, batch.output_file_id, batch.error_file_id]
            listed = [one.id for one in client.files.list(limit=1, order="asc")]
            assert listed == ids, "the client goes on from page to page"
            texts = [client.files.content(id).text for id in ids if id is not None]
            deleted = [client.files.delete(id).deleted for id in ids if id is not None]
            return {"batch": batch.model_dump(), "texts": texts, "deleted": deleted}


main(Batches())
