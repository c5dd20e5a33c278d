"""OpenAI's endpoints: chats, completions, responses, embeddings, models, files and batches."""
