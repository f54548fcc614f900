"""The dialects, which parse requests and render responses. README.md explains how to add a dialect."""
