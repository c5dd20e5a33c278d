"""Request bodies: reads and checks the fields that several dialects share, and makes engine requests from bodies."""
