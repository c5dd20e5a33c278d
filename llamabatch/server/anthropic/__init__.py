"""Anthropic's API: /v1/messages, which programs for Claude speak."""
