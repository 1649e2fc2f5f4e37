"""`negamax route`: one address in front of several servers.

The router sends a request to the server that has received most of its prompt before. The same rule
selects a replica of one server. The router recognizes a prompt by hashes of its JSON text. The
router does not use the servers' KV events, because events describe blocks of tokens: the router
would have to render and tokenize each prompt. Text hashes need no tokenizer, no second connection
and no setting, and work with any server. If a server has evicted a prompt, or if another router
has sent the prompt to another server, the prompt is computed again.
"""
