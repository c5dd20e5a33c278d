"""llamabatch: continuous batching for GGUF models, in process, from Python."""

__version__ = "0.1.0"
