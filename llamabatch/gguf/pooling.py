"""Pooling (one result from the vectors of a text's tokens) and the classification heads of rerankers.

The names and numbers are those of llama.cpp (llama.h, llama_pooling_type). Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from llamabatch.gguf.header import read_header, read_tensors
from llamabatch.gguf.reader import TEXT, Items, TensorInfo, read_texts

POOLINGS = ("none", "mean", "cls", "last", "rank")  # the index is llama.cpp's number
RANK = "rank"
NO_DENSE_LAYER = (
    "its classification head has no dense layer (cls.weight), which llama.cpp's converter leaves out of BERT: the "
    "scores are not those of the original model"
)
_LABELS = "classifier.output_labels"


def declared_pooling(metadata: Mapping[str, str]) -> str | None:
    """Returns the pooling declared in the file; None if the file declares "none" or nothing, so that the program may
    choose.

    Args:
        metadata: the header's metadata as texts.
    """
    number = metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", "")
    name = POOLINGS[int(number)] if number.isdigit() and int(number) < len(POOLINGS) else "none"
    return None if name == "none" else name


def default_pooling(metadata: Mapping[str, str], tensors: Iterable[TensorInfo]) -> str:
    """Returns the default pooling of a model: the pooling declared in the file, if any.

    Without a declaration it is "rank" for an encoder with a classification head, and "mean" for all other models.
    llama.cpp's converter declares no pooling for an encoder with a head.

    Args:
        tensors: tensors of the file; read only for an encoder.
    """
    declared = declared_pooling(metadata)
    if declared is not None:
        return declared
    is_encoder = metadata.get(f"{metadata.get('general.architecture', '')}.attention.causal") == "false"
    return RANK if is_encoder and head_width(tensors) else "mean"


def head_width(tensors: Iterable[TensorInfo]) -> int:
    """Returns the number of outputs of the classification head, or 0 without a head. A head is a projection
    (`cls.output`), mostly after a dense layer (`cls`). A dense layer with a single output also is a head
    (llama-graph.cpp, build_pooling)."""
    widths = {tensor.name: tensor.dims[1] if len(tensor.dims) > 1 else 1 for tensor in tensors}
    if "cls.output.weight" in widths:
        return widths["cls.output.weight"]
    return 1 if widths.get("cls.weight") == 1 else 0


def lacks_dense_layer(metadata: Mapping[str, str], tensors: Iterable[TensorInfo]) -> bool:
    """Returns True for a BERT with a projection but no dense layer before it. llama.cpp's converter leaves out the
    `pooler` of a BertForSequenceClassification, so the scores differ from those of the original model."""
    names = {tensor.name for tensor in tensors}
    is_bert = metadata.get("general.architecture") == "bert"
    return is_bert and "cls.output.weight" in names and "cls.weight" not in names


def read_labels(path: Path) -> tuple[str, ...]:
    """Returns the names of the classification head's outputs, or () if there is no head or llama.cpp cannot use it.

    An output without a name, or with the name of an earlier output, is called "LABEL_0", "LABEL_1", … by its index.

    Raises:
        ModelFileError, OSError: as header.read_header.
    """
    header, width = read_header(path), head_width(read_tensors(path))
    items = header.own(_LABELS)
    named = []
    if isinstance(items, Items) and items.type == TEXT:
        named = [text.decode("utf-8", "replace") for text in read_texts(path, items)]
    if width != (len(named) or 1):  # llama.cpp expects one output for each label, or one output without labels
        return ()
    return tuple(name if name and named.index(name) == at else f"LABEL_{at}" for at, name in enumerate(named or [""]))
