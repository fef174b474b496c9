"""`python -m agentlightning` is the `agl` command.

The working folder comes last among the places of modules: a file there may have the name of a package.
"""

import os
import sys

if __name__ == "__main__":
    if sys.path[:1] == [os.getcwd()]:
        sys.path.append(sys.path.pop(0))
    from agentlightning.cli import main

    main()
