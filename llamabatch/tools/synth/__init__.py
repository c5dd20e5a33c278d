"""`llamabatch synth`: writes a model file with a real model's shape and random weights, for tests of speed.

The output of the model means nothing. But every tensor has the size and the type that llama.cpp's own quantiser would
give it, so a step costs the same as with the real model.

The modules in their order: shapes (the numbers) -> architectures (metadata, names of tensors) -> types (the quantiser's
choices) -> file. file uses blocks (random weights in the layouts of ggml-common.h) and vocab (a made-up vocabulary of
the right kind and size).
"""

from llamabatch.tools.synth.blocks import BlockType as BlockType
from llamabatch.tools.synth.blocks import Bytes as Bytes
from llamabatch.tools.synth.blocks import RandomBits as RandomBits
from llamabatch.tools.synth.file import write_file as write_file
from llamabatch.tools.synth.file import write_model as write_model
from llamabatch.tools.synth.shapes import SHAPES as SHAPES
from llamabatch.tools.synth.shapes import Shape as Shape
from llamabatch.tools.synth.shapes import State as State
from llamabatch.tools.synth.shapes import find_shape as find_shape
from llamabatch.tools.synth.types import QUANTS as QUANTS
from llamabatch.tools.synth.types import Tensor as Tensor
from llamabatch.tools.synth.types import tensors_of as tensors_of
