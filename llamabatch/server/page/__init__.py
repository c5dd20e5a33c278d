"""The web page at /. It shows chats, the live batch, batches, and a comparison of prompts sent one by one with prompts
sent all at once. Its files need no build."""
