"""The page at /: chats, the live batch, prompts one by one compared with all at once, batches. It needs no build."""
