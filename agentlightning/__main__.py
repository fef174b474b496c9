"""`python -m agentlightning` is the `agl` command."""

from agentlightning.cli import main

if __name__ == "__main__":
    main()
