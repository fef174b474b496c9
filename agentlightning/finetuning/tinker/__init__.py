"""The API of the `tinker` client on models of one's own: its sessions, training and sampling clients, and checkpoints.

`docs/tinker.md` has a table of its routes and fields.
"""
