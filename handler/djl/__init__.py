"""DJL Serving's worker: the one place that knows djl_python and the Java side."""
