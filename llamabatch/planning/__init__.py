"""Memory and settings: the machine, the memory needed by a model, the values of "auto", tuned profiles. Imports
`config` and the packages below it.
"""
