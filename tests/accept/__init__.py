"""What can only be seen on machines that the tests do not have."""
