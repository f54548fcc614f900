"""Log-probabilities of prompts, which OpenVINO GenAI's continuous batching does not report as asked."""
