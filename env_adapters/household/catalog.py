"""What the household is made of: kinds of objects and places, and what can be done with them."""

from collections.abc import Iterable

FAMILIES = ("pick", "look", "clean", "heat", "cool", "pick2")

# Each family that changes an object: the place where it is done, and the state it leaves.
TOOLS = {"clean": ("sink", "clean"), "heat": ("microwave", "hot"), "cool": ("fridge", "cool")}
# States that exclude each other.
OPPOSITE = {"hot": "cool", "cool": "hot"}

DISHES = ("bowl", "cup", "mug", "pan", "plate")
CUTLERY = ("fork", "spoon")
FOOD = ("apple", "carrot", "egg", "lemon", "onion")
TOILETRIES = ("bottle", "brush", "soap", "towel")
THINGS = ("book", "card", "key", "pen", "phone", "watch")
OBJECTS = (*DISHES, *CUTLERY, *FOOD, *TOILETRIES, *THINGS)

# Kinds of object each verb works on; the families without a verb take any object.
ACCEPTS = {
    "clean": frozenset(DISHES + CUTLERY + FOOD + ("bottle", "brush", "towel")),
    "heat": frozenset(DISHES + FOOD),
    "cool": frozenset(DISHES + FOOD),
}

# Closed at the start of an episode.
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
# "in the box", but "on the shelf".
CONTAINERS = OPENABLE | {"basket", "bathtub", "box", "sink"}

# Places every room of that kind has, then places it may have.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kitchen": (("fridge", "microwave", "sink"), ("cabinet", "cabinet", "counter", "drawer", "table")),
    "bedroom": (("bed",), ("desk", "drawer", "drawer", "safe", "shelf")),
    "bathroom": (("bathtub",), ("basket", "cabinet", "shelf")),
    "lounge": (("sofa",), ("box", "desk", "shelf", "table")),
}
# Rooms where an object is likely to lie.
HOMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(DISHES, ("kitchen", "kitchen", "lounge")),
    **dict.fromkeys(CUTLERY, ("kitchen",)),
    **dict.fromkeys(FOOD, ("kitchen", "kitchen", "lounge")),
    **dict.fromkeys(TOILETRIES, ("bathroom", "bathroom", "bedroom")),
    **dict.fromkeys(THINGS, ("bedroom", "lounge")),
}
# The lamp stands on one of these, where the house has several rooms in one of those.
LAMP_PLACES = frozenset({"bed", "box", "counter", "desk", "shelf", "sofa", "table"})

LAMP_ROOMS = ("bedroom", "lounge")

# The tiny house: one room, nothing to open, few words.
TINY_PLACES = ("bed", "box", "desk", "shelf", "sofa", "table")
TINY_OBJECTS = ("apple", "book", "card", "key", "mug", "pen", "phone", "watch")


def kind_of(name: str) -> str:
    """Kind of a numbered object or place: `"mug"` for `"mug 2"`."""
    return name.rpartition(" ")[0]


def preposition(place: str) -> str:
    """`"in"` or `"on"`, as one says it of that place."""
    return "in" if kind_of(place) in CONTAINERS else "on"


def with_article(words: str) -> str:
    """`"a pen"`, `"an apple"`."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def listing(names: Iterable[str]) -> str:
    """`"a pen 1, an apple 2"`, or `"nothing"`."""
    return ", ".join(map(with_article, names)) or "nothing"
