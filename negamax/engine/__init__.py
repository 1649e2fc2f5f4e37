"""The step loop, the processes around it, and the two ways to talk to it (embedded LLM, async
client).
"""
