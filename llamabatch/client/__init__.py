"""The ways to an engine: a thread, a child process under a supervisor, a router over several, and `connect()` on top.
Imports `engine` and what stands below it.
"""
