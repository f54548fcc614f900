"""An engine and the servers around it, measured side by side; `bench/engines.py` is the command."""
