"""An advantage and a loss of one's own."""
