"""Transcription of audio clips by OpenVINO GenAI's WhisperPipeline."""
