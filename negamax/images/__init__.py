"""Images of requests: sizes after resizing, and decoding in a process with limits."""
