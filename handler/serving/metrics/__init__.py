"""Metrics of the server for Prometheus and CloudWatch, and the log line and trace of each request."""
