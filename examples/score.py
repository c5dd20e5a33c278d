"""The likeliest of given answers: log-likelihoods of texts, without sampling."""

from llamabatch import LLM

START = "The capital of {} is"
ANSWERS = [" Paris", " Rome", " Madrid"]

with LLM("tiny") as llm:
    pairs = [(START.format(country), ANSWERS) for country in ("France", "Italy", "Spain")]
    for (prompt, _), scores in zip(pairs, llm.score(pairs), strict=True):
        print(prompt)
        for answer, score in zip(ANSWERS, scores, strict=True):
            greedy = "greedy" if score.is_greedy else ""
            print(f"{answer:>10} {score.logprob:8.3f} in {score.num_tokens} token {greedy}")
