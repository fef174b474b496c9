"""A calculator as an MCP server over stdio: `python server.py`. Any other server takes its place."""

import operator

try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # mcp 2, where it has another name
    from mcp.server.mcpserver import MCPServer as FastMCP

server = FastMCP("calculator", log_level="WARNING")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@server.tool(description="One operation on two numbers.", structured_output=False)
def calc(a: float, op: str, b: float) -> str:
    """What cannot be calculated is an answer too: the model is told what was wrong."""
    if op not in OPERATIONS:
        return "Error: op must be one of + - * /"
    try:
        value = OPERATIONS[op](a, b)
        return str(int(value) if value == int(value) else round(value, 4))
    except ZeroDivisionError:
        return "Error: division by zero"
    except (OverflowError, ValueError):
        return "Error: not a finite number"


if __name__ == "__main__":
    server.run()
