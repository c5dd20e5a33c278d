"""Makes prompts from conversations, and splits generated text into thinking, answer and tool calls."""
