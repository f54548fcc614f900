"""A comparison of handlers in DJL Serving's worker, and the model.py of each handler except ours."""
