"""Read a streamed answer: bytes to values, values to events."""
