"""Answers that repeat the question: the engine guesses tokens from the prompt and verifies several in one step."""

from llamabatch import LLM, SamplingParams

words = ["apple", "river", "stone", "cloud", "garden"]
questions = [f"Please copy this list: {', '.join(words[i:] + words[:i])}" for i in range(5)]
conversations = [[{"role": "user", "content": question}] for question in questions]
greedy = SamplingParams(temperature=0, max_tokens=48)

for options in ({}, {"speculate": "lookup", "speculate_always": True}):
    with LLM("tiny", strategy="batched", n_slots=5, **options) as llm:
        tokens = sum(len(output.token_ids) for output in llm.chat(conversations, greedy))
        stats = llm.stats()
    print(f"{options}: {tokens} tokens in {stats.decode_passes} passes, {stats.accepted_tokens} guesses held")
