"""verl's worker layer behind the learner's verbs: our batches as its rows, our loss in its engine, its ranks on Ray.

    rows      a packed batch as rows of tokens, dealt among workers          (numpy)
    loss      our loss on what a pass over rows says                         (torch)
    worker    verl's `TinkerTrainingWorker`, and what our verbs ask besides  (verl)
    group     the workers on a Ray cluster, and the adapter that they make   (peft)
    learner   `VerlLearner`: `TorchLearner` with passes and steps done there
    cpu       what verl lacks to compute on CPUs

verl (Sheng et al., HybridFlow, arXiv 2409.19256) is an extra: `pip install 'agentlightning[verl]'`.
"""
