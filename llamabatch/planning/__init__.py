"""What the machine has, the memory that a model needs, what "auto" becomes, tuned profiles. Imports `config` and
what stands below it.
"""
