"""A text-to-SQL agent on LangGraph, its databases and its questions."""
