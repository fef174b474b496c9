"""Features of training runs, one a file: a record of settings with the hooks that it needs (see `algorithm.part`)."""
