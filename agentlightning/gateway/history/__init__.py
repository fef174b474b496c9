"""The exact tokens of an attempt: sessions, their restoring from the store, truncation of long prompts."""
