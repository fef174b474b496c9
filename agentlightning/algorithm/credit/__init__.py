"""How rewards become advantages and weights of tokens. Pure; numpy only."""
