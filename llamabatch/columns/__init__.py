"""Columns: a table in, the same kind of table out, with columns that a model has written. Imports `jobs` and the rooms
below it.

::

    from llamabatch import columns

    frame = columns.map(frame, "Classify: {{ text }}", model="model.gguf", schema=Label)
    classify = columns.Generate("model.gguf", prompt="Classify: {{ text }}", schema=Label)  # a batch at a time
"""

from llamabatch.columns.generate import Generate
from llamabatch.columns.map_frame import map

__all__ = ["Generate", "map"]
