"""`negamax route`: one address in front of several servers.

It places a request where most of its prompt was sent before, by the rule that places requests on
the replicas of one server. It recognizes a prompt by hashes of pieces of its JSON text, not by the
servers' KV events: events name blocks of tokens, so a router that reads them has to render and
tokenize each prompt a second time. Its own record needs no tokenizer, no second connection to each
server and no setting, and works in front of any server. It is wrong where a server has evicted a
prompt, or computed it for another router: then a prompt is computed again.
"""
