"""The server: OpenAI's, llama-server's and vLLM's HTTP endpoints over one loaded model. Needs llamabatch[server]."""
