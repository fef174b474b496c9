"""Finished rollouts out of one store and into another, as files."""
