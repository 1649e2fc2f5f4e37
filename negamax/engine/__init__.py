"""The step loop, the processes around it, and its embedded and asynchronous clients."""
