"""Models with audio and random weights, for the tests of every engine that takes audio clips."""
