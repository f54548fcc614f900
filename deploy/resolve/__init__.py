"""Resolve the settings that a specification does not set: instance type, image, host AMI and timeouts."""
