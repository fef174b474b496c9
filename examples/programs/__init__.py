"""Programs as agents: Python, Node and shell, unchanged; see README.md."""
