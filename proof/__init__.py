"""Tools to test a server through its APIs: replays of recorded requests, conformance tests, and load tests."""
