"""What the cook of the `recipes` sample has in the house: foods, dishes, and things to say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Food:
    """An ingredient: grams (or pieces, or spoons) a serving, how it is prepared, and what stands in for it."""

    name: str
    unit: str  # "g", "ml", "" for pieces, or a spoon
    each: float
    cut: str
    instead: str
    meat: bool = False
    dairy: bool = False


def _foods(unit: str, table: str, *, meat: bool = False, dairy: bool = False) -> tuple[Food, ...]:
    rows = (row.split("|") for row in table.strip().splitlines())
    return tuple(
        Food(name.strip(), unit, float(each), cut.strip(), instead.strip(), meat, dairy)
        for name, each, cut, instead in rows
    )


MAINS = (
    *_foods("g", """
        chicken thighs|150|cut into strips|firm tofu
        minced beef|120|crumbled|brown lentils
        smoked bacon|60|diced|smoked tofu
        lamb shoulder|160|cubed|jackfruit
        salmon fillet|140|skinned and cubed|marinated tempeh
        cod|150|cut into chunks|king oyster mushrooms
        prawns|110|peeled|artichoke hearts
        pork loin|150|sliced thinly|seitan
    """, meat=True),
    *_foods("g", """
        chickpeas|120|drained and rinsed|white beans
        red lentils|80|rinsed|yellow split peas
        black beans|110|drained and rinsed|kidney beans
        firm tofu|130|pressed and cubed|tempeh
        chestnut mushrooms|140|quartered|oyster mushrooms
        cauliflower|180|broken into florets|broccoli
        sweet potato|200|cubed|pumpkin
        aubergine|170|cut into rounds|courgette
        pumpkin|200|cut into wedges|carrots
    """),
    *_foods("g", """
        halloumi|90|sliced|firm tofu
        paneer|100|cubed|firm tofu
        goat's cheese|50|crumbled|cashew cream
    """, dairy=True),
)  # fmt: skip
VEGETABLES = (
    *_foods("", """
        onion|0.5|chopped finely|two shallots
        red onion|0.5|cut into half-moons|a bunch of spring onions
        carrot|1|grated|parsnip
        leek|0.5|cut into rings|onion
        red pepper|0.5|cut into strips|roasted peppers from a jar
        tomato|2|chopped|tinned tomatoes
        courgette|0.5|cut into half-moons|aubergine
        stick of celery|1|sliced|fennel
        potato|2|peeled and diced|celeriac
        fennel bulb|0.5|shaved|celery and a pinch of aniseed
    """),
    *_foods("g", """
        spinach|60|washed|chard
        green beans|80|trimmed|sugar snaps
        peas|60|thawed|edamame
        kale|50|stripped from its stalks|savoy cabbage
        sweetcorn|50|drained|peas
        beetroot|90|boiled and diced|carrots
        white cabbage|90|shredded|pak choi
    """),
)  # fmt: skip
STAPLES = _foods("g", """
    basmati rice|75|rinsed until the water runs clear|bulgur
    spaghetti|100|kept whole, please|any pasta that is long enough to argue with
    couscous|70|covered with hot stock|millet
    rice noodles|80|soaked|glass noodles
    pearl barley|70|rinsed|spelt
    polenta|60|stirred with patience|semolina
    orzo|80|rinsed|small pasta shells
    quinoa|65|rinsed twice|couscous
""")  # fmt: skip
AROMAS = _foods("", """
    clove of garlic|1|crushed|a pinch of garlic powder
    red chilli|0.5|seeded and sliced|chilli flakes
    thumb of ginger|0.5|grated|ground ginger
    stalk of lemongrass|0.5|bruised|lemon zest
    bay leaf|0.5|left whole|a sprig of thyme
    sprig of rosemary|0.5|stripped|sage
""")  # fmt: skip
SPICES = (
    "smoked paprika",
    "ground cumin",
    "coriander seed",
    "turmeric",
    "garam masala",
    "dried oregano",
    "cinnamon",
    "fennel seed",
    "sumac",
    "black pepper",
    "caraway",
    "za'atar",
)
FATS = (
    Food("olive oil", "tbsp", 0.5, "", "rapeseed oil"),
    Food("butter", "tbsp", 0.5, "", "olive oil", dairy=True),
    Food("coconut oil", "tbsp", 0.5, "", "sunflower oil"),
)
LIQUIDS = (
    Food("vegetable stock", "ml", 200, "", "water and a little miso"),
    Food("coconut milk", "ml", 120, "", "oat cream"),
    Food("tinned tomatoes", "g", 130, "", "fresh tomatoes and some patience"),
    Food("cream", "ml", 70, "", "oat cream", dairy=True),
    Food("dry cider", "ml", 90, "", "apple juice with a dash of vinegar"),
)
FINISHES = (
    "lemon juice",
    "chopped parsley",
    "fresh coriander",
    "toasted almonds",
    "a spoonful of yoghurt",
    "sesame seeds",
    "grated parmesan",
    "torn basil",
    "pickled onions",
    "pumpkin seeds",
    "lime zest",
    "dill",
)
DAIRY_FINISHES = ("a spoonful of yoghurt", "grated parmesan")


@dataclass(frozen=True)
class Dish:
    """What a dish is called, the vessel and verb that make it, its minutes, and whether liquid and staple go in."""

    name: str
    vessel: str
    minutes: int
    liquid: bool
    staple: str  # "in" the pot, "beside", or "" for none


DISHES = tuple(
    Dish(name, vessel, int(minutes), liquid == "wet", staple)
    for name, vessel, minutes, liquid, staple in (
        row.split("|")
        for row in (
            "curry|wide pan|25|wet|beside", "stew|heavy pot|60|wet|", "soup|large pot|30|wet|",
            "risotto|heavy pot|35|wet|in", "traybake|roasting tin|45|dry|", "stir-fry|wok|12|dry|beside",
            "gratin|baking dish|50|wet|", "salad|large bowl|15|dry|in", "pilaf|lidded pan|30|wet|in",
            "tagine|clay pot|70|wet|beside", "frittata|ovenproof pan|25|dry|", "chilli|heavy pot|55|wet|beside",
            "casserole|ovenproof pot|80|wet|", "pasta|large pan|20|wet|beside", "tacos|frying pan|20|dry|",
            "pie|pie dish|65|wet|", "skewers|grill pan|18|dry|beside", "noodle bowl|wok|15|wet|beside",
            "stuffed peppers|baking dish|50|dry|in", "hash|frying pan|25|dry|", "dal|small pot|30|wet|beside",
            "paella|paella pan|40|wet|in", "flatbreads|griddle|30|dry|", "goulash|heavy pot|90|wet|",
        )
    )
)  # fmt: skip
MOODS = (
    "Quick",
    "Smoky",
    "Golden",
    "Sunday",
    "Weeknight",
    "Fiery",
    "Humble",
    "Grandmother's",
    "Rainy-Day",
    "Lazy",
    "Festive",
    "One-Pot",
    "Harbour",
    "Garden",
    "Midnight",
)
SYSTEMS = (
    "You are a helpful cook. Answer with a title, the ingredients and numbered steps.",
    "You are a patient cooking teacher who never judges an empty fridge.",
    "Answer as a chef of few words.",
    "You write recipes for people with one pan and little time.",
    "You are a friendly kitchen assistant. Amounts are metric.",
)
WINES = (
    "a dry riesling",
    "a young pinot noir",
    "a crisp vinho verde",
    "a cheerful lambrusco",
    "a white burgundy",
    "a chilled gamay",
    "a stout, if beer counts",
    "an off-dry cider",
    "a mineral chablis",
)
JOKES = (
    "The smoke alarm is not a timer.",
    "If anyone asks, it took you all day.",
    "The cook's share is eaten standing up and is not counted as a serving.",
    "Leftovers are tomorrow's lunch, unless they are tonight's second helping.",
    "Taste before you salt; regret is hard to dilute.",
    "Do the washing-up while it simmers and feel superior.",
)
