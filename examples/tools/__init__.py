"""The small models of the applications: one script makes each of them from that application's demonstrations."""
