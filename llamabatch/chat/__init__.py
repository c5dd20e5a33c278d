"""Conversations: templates in, thinking and tool calls out."""
