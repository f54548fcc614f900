"""An engine in a process of its own, and the host's end of it."""
