"""A calculator as an MCP server over stdio."""

from mcp.server.fastmcp import FastMCP

server = FastMCP("calculator")


@server.tool(description="One operation on two numbers.")
def calc(a: float, op: str, b: float) -> str:
    operations = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else float("nan")}
    return f"{operations[op]:g}" if op in operations else "Error: op must be one of + - * /"


if __name__ == "__main__":
    server.run()
