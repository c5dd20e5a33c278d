"""Bodies: the fields that dialects have in common, read and checked, and the requests that they become."""
