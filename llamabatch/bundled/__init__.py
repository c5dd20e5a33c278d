"""Package data: the bundled model `tiny.gguf` and the prompts that `llamabatch compare` runs."""
