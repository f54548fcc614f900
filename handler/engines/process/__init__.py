"""Engines in their own processes, and the code in the host that starts and controls them."""
