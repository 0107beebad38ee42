"""What only a GPU can show; `make gpu` runs it, and with --smoke on a CPU."""
