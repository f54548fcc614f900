"""The routes of llama.cpp's llama-server for tokens and chat templates."""
