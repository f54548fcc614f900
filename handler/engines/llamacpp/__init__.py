"""An engine that uses llama.cpp's llama-server through its own API, whose requests and responses contain token ids."""
