"""The engine process: a loop plans the steps of the model, and an executor runs the plans."""
