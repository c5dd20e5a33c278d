"""The state of a server: health, metrics, its slots at work."""
