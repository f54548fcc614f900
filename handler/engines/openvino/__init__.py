"""OpenVINO GenAI, on CPUs."""
