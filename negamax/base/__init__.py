"""Code that all other packages use: errors, logging, environment, child processes."""
