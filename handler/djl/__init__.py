"""DJL Serving's Python worker. Only this package depends on djl_python and the Java side."""
