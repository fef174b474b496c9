"""The databases under the store: the schema and its migrations, SQLite and PostgreSQL, and what waits for a commit.

Runs operations; knows none of them.
"""
