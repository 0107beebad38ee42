"""Processes that train together: joining, agreeing, stopping, noticing hangs."""
