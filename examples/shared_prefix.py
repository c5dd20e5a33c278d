"""Many questions about one long text: the text is computed once and copied to the other slots."""

from llamabatch import LLM, SamplingParams

context = "Ada keeps three cats. Ben keeps one dog. Carla keeps five fish. " * 8
names = ["Ada", "Ben", "Carla"]
with LLM("tiny", n_slots=8) as llm:
    prompts = [f"{context}\nHow many animals does {name} keep?" for name in names]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0))
    total = sum(len(output.prompt_token_ids) for output in outputs)
    print(f"{llm.stats().shared_tokens} of {total} prompt tokens were copied instead of computed")
