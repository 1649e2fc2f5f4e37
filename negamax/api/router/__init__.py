"""`negamax route`: one address in front of several servers.

The router prefers the server whose caches contain the longest prefix of the prompt. Each server
selects one of its replicas by the same rule. The router has two sources of cached prefixes:

- Hashes of the JSON text that the router has sent. They work with any server, but do not show which
  blocks a server has evicted.
- KV events, which contain hashes of blocks of tokens. The router has no tokenizer, so it asks one
  server for the block hashes of a prompt. That server renders the prompt and includes the tenant
  and the salt in the hashes, so the router needs no rules for dialects and tenants.
"""
