"""The vLLM backend: vLLM servers sample, the learner is in a process of ours, weights get across after each step.

options      what users set                           process      one server of ours, from start to end
api          requests to one server over HTTP         wire         requests and answers as JSON
replica      one server that is kept alive            servers      all servers of a run, and its policies' engines
engine       a policy's `Engine` on a server          guard        ends a server's children with it
publication  how weights get across                   broadcast    weights for servers without our folders
backend      servers beside a learner
worker/      what runs inside vLLM; knows nothing of this package

Nothing here imports vLLM or torch: the servers may live in an environment of their own, or on another machine.
"""
