"""The engine process: the loop, and the executors that run its plans."""
