"""Records in parses.json how the parser of llama-server reads our texts."""
