"""The version of llamabatch. hatchling reads it from this file."""

__version__ = "0.1.0"
