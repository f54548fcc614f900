"""Make the Hugging Face directory of the demo model, before the first test that wants it: its time is no test's own."""

from __future__ import annotations

from handler.engines.huggingface.files import prepare_checkpoint

if __name__ == "__main__":
    print(f"the demo model's checkpoint: {prepare_checkpoint('demo')}")
