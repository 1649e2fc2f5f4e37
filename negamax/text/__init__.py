"""Text in, text out: tokenizer, chat template, detokenizer and the parser of model output. No
torch, no engine code.
"""
