"""Prints a text while it is generated. Leaving the loop early would free the slot."""

from llamabatch import LLM, SamplingParams

with LLM("tiny") as llm:
    for piece in llm.stream([{"role": "user", "content": "Tell me a story about a dog."}], SamplingParams(seed=1)):
        print(piece.text, end="", flush=True)
print()
