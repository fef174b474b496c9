"""The vLLM backend: vLLM servers sample, the learner is in a process of ours, weights get across after each step.

options      what users set                          command      how a server is started
process      one server of ours, from start to end   api          what is said to a server over HTTP
wire         requests and answers as JSON            plain        log-probs that vLLM does not give by itself
replica      one server that is kept alive           fleet        all of them: which one samples, retries
gate         who may sample while weights change     publication  how weights get across
engine       a policy's `Engine`                     servers      all of these for a run's policies
backend      servers beside a learner
worker/      what runs inside vLLM; knows nothing of this package

Nothing here imports vLLM or torch: the servers may live in an environment of their own, or on another machine.
"""
