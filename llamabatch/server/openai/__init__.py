"""OpenAI's endpoints: chats, completions, responses, embeddings, transcriptions, models, files and batches."""
