"""Resolution of the settings that a specification leaves open: instance type, image, host AMI and timeouts."""
