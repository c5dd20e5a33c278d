"""Request bodies: reads and checks the fields that dialects have in common, and makes requests of them."""
