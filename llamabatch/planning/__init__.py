"""The machine, the memory that a model needs, the values of "auto", and tuned profiles. Imports `config` and the
packages below it.
"""
