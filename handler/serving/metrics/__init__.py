"""Metrics of a server for Prometheus and CloudWatch; the log line and the trace of each request."""
