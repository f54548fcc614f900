"""Shared values, and basic modules such as errors, logging, framing and child processes."""
