"""llama-server's own endpoints: /completion, /slots, /props, /lora-adapters, /infill and /embedding."""
