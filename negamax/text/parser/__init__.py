"""From generated text to reasoning, content and tool calls."""
