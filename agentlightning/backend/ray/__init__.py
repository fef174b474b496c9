"""Ray: the processes of a backend, and runners, placed on the machines of a cluster. Imports `ray` where it is used."""
