"""The embedded backend: engine and learner on one set of weights, in a model process, and the client to it.

The main process never imports torch; token ids and log-probs cross a local socket as msgpack, never as pickles.
"""
