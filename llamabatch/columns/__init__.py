"""Tables in memory: adds columns with a model's outputs to a table of any common kind. Imports `jobs` and
all packages below it.

::

    from llamabatch import columns

    frame = columns.map(frame, "Classify: {{ text }}", model="model.gguf", schema=Label)
    classify = columns.Generate("model.gguf", prompt="Classify: {{ text }}", schema=Label)  # a batch at a time
"""

from llamabatch.columns.generate import Generate
from llamabatch.columns.map_frame import map

__all__ = ["Generate", "map"]
