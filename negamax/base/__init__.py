"""Code that all other rooms use: errors, logging, environment, child processes."""
