"""Commands that take an endpoint's name."""
