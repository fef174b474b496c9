"""What the store does, as plain functions of a transaction: one file per noun, and the rules they share.

Knows neither threads nor HTTP, and runs on any database of `database`.
"""
