"""Memory and settings: the machine, the memory that a model needs, the values of "auto", tuned profiles. Imports
`config` and the packages below it.
"""
