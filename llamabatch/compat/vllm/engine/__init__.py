"""vLLM's module of the engine and its options."""
