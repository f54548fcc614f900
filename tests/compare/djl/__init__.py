"""A comparison of handlers in the DJL Serving worker, and the model.py of each handler except ours."""
