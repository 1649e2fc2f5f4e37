"""`negamax route`: one address in front of several servers.

The router sends a request to the server whose caches contain the longest prefix of the prompt. A
server selects a replica by the longest prefix, too. The router has two sources of prefixes:

- Hashes of the JSON text that the router sent, which work with any server but miss evictions.
- KV events, which contain hashes of blocks of tokens. The router has no tokenizer, so it asks one
  server for the block hashes of a prompt. The server renders the prompt and includes the tenant and
  the salt in the hashes, so the router needs no rules for dialects and tenants.
"""
