"""LiteLLM's calls on a model in this process: coroutines share its batches. Needs llamabatch[litellm]."""

import asyncio

import litellm

from llamabatch.integrations.litellm import register

COUNTRIES = ["France", "Italy", "Spain", "Japan"]


async def capital(country: str) -> str:
    """Returns the model's answer."""
    question = [{"role": "user", "content": f"What is the capital of {country}?"}]
    answer = await litellm.acompletion("llamabatch/tiny", question, temperature=0, max_tokens=8)
    return answer.choices[0].message.content


async def main() -> None:
    """Asks all questions at once."""
    for country, answer in zip(COUNTRIES, await asyncio.gather(*map(capital, COUNTRIES)), strict=True):
        print(f"{country}: {answer}")


provider = register(n_slots=8)
asyncio.run(main())
provider.close()
