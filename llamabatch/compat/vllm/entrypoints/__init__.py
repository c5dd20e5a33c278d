"""vLLM's module of the LLM class."""
