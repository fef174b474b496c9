"""The werewolf game of nine players on AgentScope: one camp is trained, the other one stays as it is."""
