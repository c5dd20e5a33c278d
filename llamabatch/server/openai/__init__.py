"""OpenAI's endpoints, and those that other servers have beside them."""
