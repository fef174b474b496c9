"""verl as the learner: `make test-verl`."""
