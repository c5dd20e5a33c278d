"""A hundred asyncio tasks on one engine: each sends its own request, and all are computed together."""

import asyncio

from llamabatch import AsyncLLM, SamplingParams


async def ask(llm: AsyncLLM, question: str) -> str:
    [answer] = await llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=16, temperature=0))
    return f"{question} {answer.text}"


async def main() -> None:
    async with AsyncLLM("tiny", n_slots=32) as llm:
        questions = [f"What is {a} plus {b}?" for a in range(1, 11) for b in range(1, 11)]
        answers = await asyncio.gather(*(ask(llm, question) for question in questions))
        print(*answers[:5], sep="\n")
        print(f"{(await llm.stats()).rows_per_step:.1f} requests a step")


asyncio.run(main())
