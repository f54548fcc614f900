"""The parts of `bench/djl_step.py`: handlers under DJL Serving, compared."""
