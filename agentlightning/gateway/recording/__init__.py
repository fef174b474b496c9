"""Calls as spans, and the task that writes them to the store."""
