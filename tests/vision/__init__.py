"""Vision models with random weights, for the tests of every engine that takes images."""
