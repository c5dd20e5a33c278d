"""Anthropic's API: /v1/messages, for programs written for Claude."""
