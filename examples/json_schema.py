"""Records that always parse: a pydantic model class gives each answer its structure. All answers are one batch."""

from pydantic import BaseModel, Field

from llamabatch import LLM, SamplingParams


class Person(BaseModel):
    name: str = Field(pattern="^[A-Z][a-z]+$", max_length=20)
    age: int = Field(ge=0, le=120)


params = SamplingParams(structured_outputs={"json": Person}, temperature=0.8, seed=1)
questions = [f"Write a JSON record of a person named {name}." for name in ("Ann", "Bob", "Kate", "Tom")]
with LLM("tiny") as llm:
    for out in llm.chat([[{"role": "user", "content": question}] for question in questions], params):
        print(Person.model_validate_json(out.text))
