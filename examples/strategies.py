"""The same prompts through every strategy: the same text, at different speeds."""

import time

from llamabatch import LLM, SamplingParams

prompts = [[{"role": "user", "content": f"What is {a} plus {b}?"}] for a in range(1, 9) for b in range(1, 5)]
params = SamplingParams(temperature=0, max_tokens=16)
texts = {}
for strategy in ("sequential", "interleaved", "static", "batched"):
    with LLM("tiny", strategy=strategy, n_slots=16) as llm:
        llm.chat(prompts[:2], params)  # a warm-up
        start = time.perf_counter()
        texts[strategy] = [output.text for output in llm.chat(prompts, params)]
        print(f"{strategy:12} {len(prompts) / (time.perf_counter() - start):6.1f} requests/s")
same = sum(a == b for a, b in zip(texts["sequential"], texts["batched"], strict=True))
print(f"{same} of {len(prompts)} texts are equal")
