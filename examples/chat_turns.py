"""A chat of several turns. Each turn computes only its own tokens: those of earlier turns are still in the KV cache."""

from llamabatch import LLM, SamplingParams

questions = ["What is the capital of France?", "What is 4 + 5?", "Tell me a story about a cat.", "What is 2 + 2?"]
params = SamplingParams(temperature=0, max_tokens=60)
with LLM("tiny", instances=1) as llm:
    turns = []
    for question in questions:
        turns.append({"role": "user", "content": question})
        [output] = llm.chat(turns, params)
        turns.append({"role": "assistant", "content": output.text})
        print(f"> {question}\n{output.text}")
    stats = llm.stats()
    print(f"{stats.prefix_tokens} tokens of earlier turns were there; {stats.prefill_tokens} were computed")
