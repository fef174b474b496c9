"""The commands, as they stand together in the help."""
