"""The dialects. README.md next to this file says how to add one."""
