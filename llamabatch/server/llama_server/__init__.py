"""llama-server's endpoints: /completion, /infill, /embedding, /apply-template, /slots, /props and /lora-adapters."""
