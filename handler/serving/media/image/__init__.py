"""Images: sizes by their files' headers, and decoding."""
