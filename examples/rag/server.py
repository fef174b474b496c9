"""Retrieval as an MCP server over stdio: `python server.py corpus.jsonl`. Any other server takes its place."""

import json
import sys
from pathlib import Path

try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # mcp 2, where it has another name
    from mcp.server.mcpserver import MCPServer as FastMCP

sys.path.insert(0, str(Path(__file__).parent))
from bm25 import Library

server = FastMCP("retrieval", log_level="WARNING")
library = Library([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])


@server.tool(description="Finds documents.", structured_output=False)
def search(query: str) -> str:
    """The best documents, a line each."""
    return library.search(query)


if __name__ == "__main__":
    server.run()
