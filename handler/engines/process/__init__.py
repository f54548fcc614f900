"""Engines in processes of their own, and the host's side, which starts and controls them."""
