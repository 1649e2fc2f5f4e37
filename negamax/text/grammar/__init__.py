"""What the engine enforces on an output, in the form that the grammar compiler takes."""
