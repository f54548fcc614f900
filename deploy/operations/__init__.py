"""Operate an existing endpoint: status, logs, scaling, measurements."""
