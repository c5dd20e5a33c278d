"""Responses: outputs as JSON, whole or as a stream of events."""
