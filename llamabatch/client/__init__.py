"""How others reach an engine: a thread, a router, a child process, a supervisor, and `connect()` on top of them.
Imports `engine` and what stands below it.
"""
