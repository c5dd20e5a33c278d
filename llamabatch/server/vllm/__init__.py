"""vLLM's own endpoints: /load, /version, /ping, /reset_prefix_cache, and loading adapters."""
