"""Scripts that run in interpreters of other packages. They import nothing of ours, and nothing here imports them."""
