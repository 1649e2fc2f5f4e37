"""MiniMax-M3, the text model: block-sparse attention and experts, one of which all tokens share."""
