"""SGLang's servers, used by their own API instead of OpenAI's, which returns no token ids there."""
