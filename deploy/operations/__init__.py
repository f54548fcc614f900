"""An endpoint that is there: how it is, what it wrote, how many of it."""
