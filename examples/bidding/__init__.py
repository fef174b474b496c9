"""A bidding game of several rounds: against rivals that play by a rule, and against earlier selves."""
