"""Pooling: how the vectors of a text's tokens become one result, and the classification head of a model that ranks.

Names and numbers are llama.cpp's (llama.h, llama_pooling_type). Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from llamabatch.gguf.header import read_header, read_tensors
from llamabatch.gguf.reader import TEXT, Items, TensorInfo, read_texts

POOLINGS = ("none", "mean", "cls", "last", "rank")  # by number
RANK = "rank"
NO_DENSE_LAYER = (
    "its classification head has no dense layer (cls.weight), which llama.cpp's converter leaves out of BERT: the "
    "scores are not those of the original model"
)
_LABELS = "classifier.output_labels"


def declared_pooling(metadata: Mapping[str, str]) -> str | None:
    """The pooling that the file names; None: it names none. Files that say "none" leave the choice to the program.

    Args:
        metadata: the values of the header as texts.
    """
    number = metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", "")
    name = POOLINGS[int(number)] if number.isdigit() and int(number) < len(POOLINGS) else "none"
    return None if name == "none" else name


def default_pooling(metadata: Mapping[str, str], tensors: Iterable[TensorInfo]) -> str:
    """The pooling of a model for which no other is asked: what the file names, else "rank" for an encoder with a
    classification head (llama.cpp's converter names none for these), else "mean".

    Args:
        tensors: those of the file; read for an encoder only.
    """
    declared = declared_pooling(metadata)
    if declared is not None:
        return declared
    is_encoder = metadata.get(f"{metadata.get('general.architecture', '')}.attention.causal") == "false"
    return RANK if is_encoder and head_width(tensors) else "mean"


def head_width(tensors: Iterable[TensorInfo]) -> int:
    """The number of outputs of the classification head; 0: the model has none.

    A head is a projection (`cls.output`), mostly behind a dense layer (`cls`); a dense layer with a single output is
    one, too (llama-graph.cpp, build_pooling).
    """
    widths = {tensor.name: tensor.dims[1] if len(tensor.dims) > 1 else 1 for tensor in tensors}
    if "cls.output.weight" in widths:
        return widths["cls.output.weight"]
    return 1 if widths.get("cls.weight") == 1 else 0


def lacks_dense_layer(metadata: Mapping[str, str], tensors: Iterable[TensorInfo]) -> bool:
    """True for a BERT with a projection and no dense layer before it: llama.cpp's converter leaves the `pooler` of a
    BertForSequenceClassification out, so that its scores are not those of the original."""
    names = {tensor.name for tensor in tensors}
    is_bert = metadata.get("general.architecture") == "bert"
    return is_bert and "cls.output.weight" in names and "cls.weight" not in names


def read_labels(path: Path) -> tuple[str, ...]:
    """The names of the outputs of the classification head; "LABEL_0", … for those that the file does not name, or names
    like another one. Empty: the model has no head that llama.cpp could use.

    Raises:
        ModelFileError, OSError: as header.read_header.
    """
    header, width = read_header(path), head_width(read_tensors(path))
    items = header.own(_LABELS)
    named = []
    if isinstance(items, Items) and items.type == TEXT:
        named = [text.decode("utf-8", "replace") for text in read_texts(path, items)]
    if width != (len(named) or 1):  # llama.cpp takes the number of outputs from the labels, and 1 without them
        return ()
    return tuple(name if name and named.index(name) == at else f"LABEL_{at}" for at, name in enumerate(named or [""]))
