"""Two agents with a policy each, on one base, and the base itself beside them."""
