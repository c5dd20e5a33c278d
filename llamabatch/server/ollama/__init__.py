"""ollama's API: chats, completions, embeddings and the model. Imports `response`, `request`, `serving`, `http`."""
