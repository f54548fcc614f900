"""A request: its phases, the resources that it holds, its dynamic batch, and the bytes of its response."""
