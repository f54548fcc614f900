"""The parts of `bench/engines.py`: an engine and the servers around it, compared."""
