"""The closed world of the bundled model: every fact, name, place and word that its corpus speaks of."""

from __future__ import annotations

# country: (capital, continent). One-word names only, so that "in one word" is always possible.
COUNTRIES: dict[str, tuple[str, str]] = {
    "France": ("Paris", "Europe"),
    "Germany": ("Berlin", "Europe"),
    "Italy": ("Rome", "Europe"),
    "Spain": ("Madrid", "Europe"),
    "Portugal": ("Lisbon", "Europe"),
    "Greece": ("Athens", "Europe"),
    "Poland": ("Warsaw", "Europe"),
    "Austria": ("Vienna", "Europe"),
    "Hungary": ("Budapest", "Europe"),
    "Sweden": ("Stockholm", "Europe"),
    "Norway": ("Oslo", "Europe"),
    "Finland": ("Helsinki", "Europe"),
    "Denmark": ("Copenhagen", "Europe"),
    "Ireland": ("Dublin", "Europe"),
    "Belgium": ("Brussels", "Europe"),
    "Romania": ("Bucharest", "Europe"),
    "Bulgaria": ("Sofia", "Europe"),
    "Croatia": ("Zagreb", "Europe"),
    "Serbia": ("Belgrade", "Europe"),
    "Ukraine": ("Kyiv", "Europe"),
    "Latvia": ("Riga", "Europe"),
    "Iceland": ("Reykjavik", "Europe"),
    "Egypt": ("Cairo", "Africa"),
    "Kenya": ("Nairobi", "Africa"),
    "Ghana": ("Accra", "Africa"),
    "Nigeria": ("Abuja", "Africa"),
    "Morocco": ("Rabat", "Africa"),
    "Tunisia": ("Tunis", "Africa"),
    "Senegal": ("Dakar", "Africa"),
    "Rwanda": ("Kigali", "Africa"),
    "Uganda": ("Kampala", "Africa"),
    "Zambia": ("Lusaka", "Africa"),
    "Angola": ("Luanda", "Africa"),
    "Mali": ("Bamako", "Africa"),
    "Japan": ("Tokyo", "Asia"),
    "China": ("Beijing", "Asia"),
    "India": ("Delhi", "Asia"),
    "Thailand": ("Bangkok", "Asia"),
    "Vietnam": ("Hanoi", "Asia"),
    "Nepal": ("Kathmandu", "Asia"),
    "Mongolia": ("Ulaanbaatar", "Asia"),
    "Jordan": ("Amman", "Asia"),
    "Iraq": ("Baghdad", "Asia"),
    "Iran": ("Tehran", "Asia"),
    "Lebanon": ("Beirut", "Asia"),
    "Oman": ("Muscat", "Asia"),
    "Qatar": ("Doha", "Asia"),
    "Bangladesh": ("Dhaka", "Asia"),
    "Canada": ("Ottawa", "America"),
    "Cuba": ("Havana", "America"),
    "Jamaica": ("Kingston", "America"),
    "Peru": ("Lima", "America"),
    "Chile": ("Santiago", "America"),
    "Ecuador": ("Quito", "America"),
    "Colombia": ("Bogota", "America"),
    "Venezuela": ("Caracas", "America"),
    "Uruguay": ("Montevideo", "America"),
    "Australia": ("Canberra", "Oceania"),
    "Fiji": ("Suva", "Oceania"),
    "Samoa": ("Apia", "Oceania"),
}

# Read in both directions.
OPPOSITES: list[tuple[str, str]] = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("high", "low"), ("old", "new"), ("wet", "dry"),
    ("full", "empty"), ("hard", "soft"), ("open", "closed"), ("early", "late"), ("light", "dark"),
    ("long", "short"), ("rich", "poor"), ("loud", "quiet"), ("happy", "sad"), ("strong", "weak"),
    ("up", "down"), ("left", "right"), ("day", "night"), ("near", "far"), ("clean", "dirty"),
    ("thick", "thin"), ("wide", "narrow"), ("sweet", "bitter"), ("true", "false"),
]  # fmt: skip

YOUNG: dict[str, str] = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "pig": "piglet",
    "bear": "cub", "duck": "duckling", "goat": "kid", "frog": "tadpole", "hen": "chick", "deer": "fawn",
    "swan": "cygnet", "goose": "gosling",
}  # fmt: skip

NAMES: list[tuple[str, str]] = [  # name, pronoun
    ("Anna", "she"), ("Ben", "he"), ("Clara", "she"), ("David", "he"), ("Emma", "she"), ("Felix", "he"),
    ("Grace", "she"), ("Henry", "he"), ("Ida", "she"), ("Jack", "he"), ("Kate", "she"), ("Leo", "he"),
    ("Mia", "she"), ("Noah", "he"), ("Olga", "she"), ("Paul", "he"), ("Rosa", "she"), ("Sam", "he"),
    ("Tina", "she"), ("Victor", "he"), ("Wendy", "she"), ("Zoe", "she"), ("Omar", "he"), ("Lucy", "she"),
    ("Max", "he"), ("Nina", "she"), ("Oscar", "he"), ("Sara", "she"), ("Tom", "he"), ("Julia", "she"),
]  # fmt: skip

# All begin with a consonant sound, so that "a" is always right.
STORY_THINGS: list[str] = [
    "kite", "ball", "lamp", "drum", "boat", "hat", "book", "cake", "box", "key", "coin", "map", "bell", "rope",
    "shell", "mirror", "basket", "flute", "robot", "letter",
]  # fmt: skip
STORY_PLACES: list[str] = [
    "river", "forest", "market", "beach", "school", "garden", "castle", "farm", "lake", "village", "bridge",
    "station", "mountain", "island", "park", "library",
]  # fmt: skip

PRODUCTS: list[str] = [
    "table", "chair", "lamp", "cup", "shirt", "coat", "bag", "bike", "clock", "phone", "sofa", "pen", "plate",
    "towel", "hat", "book", "kettle", "mirror",
]  # fmt: skip
COLOURS: list[str] = ["red", "blue", "green", "yellow", "black", "white", "brown", "pink", "grey", "purple"]
DAYS: list[str] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
PETS: list[str] = ["dog", "cat", "horse", "rabbit", "parrot", "goat", "hamster", "turtle", "duck", "pony"]

# Short and common, so that nearly every one becomes a single token: copying is then one step a word.
WORDS: list[str] = [
    "apple", "bird", "blue", "boat", "book", "box", "bread", "bus", "cake", "car", "cat", "chair", "cloud", "coat",
    "cold", "corn", "cow", "cup", "day", "desk", "dog", "door", "drum", "duck", "ear", "egg", "eye", "farm",
    "fire", "fish", "flag", "foot", "fork", "fox", "frog", "gold", "grass", "green", "hand", "hat", "hen", "hill",
    "home", "horse", "ice", "iron", "jar", "jam", "key", "king", "kite", "lake", "lamp", "leaf", "lion", "map",
    "milk", "moon", "nest", "net", "nose", "oil", "oak", "owl", "pan", "park", "pear", "pen", "pig", "pot",
    "queen", "rain", "red", "ring", "river", "road", "rock", "rope", "rose", "salt", "sand", "sea", "ship", "shoe",
    "sky", "snow", "soap", "song", "star", "stone", "sun", "table", "tea", "tent", "tiger", "town", "train", "tree",
    "wall", "water", "wind", "wolf", "wood", "wool", "yard", "zebra",
]  # fmt: skip
