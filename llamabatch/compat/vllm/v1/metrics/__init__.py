"""vLLM's module of metrics."""
