"""Helpers that do not depend on inference, such as checks, lifetimes, formats and files. They import only `errors`."""
