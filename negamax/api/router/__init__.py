"""`negamax route`: one address in front of several servers.

The router sends a request to the server that has received the longest prefix of the prompt before.
A server selects a replica by the longest prefix, too. The router identifies a prompt by hashes of
the prompt's JSON text. The router does not use the servers' KV events, because the events describe
tokens, and the router has no tokenizer. Text hashes need no second connection and no setting, and
work with any server. If a server has evicted a prompt, the server computes the prompt again.
"""
