"""vLLM's module of its current engine. Only the metrics exist here."""
