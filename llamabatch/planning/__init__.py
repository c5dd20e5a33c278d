"""The machine, the memory that a model needs, the values of "auto", tuned profiles. Imports `config` and the rooms
below it.
"""
