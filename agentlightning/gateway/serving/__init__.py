"""The gateway over HTTP: attribution, streams, disconnects, anonymous access."""
