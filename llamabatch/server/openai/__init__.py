"""OpenAI's API: chats, completions, responses, embeddings, transcriptions, models, files and batches."""
