"""The training server: OpenAI's fine-tuning API on models of one's own, with its files, jobs, events, checkpoints and
the models that come of them, and the API of `tinker` beside it.

requests   what a client may ask, as records; what cannot be honoured is refused by its name
lines      the lines of a training file, each checked
records    files, jobs, events and keys, in a SQLite file
jobs       a job's states, and what a client sees of it
queue      one job at a time, in a process of its own (`training`)
models     what the fine-tuned models are served by
routes     the table of routes; `app` the server
tinker     the API of `tinker`: sessions, training and sampling clients, their checkpoints
"""
