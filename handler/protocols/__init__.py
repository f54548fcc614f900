"""The dialects, which parse requests and render answers. README.md explains how to add a dialect."""
