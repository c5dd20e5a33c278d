"""Every architecture that llama.cpp can write: small models with random weights, and what holds for each of them."""
