"""vLLM's module of its current engine, of which the metrics are here."""
