"""llama-server's API: /completion, /infill, /embedding, /apply-template, /slots, /props and /lora-adapters."""
