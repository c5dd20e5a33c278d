"""The web page at /. It shows chats, the running requests, and batch jobs. It also compares prompts sent one by one
with prompts sent all at once. The files of the page need no build."""
