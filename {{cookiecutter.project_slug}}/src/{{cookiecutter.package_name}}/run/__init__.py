"""A run's directory, logs, metrics and callbacks, and the machine that it runs on."""
