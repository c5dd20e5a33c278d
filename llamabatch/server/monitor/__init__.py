"""The state of a server: health, metrics, and live figures of its slots."""
