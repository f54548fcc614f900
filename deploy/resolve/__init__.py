"""What a specification leaves open, decided: instance, image, host, times; and what that is decided by."""
