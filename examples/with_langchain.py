"""A chain of LangChain over a list of inputs: one call of the engine. Needs llamabatch[langchain]."""

from typing import Literal

from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel

from llamabatch.integrations.langchain import ChatLlamaBatch


class Place(BaseModel):
    """Where something is."""

    continent: Literal["Africa", "America", "Asia", "Europe"]
    is_island: bool


model = ChatLlamaBatch("tiny", temperature=0, max_tokens=60, engine={"n_slots": 8})
chain = ChatPromptTemplate.from_template("Where is {country}?") | model.with_structured_output(Place)
countries = ["France", "Japan", "Spain", "Peru"]
for country, place in zip(countries, chain.batch([{"country": name} for name in countries]), strict=True):
    print(country, place)
model.close()
