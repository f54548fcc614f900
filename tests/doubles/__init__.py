"""Stand-ins for packages that cannot run here. This directory on `sys.path` is what makes them importable."""
