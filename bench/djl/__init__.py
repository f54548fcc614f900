"""The handler under DJL Serving against the least and against upstream's: what `bench/djl_step.py` is made of."""
