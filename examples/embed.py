"""Texts, sorted by how near their vectors are to a question. A model trained for embeddings sorts better than tiny."""

import numpy as np

from llamabatch import LLM

texts = [
    "The capital of France is Paris.",
    "A dog walked to the sea and found a ball.",
    "Seven plus five is twelve.",
]
with LLM("tiny") as llm:
    vectors = np.stack(llm.embed(texts, normalize=True))
    [question] = llm.embed("What is the capital of France?", normalize=True)
for similarity, text in sorted(zip(vectors @ question, texts, strict=True), reverse=True):
    print(f"{similarity:.3f}  {text}")
