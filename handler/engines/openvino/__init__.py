"""The engine that runs models on CPUs with OpenVINO GenAI."""
