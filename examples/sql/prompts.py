"""What the three roles are told. A user with another model begins by changing these."""

from __future__ import annotations

WRITE = "Write one SQLite query that answers the question."
CHECK = "Is the query right? Say RIGHT, or WRONG and why."
REWRITE = "The query is wrong. Write a better SQLite query."

RIGHT = "RIGHT"


def writer(schema: str, question: str) -> list[tuple[str, str]]:
    return [("system", WRITE), ("user", f"{schema}\n\n{question}")]


def checker(question: str, query: str, result: str) -> list[tuple[str, str]]:
    return [("system", CHECK), ("user", f"{question}\n\n{query}\n\n{result}")]


def rewriter(schema: str, question: str, query: str, result: str, feedback: str) -> list[tuple[str, str]]:
    return [("system", REWRITE), ("user", f"{schema}\n\n{question}\n\n{query}\n\n{result}\n\n{feedback}")]
