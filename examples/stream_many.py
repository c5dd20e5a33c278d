"""Streams several texts at once. Each piece has the index of its prompt."""

from llamabatch import LLM, SamplingParams

names = ["fox", "dog", "bear"]
stories = [""] * len(names)
with LLM("tiny") as llm:
    conversations = [[{"role": "user", "content": f"Tell me a short story about a {name}."}] for name in names]
    for piece in llm.stream(conversations, SamplingParams(max_tokens=60, seed=1)):
        stories[piece.prompt_index] += piece.text
        if piece.finished is not None:
            print(f"{names[piece.prompt_index]} ({piece.finished.finish_reason}): {stories[piece.prompt_index]}")
