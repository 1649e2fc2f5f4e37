"""Parser that splits generated text into reasoning, content and tool calls."""
