"""vLLM's module of LoRA adapters."""
