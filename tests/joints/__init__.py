"""Two halves that are each right alone, joined: what one writes, the other must read."""
