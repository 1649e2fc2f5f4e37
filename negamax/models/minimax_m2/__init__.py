"""MiniMax-M2 (also M2.1, M2.5, M2.7)."""
