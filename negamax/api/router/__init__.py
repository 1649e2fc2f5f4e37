"""`negamax route`: one address in front of several servers.

The router sends a request to the server that has received most of its prompt before. The rule is
the same as for the replicas of one server. The router recognizes a prompt by hashes of its JSON
text. It does not use the servers' KV events, because events describe blocks of tokens: the router
would have to render and tokenize each prompt. Text hashes need no tokenizer, no second connection
and no setting, and work with any server. The router does not see evictions, or prompts that other
routers sent. A server then computes a prompt that it or another server had already computed.
"""
