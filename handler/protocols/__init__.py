"""The dialects. README.md beside this file says how to add one."""
