"""Of the stages of the workflow, and of their order and report."""
