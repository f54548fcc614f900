"""Images and audio in requests, which are fetched from allowed sources, checked, and decoded in separate processes."""
