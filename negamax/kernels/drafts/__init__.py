"""Steps that verify draft tokens: what they run, and how many drafts are right."""
