"""A request: the phases of its life, its holdings, its dynamic batch, and the bytes of its response."""
