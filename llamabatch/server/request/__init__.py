"""Request bodies: reads and checks the common fields of several dialects, and makes engine requests from bodies."""
