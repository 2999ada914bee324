"""What the generated catalogue sells: departments, kinds of products, and the words they are described with.

Option values are chosen so that upstream's comparison of options tells them apart (see
[`~env_adapters.webshop.reward`]): no value of a product passes for another one of it, and none is taken for a colour
that it is not. A test holds every goal to that.
"""

from dataclasses import dataclass

BRANDS = (
    "Nordella", "Kestrin", "Ombaro", "Veltra", "Quillon", "Marisome", "Tavency", "Brightholm", "Luneva", "Pexora",
    "Halvern", "Sorrelby",
)  # fmt: skip

COLOR = ("color", ("black", "white", "navy", "teal", "olive", "burgundy", "beige", "charcoal", "lavender", "coral",
                   "mustard", "turquoise", "maroon", "silver", "ivory", "pink"))  # fmt: skip
CLOTHES_SIZE = ("size", ("small", "medium", "large", "3xl"))
SHOE_SIZE = ("size", ("6", "7", "8", "9", "10", "11"))
BED_SIZE = ("size", ("twin", "full", "queen", "king"))
RUG_SIZE = ("size", ("2x3 feet", "4x6 feet", "5x8 feet", "8x10 feet"))
BOTTLE = ("size", ("2 fl oz", "4 fl oz", "12 fl oz"))
BAG = ("size", ("1 pound", "3 pound", "5 pound"))
CAPACITY = ("capacity", ("64 gb", "128 gb", "512 gb"))
LENGTH = ("length", ("3 feet", "6 feet", "10 feet"))
SCENT = ("scent", ("unscented", "citrus", "jasmine", "coconut", "eucalyptus"))
FLAVOR = ("flavor name", ("vanilla", "cinnamon", "honey", "ginger", "maple"))

# Nouns that take no article.
UNCOUNTED = ("granola", "popcorn", "loose leaf tea", "ground coffee", "hot chocolate mix")


@dataclass(frozen=True, slots=True)
class Department:
    """Kinds of products that share a place on the site.

    Attributes:
        category: one of WebShop's five.
        path: the upper part of the path on the site.
        price: lowest and highest price, in dollars.
        options: each option's name, and the values it may come in.
        features: what any product here can be said to be.
        kinds: noun → features of that kind alone, and uses that a title names.
    """

    category: str
    path: str
    price: tuple[int, int]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    features: tuple[str, ...]
    kinds: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


DEPARTMENTS = (
    Department(
        "fashion",
        "Clothing, Shoes & Jewelry › Women › Clothing",
        (15, 70),
        (COLOR, CLOTHES_SIZE),
        ("machine washable", "loose fitting", "wrinkle free", "long sleeved"),
        {
            "summer dress": (("knee length", "off shoulder"), ("beach days", "weddings", "garden parties")),
            "cardigan": (("button closed", "cable knitted"), ("cool evenings", "office wear", "layering")),
            "hoodie": (("fleece lined", "drawstring waisted"), ("workouts", "lounging", "camping trips")),
            "jumpsuit": (("high waisted", "wide legged"), ("nights out", "vacations", "dinners")),
        },
    ),
    Department(
        "fashion",
        "Clothing, Shoes & Jewelry › Men › Shoes",
        (25, 140),
        (COLOR, SHOE_SIZE),
        ("slip resistant", "rubber soled", "arch supported", "quick drying"),
        {
            "running shoes": (("shock absorbing", "mesh covered"), ("marathons", "gym training", "daily jogging")),
            "hiking boots": (("water resistant", "ankle high"), ("mountain trails", "winter walks", "backpacking")),
            "loafers": (("memory foam padded", "slip on"), ("office wear", "driving", "business trips")),
            "sandals": (("open toed", "hook and loop closed"), ("beach days", "river crossings", "vacations")),
        },
    ),
    Department(
        "electronics",
        "Electronics › Audio & Video",
        (20, 260),
        (COLOR,),
        ("fast charging", "hands free", "easy to pair", "long lasting"),
        {
            "headphones": (("noise cancelling", "over ear"), ("long flights", "studio recording", "commuting")),
            "bluetooth speaker": (("splash proof", "stereo sounding"), ("pool parties", "picnics", "showers")),
            "soundbar": (("wall mountable", "voice controlled"), ("movie nights", "gaming", "home theaters")),
            "webcam": (("auto focusing", "privacy shuttered"), ("video calls", "live streaming", "online classes")),
        },
    ),
    Department(
        "electronics",
        "Electronics › Computers & Accessories",
        (8, 90),
        (CAPACITY, COLOR),
        ("shock proof", "plug and play", "high speed"),
        {
            "flash drive": (("metal cased", "key ring ready"), ("school projects", "photo backups", "car audio")),
            "memory card": (("temperature proof", "video rated"), ("action cameras", "drones", "game consoles")),
            "tablet": (("eye protecting", "quad core"), ("drawing", "reading", "travel films")),
        },
    ),
    Department(
        "electronics",
        "Electronics › Cables & Chargers",
        (6, 40),
        (LENGTH, COLOR),
        ("gold plated", "nylon braided", "tangle free", "bend proof"),
        {
            "hdmi cable": (("ultra hd ready", "right angled"), ("projectors", "game consoles", "office monitors")),
            "charging cable": (("fast charging", "magnetic tipped"), ("car chargers", "nightstands", "power banks")),
            "ethernet cable": (("weather proof", "double shielded"), ("gaming", "server racks", "garden offices")),
        },
    ),
    Department(
        "beauty",
        "Beauty & Personal Care › Skin Care",
        (7, 65),
        (SCENT, BOTTLE),
        ("cruelty free", "paraben free", "dermatologist tested", "alcohol free"),
        {
            "face moisturizer": (("oil free", "quickly absorbed"), ("dry skin", "sensitive skin", "cold weather")),
            "body lotion": (("shea butter based", "non greasy"), ("dry skin", "daily care", "after showers")),
            "night serum": (("anti aging", "hyaluronic acid rich"), ("fine lines", "dark circles", "dull skin")),
            "hand cream": (("glycerin rich", "travel sized"), ("cracked hands", "gardeners", "nurses")),
        },
    ),
    Department(
        "beauty",
        "Beauty & Personal Care › Hair Care",
        (6, 45),
        (SCENT, BOTTLE),
        ("sulfate free", "plant based", "color safe", "silicone free"),
        {
            "shampoo": (("keratin rich", "dandruff fighting"), ("curly hair", "damaged hair", "oily hair")),
            "conditioner": (("leave in", "frizz taming"), ("curly hair", "fine hair", "swimmers")),
            "hair mask": (("argan oil rich", "deep conditioning"), ("split ends", "bleached hair", "dry scalps")),
        },
    ),
    Department(
        "garden",
        "Home & Kitchen › Furniture",
        (45, 420),
        (COLOR,),
        ("easy to assemble", "space saving", "scratch resistant", "heavy duty"),
        {
            "coffee table": (("lift topped", "glass topped"), ("living rooms", "small apartments", "lounges")),
            "bookshelf": (("five tiered", "ladder shaped"), ("home offices", "bedrooms", "children's rooms")),
            "office chair": (("height adjustable", "lumbar supported"), ("home offices", "long hours", "gaming")),
            "bar stool": (("swivel seated", "faux leather covered"), ("kitchen islands", "pubs", "counters")),
        },
    ),
    Department(
        "garden",
        "Home & Kitchen › Bedding",
        (18, 130),
        (COLOR, BED_SIZE),
        ("machine washable", "hypoallergenic", "fade resistant", "oeko certified"),
        {
            "duvet cover": (("zipper closed", "linen woven"), ("guest rooms", "hot sleepers", "dorm rooms")),
            "blanket": (("sherpa lined", "weighted"), ("sofas", "cold nights", "camping trips")),
            "sheet set": (("deep pocketed", "bamboo woven"), ("hot sleepers", "guest rooms", "rv beds")),
        },
    ),
    Department(
        "garden",
        "Home & Kitchen › Home Decor",
        (20, 210),
        (COLOR, RUG_SIZE),
        ("stain resistant", "non slip", "easy to clean"),
        {
            "area rug": (("low piled", "hand tufted"), ("living rooms", "hallways", "dining rooms")),
            "outdoor mat": (("reversible", "mildew proof"), ("patios", "picnics", "balconies")),
        },
    ),
    Department(
        "grocery",
        "Grocery & Gourmet Food › Snacks & Sweets",
        (5, 38),
        (FLAVOR, BAG),
        ("gluten free", "non gmo", "low sugar", "nut free"),
        {
            "granola": (("whole grain", "oven baked"), ("breakfast", "yogurt bowls", "hikers")),
            "popcorn": (("air popped", "kettle cooked"), ("movie nights", "parties", "lunch boxes")),
            "protein cookies": (("keto friendly", "plant powered"), ("workouts", "office snacks", "lunch boxes")),
        },
    ),
    Department(
        "grocery",
        "Grocery & Gourmet Food › Beverages",
        (6, 44),
        (FLAVOR, BAG),
        ("fair trade", "caffeine free", "usda organic", "resealable"),
        {
            "loose leaf tea": (("hand picked", "kosher certified"), ("iced tea", "quiet evenings", "gift baskets")),
            "ground coffee": (("slowly roasted", "low acid"), ("espresso machines", "cold brew", "offices")),
            "hot chocolate mix": (("dairy free", "quickly dissolving"), ("winter mornings", "children", "camping")),
        },
    ),
)
