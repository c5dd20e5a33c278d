"""vLLM's API: reranking, scores, classification, tokens, the state of a server, and adapters."""
