"""vLLM's own tests as a corpus: answers in them, and what vLLM's parsers make of each."""
