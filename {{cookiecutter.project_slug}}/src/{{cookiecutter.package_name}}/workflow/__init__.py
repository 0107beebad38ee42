"""The engineering workflow as commands, each closed by a gate that measures the project's loop."""
