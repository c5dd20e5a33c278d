"""The page at /: chats, the live batch, a comparison of alone and in company, batches. Plain files, without a build."""
