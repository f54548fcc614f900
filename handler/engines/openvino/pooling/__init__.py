"""Models that read whole texts on OpenVINO: embeddings, scores and classifications."""
