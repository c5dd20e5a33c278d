"""How questions are worded. TRAIN is what the model learns from; HELD_OUT is what it is judged on, and never shares a line.

`{...}` are the slots that corpus.py fills. Every word of a held-out template occurs somewhere in training:
what is tested is a new way of asking, not a new vocabulary.
"""

from __future__ import annotations

# task -> list of templates. "word" tasks want the bare answer, "sentence" tasks want a full sentence.
TRAIN: dict[str, list[str]] = {
    "capital.word": [
        "What is the capital of {x}?", "Capital of {x}?", "Name the capital of {x}.", "Tell me the capital of {x}.",
        "Which city is the capital of {x}?", "{x}: what is its capital?", "What city is {x}'s capital?",
        "In one word, what is the capital of {x}?", "Give me the capital city of {x}.", "The capital of {x} is which city?",
        "Do you know the capital of {x}?", "I need the name of the capital of {x}.", "capital city, {x}",
    ],
    "capital.sentence": [
        "What is the capital of {x}? Answer in a sentence.", "Tell me the capital of {x} in a full sentence.",
        "Name the capital of {x}. Use a whole sentence.", "Answer with a full sentence: which city is the capital of {x}?",
        "In a sentence, what is the capital city of {x}?", "Write one sentence that names the capital of {x}.",
        "Say in a full sentence what the capital of {x} is.",
    ],
    "country.word": [
        "Which country has {x} as its capital?", "{x} is the capital of which country?", "What country is {x} the capital of?",
        "Name the country whose capital is {x}.", "Tell me which country has the capital {x}.", "Of which country is {x} the capital?",
        "The city {x} is the capital of what country?", "I know that {x} is a capital. Of which country?",
    ],
    "continent.word": [
        "On which continent is {x}?", "What continent is {x} in?", "Name the continent of {x}.", "{x} lies on which continent?",
        "Tell me the continent where {x} lies.", "Which continent is home to {x}?", "In one word, which continent is {x} in?",
        "Continent of {x}?", "Where is {x}? Give me the continent.",
    ],
    "opposite.word": [
        "What is the opposite of {x}?", "Opposite of {x}?", "Give me the opposite of {x}.", "Name the opposite of the word {x}.",
        "Which word is the opposite of {x}?", "Tell me the opposite of \"{x}\".", "What word means the opposite of {x}?",
        "In one word, what is the opposite of {x}?", "I say {x}. You say the opposite.", "{x}: give the opposite word.",
        "What word would you use for the opposite of {x}?", "Which word says the opposite of {x}?",
    ],
    "young.word": [
        "What is a young {x} called?", "What do you call a young {x}?", "Name for a young {x}?", "Tell me what a baby {x} is called.",
        "A baby {x} is called what?", "In one word, what is a baby {x}?", "Give me the name of a young {x}.",
        "Which word names a baby {x}?",
    ],
    "sum.word": [
        "What is {a} + {b}?", "{a} + {b} =", "{a}+{b}", "{a} + {b}", "What is {a} plus {b}?", "How much is {a} + {b}?",
        "Add {a} and {b}.", "Calculate {a} + {b}.", "Tell me {a} plus {b}.", "What do you get when you add {a} and {b}?",
        "{a} plus {b}?", "What is the sum of {a} and {b}?", "Give me the result of {a} + {b}.", "Find the sum: {a} + {b}.",
        "{p} has {a} coins and gets {b} more. How many coins is that?",
        "There are {a} red cups and {b} blue cups. How many cups are there?", "Work out {a}+{b}.",
    ],
    "sum.sentence": [
        "What is {a} + {b}? Answer in a sentence.", "Answer in a full sentence: what is {a} plus {b}?",
        "Add {a} and {b} and write a whole sentence.", "In a sentence, how much is {a} + {b}?",
        "Write one sentence with the sum of {a} and {b}.",
    ],
    "difference.word": [
        "What is {a} - {b}?", "{a} - {b} =", "{a}-{b}", "{a} - {b}", "What is {a} minus {b}?", "How much is {a} - {b}?",
        "Subtract {b} from {a}.", "Calculate {a} - {b}.", "{p} had {a} cups and a friend takes {b} cups. How many are left?", "Tell me {a} minus {b}.", "Take {b} away from {a}.",
        "{a} minus {b}?", "What do you get when you take {b} from {a}?", "Give me the result of {a} - {b}.",
        "{p} has {a} coins and gives away {b}. How many coins are left?",
        "There were {a} birds and {b} flew away. How many birds are left?", "Work out {a}-{b}.",
    ],
    "difference.sentence": [
        "What is {a} - {b}? Answer in a sentence.", "Answer in a full sentence: what is {a} minus {b}?",
        "Take {b} from {a} and write a whole sentence.", "In a sentence, how much is {a} - {b}?",
        "Write one sentence with the result of {a} minus {b}.",
    ],
    "copy": [
        "Repeat these words: {w}", "Copy: {w}", "Say this again: {w}", "Write the same words: {w}", "Repeat after me: {w}",
        "Copy these words in the same order: {w}", "Please write these words once more: {w}", "Repeat the list: {w}",
        "{w}\nCopy the line above.", "{w}\nRepeat these words.", "Copy the following words: {w}", "Echo: {w}",
        "Write this list again, just as it is: {w}", "Give me back these words: {w}", "Say the words \"{w}\" again.",
        "Words: {w}\nTask: copy", "Repeat \"{w}\".",
    ],
    "reverse": [
        "Reverse these words: {w}", "Reverse: {w}", "Write these words in reverse order: {w}", "Say these words backwards: {w}",
        "Turn this list around: {w}", "Give me these words from last to first: {w}", "Reverse the order of the words: {w}",
        "Please put these words in reverse order: {w}", "{w}\nReverse the line above.", "{w}\nWrite these words backwards.",
        "Reverse the list: {w}", "Write the words from the last to the first: {w}", "List backwards: {w}",
        "Start with the last word and end with the first: {w}", "Words: {w}\nTask: reverse", "Say \"{w}\" in reverse order.",
    ],
    "json.keys": [
        "Make a JSON record with the keys {k}: {s}", "Write JSON with the keys {k}. {s}", "{s} Give me JSON with {k}.",
        "{s}\nMake a JSON object with the keys {k}.", "Turn this into a JSON record with {k}: {s}",
        "Text: {s}\nKeys: {k}\nJSON:", "Extract {k} as JSON from this sentence: {s}", "Read this: {s} Now write {k} as JSON.",
        "Find {k} in the text and answer in JSON. Text: {s}", "I need {k} as a JSON object. {s}",
    ],
    "json.plain": [
        "Make a JSON record: {s}", "Turn this sentence into JSON: {s}", "{s} Write this as JSON.", "{s}\nJSON, please.",
        "Write a JSON object for this: {s}", "Text: {s}\nJSON:", "Give me a JSON record of the following: {s}",
        "Change this text to a JSON object. {s}", "As JSON: {s}", "Read the sentence and answer in JSON. {s}",
    ],
    "person": [
        "{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}.", "My friend {name} from {city} is {age}.",
        "In {city} lives {name}, who is {age} years old.", "{name} lives in {city} and is {age} years old.",
        "{name} is {age}. Home: {city}.", "A person named {name}, {age} years old, comes from {city}.",
        "This is my friend {name}, {age}, from {city}.", "I met {name} in {city}. Age: {age}.", "{city} is the home of {name}, who is {age}.",
    ],
    "product": [
        "The {item} is {colour} and costs {price} euros.", "A {colour} {item} costs {price} euros.", "{price} euros for a {colour} {item}.",
        "We sell a {item} in {colour} for {price} euros.", "For {price} euros you get a {colour} {item}.",
        "This {item} costs {price} euros. It is {colour}.", "The price of the {colour} {item} is {price} euros.",
        "You can have the {item} for {price} euros. The colour is {colour}.", "We have a {colour} {item}, price {price} euros.",
    ],
    "booking": [
        "{name} books a table for {guests} people on {day}.", "On {day}, {name} comes with {guests} guests.",
        "A table on {day} for {guests} guests, name {name}.", "{name} wants a table for {guests} on {day}.",
        "Please keep a table for {name} on {day}, {guests} guests.", "{guests} guests on {day}. The name is {name}.",
        "{name} and friends come on {day}: {guests} guests.", "Can {guests} people come on {day}? My name is {name}.",
        "I am {name} and I would like a table for {guests} people this {day}.",
    ],
    "pet": [
        "{name} is a {animal} and is {age} years old.", "My {animal} {name} is {age} years old.", "{name} the {animal} is {age}.",
        "We have a {animal} called {name}, {age} years old.", "The {age} year old {animal} is called {name}.",
        "I have a {animal}. The name is {name} and the age is {age}.",
        "This is {name}, our {animal}. Age: {age}.", "A {animal} of {age} years, called {name}.", "Our {animal} is {age} years old. We call it {name}.",
    ],
    "story": [
        "Write a short story about {n}, a {t} and the {p}.", "Tell me a story about {n} and a {t} at the {p}.",
        "Write a story. Name: {n}. Thing: {t}. Place: {p}.", "Tell a short story in which {n} has a {t} at the {p}.",
        "A story with {n}, the {p} and a {t}, please.", "I want to read about {n} and a {t}. The place is the {p}.",
        "Make up a story about {n} at the {p} with a {t}.", "Can you tell a story about a {t}, the {p} and {n}?",
        "Story time! {n}, a {t}, the {p}.", "Write a paragraph about {n}, who finds a {t} near the {p}.",
    ],
    "story.count": [
        "Write a story of {c} sentences about {n}, a {t} and the {p}.", "In {c} sentences, tell me about {n} and a {t} at the {p}.",
        "Tell me a story about {n}, a {t} and the {p} in {c} sentences.", "Write {c} sentences about {n}, the {p} and a {t}.",
        "Story, {c} sentences. Name: {n}. Thing: {t}. Place: {p}.", "I want {c} sentences about {n} at the {p} with a {t}.",
        "Make up a story about {n} and a {t} near the {p}. Use {c} sentences.",
    ],
}  # fmt: skip

HELD_OUT: dict[str, list[str]] = {
    "capital.word": [
        "Which city is {x}'s capital?", "Can you tell me the capital of {x}?", "What is the name of the capital city of {x}?",
        "I want to know the capital of {x}.", "{x}. Which city is the capital?", "Please name the capital city of {x}.",
    ],
    "capital.sentence": [
        "Which city is the capital of {x}? Use a full sentence.", "Write a sentence that says what the capital of {x} is.",
        "Give me the capital of {x} in one whole sentence.",
    ],
    "country.word": [
        "What is the country whose capital is {x}?", "Which country is {x} the capital of?", "Give me the country that has {x} as its capital.",
    ],
    "continent.word": [
        "Which continent is {x} on?", "Please tell me the continent of {x}.", "The country {x} is on what continent?",
    ],
    "opposite.word": [
        "Which word means the opposite of {x}?", "Please give me the opposite word of {x}.", "What would be the opposite of \"{x}\"?",
        "Can you name the opposite of {x}?",
    ],
    "young.word": [
        "What is the name for a baby {x}?", "How do you call a young {x}?", "Can you tell me what a young {x} is called?",
    ],
    "sum.word": [
        "How much is {a} plus {b}?", "Please add {a} and {b}.", "Can you calculate {a} + {b}?", "Tell me the sum of {a} and {b}.",
        "What is the result of {a} + {b}?", "{p} has {a} cups and gets {b} more. How many cups are there?", "I need {a} + {b}.",
    ],
    "sum.sentence": [
        "Write a full sentence that says what {a} + {b} is.", "How much is {a} plus {b}? Use a whole sentence.",
    ],
    "difference.word": [
        "How much is {a} minus {b}?", "Please take {b} from {a}.", "Can you calculate {a} - {b}?", "Find {a} minus {b}.",
        "What is the result of {a} - {b}?", "There were {a} cups and {p} takes {b}. How many cups are left?", "I need {a} - {b}.",
    ],
    "difference.sentence": [
        "Write a full sentence that says what {a} - {b} is.", "How much is {a} minus {b}? Use a whole sentence.",
    ],
    "copy": [
        "Please copy this list: {w}", "Write these words again in the same order: {w}", "Can you repeat the words \"{w}\"?",
        "{w}\nWrite the line above once more.", "Here is a list: {w}\nCopy it.", "Say again: {w}",
    ],
    "reverse": [
        "Please reverse this list: {w}", "Can you say the words \"{w}\" backwards?", "Put this list in reverse order: {w}",
        "{w}\nGive me the line above in reverse order.", "Here is a list: {w}\nReverse it.", "List these words from last to first: {w}",
    ],
    "json.keys": [
        "Give me a JSON object with {k} from this text: {s}", "{s}\nWrite {k} as a JSON record.", "Please extract {k} in JSON: {s}",
        "Keys: {k}. Text: {s} Write the JSON record.",
    ],
    "json.plain": [
        "Please turn the following text into a JSON record: {s}", "{s}\nGive me this as a JSON object.", "Write JSON for this sentence: {s}",
        "Can you make JSON of this? {s}",
    ],
    "person": ["{name} comes from {city} and is {age} years old.", "There is {name}, {age} years old, who lives in {city}.", "This is {name} from {city}, {age} years old."],
    "product": ["You get this {colour} {item} for {price} euros.", "We have a {item}. It is {colour} and the price is {price} euros.", "The {colour} {item} costs {price} euros."],
    "booking": ["{name} wants to come on {day} with {guests} guests.", "Please book a table for {guests} people, name {name}, on {day}.", "A table for {name}, {day}, {guests} people."],
    "pet": ["The {animal} called {name} is {age} years old.", "{name} is my {animal}, {age} years old.", "We have {name}, a {animal} of {age} years."],
    "story": [
        "Please write a story about {n} with a {t} at the {p}.", "Tell me about {n}, who has a {t} near the {p}.",
        "I want a short story with a {t}, {n} and the {p}.", "Can you make up a story? Place: {p}. Name: {n}. Thing: {t}.",
        "A short paragraph about {n} and a {t} at the {p}, please.",
    ],
    "story.count": [
        "Please tell a story in {c} sentences about {n}, the {p} and a {t}.", "Use {c} sentences to tell me about {n} and a {t} at the {p}.",
        "Write a story about {n} with a {t} near the {p}. It has {c} sentences.",
    ],
}  # fmt: skip

# Put before a training question now and then; held-out questions come bare.
OPENERS: list[str] = [
    "Please answer: ", "Hello! ", "Hi. ", "Quick question: ", "A small task. ", "OK, next one. ", "Now this: ",
    "Thanks. ", "Can you help me? ", "Here is a task.\n", "Question: ", "I have a question. ", "Next: ", "You there? ",
]  # fmt: skip

SYSTEM_TRAIN: list[str] = [
    "You are a helpful assistant.", "You are a small model. Answer the question.", "Be brief.", "You are tiny, a small language model.",
    "Answer every question. Do not say more than you need.", "You help people with words, numbers and stories.",
    "Follow the task. Do not add more.", "You are an assistant that answers questions and writes JSON.",
]  # fmt: skip
SYSTEM_HELD_OUT: list[str] = [
    "You are a helpful assistant that answers every question.", "You are a small assistant. Be brief and follow the task.",
    "Answer the question and do not add more than you need.",
]  # fmt: skip

# Worked examples inside one message. The last line asks.
SHOTS_TRAIN: list[tuple[str, str, str]] = [  # lead, example, question
    ("", "Q: {q}\nA: {a}\n", "Q: {q}\nA:"),
    ("Here are examples.\n", "Question: {q}\nAnswer: {a}\n", "Question: {q}"),
    ("Examples:\n", "{q} -> {a}\n", "Now you: {q}"),
    ("", "{q}\n{a}\n\n", "{q}"),
]
SHOTS_HELD_OUT: list[tuple[str, str, str]] = [
    ("Here are questions and answers.\n", "Question: {q}\nA: {a}\n", "Now the next question: {q}"),
    ("Read these examples:\n", "Task: {q}\nAnswer: {a}\n\n", "Task: {q}"),
]

# Not judged: only so that a first "Hello" gets a sane answer.
SMALL_TALK: list[tuple[list[str], str]] = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hi there", "Good morning", "Hey"], "Hello! How can I help you?"),
    (["How are you?", "How are you today?", "Are you well?"], "I am well, thank you. How can I help you?"),
    (
        ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Which model are you?"],
        "I am tiny, a very small language model. I know some facts, small sums, word lists, JSON records and short stories.",
    ),
    (["What can you do?", "Help", "How can you help me?", "What do you know?"],
     "I can name capitals, add and subtract small numbers, copy or reverse words, write JSON records and tell short stories."),
    (["Thanks", "Thank you", "Thanks!", "Thank you very much."], "You are welcome."),
    (["Bye", "Goodbye", "Good night"], "Goodbye!"),
]  # fmt: skip
