"""The store for other processes: its server, the client that speaks to it, and what goes over the wire between them."""
