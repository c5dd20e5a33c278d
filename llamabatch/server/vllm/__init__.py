"""vLLM's endpoints: ranks, scores and classes, tokens, the state of a server, and adapters."""
