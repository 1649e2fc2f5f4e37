"""`negamax route`: one address in front of several servers.

The router sends a request to the server that has received most of its prompt before, by the rule
that chooses a replica of a server. It recognizes a prompt by hashes of pieces of its JSON text.
The router does not use the servers' KV events, because events name blocks of tokens: the router
would have to render and tokenize each prompt a second time. Hashes need no tokenizer, no second
connection to each server and no setting, and work in front of any server. If a server has evicted a
prompt, or has computed a prompt for another router, a server computes the prompt again.
"""
