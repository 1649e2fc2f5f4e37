"""MiniMax-M3: block-sparse attention, routed experts, a shared expert and a vision tower."""
