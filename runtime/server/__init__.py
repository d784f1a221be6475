"""The OpenAI-compatible server. It adds nothing to generation: bodies become requests, events become chunks."""
