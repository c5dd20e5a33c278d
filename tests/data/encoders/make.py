"""Writes vectors.json: tokens and results of transformers' own models, for tests/model/test_encoders.py.

It needs torch and transformers, which the tests do not; from the root of the repository:

    python -m venv /tmp/encoders && /tmp/encoders/bin/pip install torch transformers gguf numpy
    PYTHONPATH=. /tmp/encoders/bin/python tests/data/encoders/make.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.encoder_files import (
    ENCODERS,
    N_CTX,
    N_EMBD,
    N_FF,
    N_HEAD,
    N_LAYER,
    QUERY,
    TEXTS,
    Encoder,
    vocabulary,
    weights,
)


def tokenizer(kind: Encoder) -> Any:
    """transformers' tokenizer of the family, over the same vocabulary."""
    tokens = vocabulary(kind.family)
    if kind.is_bert:
        return transformers.BertTokenizer(vocab={name: at for at, (name, _) in enumerate(tokens)})
    return transformers.XLMRobertaTokenizer(vocab=tokens)


def model(kind: Encoder) -> Any:
    """transformers' model with these weights, in float64: its rounding then plays no part."""
    config = (transformers.BertConfig if kind.is_bert else transformers.XLMRobertaConfig)(
        vocab_size=len(vocabulary(kind.family)),
        hidden_size=N_EMBD,
        intermediate_size=N_FF,
        num_attention_heads=N_HEAD,
        num_hidden_layers=N_LAYER,
        max_position_embeddings=N_CTX + kind.position_offset,
        type_vocab_size=kind.n_token_types,
        pad_token_id=0 if kind.is_bert else 1,
        layer_norm_eps=1e-5,
        num_labels=max(1, kind.n_labels),
    )
    auto = transformers.AutoModelForSequenceClassification if kind.n_labels else transformers.AutoModel
    made = auto.from_config(config).eval()
    given = {name: torch.from_numpy(values) for name, values in weights(kind).items()}
    prefix = "bert." if kind.is_bert else "roberta."
    found = {}
    for name in made.state_dict():
        if name.removeprefix(prefix) in given:
            found[name] = given[name.removeprefix(prefix)]
    missing, unexpected = made.load_state_dict(found, strict=False)
    # without a classifier, XLM-R's pooler is there and plays no part
    assert all(name.startswith("pooler.") for name in missing), missing
    assert not unexpected, unexpected
    return made.double()


def results(kind: Encoder) -> dict[str, Any]:
    """Tokens of each text, and what the model makes of them; of a model with one output, of pairs with QUERY."""
    tokenize, made = tokenizer(kind), model(kind)
    found = []
    for text in TEXTS:
        ids = tokenize(QUERY, text)["input_ids"] if kind.n_labels == 1 else tokenize(text)["input_ids"]
        with torch.no_grad():  # token types are 0: llama.cpp has no others
            output = made(input_ids=torch.tensor([ids]))
        values = output.logits[0] if kind.n_labels else output.last_hidden_state[0]
        if not kind.n_labels:
            values = values[0] if kind.pooling == 2 else values.mean(0)
        found.append({"ids": ids, "values": [round(float(value), 6) for value in values]})
    return {"results": found}


def main() -> None:
    made = {name: results(kind) for name, kind in ENCODERS.items()}
    made["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
    Path(__file__).with_name("vectors.json").write_text(json.dumps(made, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
