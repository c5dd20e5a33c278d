"""Clients of an engine: in a thread, in a child process under a supervisor, or over several engines behind a router.
`connect()` makes the client of a config. Imports `engine` and the packages below it.
"""
