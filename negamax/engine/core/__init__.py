"""The engine process: the step loop and the executors that run its plans."""
