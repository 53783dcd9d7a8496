"""Generate conversations with a cook from a grammar: the sample of the package, and as many as a benchmark needs.

A small model has something to learn from them: amounts follow from servings, steps name the ingredients again, and
answers to follow-up questions depend on the turns before. Conversation i depends on (seed, i) alone. Run as a program
it writes the package's files, the first 1,000 of seed 0. Every dish is cooked for science only.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

# --- foods, dishes and phrases


@dataclass(frozen=True)
class Food:
    """An ingredient: grams (or pieces, or spoons) a serving, its preparation and its substitute."""

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
    "smoked paprika", "ground cumin", "coriander seed", "turmeric", "garam masala", "dried oregano", "cinnamon",
    "fennel seed", "sumac", "black pepper", "caraway", "za'atar",
)  # fmt: skip
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
    "lemon juice", "chopped parsley", "fresh coriander", "toasted almonds", "a spoonful of yoghurt", "sesame seeds",
    "grated parmesan", "torn basil", "pickled onions", "pumpkin seeds", "lime zest", "dill",
)  # fmt: skip
DAIRY_FINISHES = ("a spoonful of yoghurt", "grated parmesan")


@dataclass(frozen=True)
class Dish:
    """A dish: its name, vessel and minutes, and whether liquid and staple go in."""

    name: str
    vessel: str
    minutes: int
    liquid: bool
    staple: str  # "in" the pot, next to it, or "" for none


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
    "Quick", "Smoky", "Golden", "Sunday", "Weeknight", "Fiery", "Humble", "Grandmother's", "Rainy-Day", "Lazy",
    "Festive", "One-Pot", "Harbour", "Garden", "Midnight",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful cook. Answer with a title, the ingredients and numbered steps.",
    "You are a patient cooking teacher who never judges an empty fridge.",
    "Answer as a chef of few words.",
    "You write recipes for people with one pan and little time.",
    "You are a friendly kitchen assistant. Amounts are metric.",
)
WINES = (
    "a dry riesling", "a young pinot noir", "a crisp vinho verde", "a cheerful lambrusco", "a white burgundy",
    "a chilled gamay", "a stout, if beer counts", "an off-dry cider", "a mineral chablis",
)  # fmt: skip
JOKES = (
    "The smoke alarm is not a timer.", "If anyone asks, it took you all day.",
    "The cook's share is eaten standing up and is not counted as a serving.",
    "Leftovers are tomorrow's lunch, unless they are tonight's second helping.",
    "Taste before you salt; regret is hard to dilute.", "Do the washing-up while it simmers and feel superior.",
)  # fmt: skip


Turn = dict[str, str]


@dataclass
class Recipe:
    """One drawn dish, from which follow-up questions are answered."""

    dish: Dish
    title: str
    servings: int
    diet: str
    foods: list[Food]
    spices: list[str]
    finish: str

    @property
    def main(self) -> Food:
        return self.foods[0]


def conversations(n: int, seed: int) -> Iterator[list[Turn]]:
    """Yield n conversations as lists of {role, content}; the i-th does not depend on n."""
    for i in range(n):
        yield _conversation(Random(f"recipes {seed} {i}"))


def preferences(n: int, seed: int) -> Iterator[dict[str, list[Turn]]]:
    """Yield n pairs as {prompt, chosen, rejected}; the rejected recipe has the chosen one's steps in another order."""
    for i in range(n):
        yield _preference(Random(f"preferences {seed} {i}"))


def lines(rows: Iterator[dict[str, Any]]) -> bytes:
    """Return rows as JSON Lines."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def chats(n: int, seed: int) -> bytes:
    """Return n conversations as JSON Lines, one {"messages": [...]} a row."""
    return lines({"messages": messages} for messages in conversations(n, seed))


def main() -> None:
    folder = Path(__file__).parent.parent / "src" / "optrush" / "data"
    for name, rows in (("recipes", chats(1000, 0)), ("recipe_pairs", lines(preferences(1000, 0)))):
        (folder / f"{name}.jsonl.xz").write_bytes(lzma.compress(rows, preset=9 | lzma.PRESET_EXTREME))


def _conversation(random: Random) -> list[Turn]:
    """Return a question, an answer and up to three follow-ups; lengths vary by a factor of fifty, as real ones do."""
    recipe = _recipe(random)
    follow_ups = random.sample((_scale, _substitute, _how_long, _wine, _keep), 4)
    kind = random.choices(("recipe", "question", "menu"), (6, 3, 1))[0]
    if kind == "recipe":
        turns = [(_question(random, recipe), _answer(random, recipe))]
    elif kind == "question":
        question, answer = follow_ups.pop()(random, recipe)
        turns = [(f"I am making {recipe.title}, for {recipe.servings}. {question}", answer)]
    else:
        turns = [_menu(random, recipe)]
    for follow_up in follow_ups[: random.choices((0, 1, 2, 3), (5, 4, 3, 2))[0]]:
        turns.append(follow_up(random, recipe))
    messages: list[Turn] = []
    if random.random() < 0.4:
        messages.append({"role": "system", "content": random.choice(SYSTEMS)})
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _preference(random: Random) -> dict[str, list[Turn]]:
    recipe = _recipe(random)
    steps = _steps(random, recipe)
    mixed = steps
    while mixed == steps:
        mixed = random.sample(steps, len(steps))
    chosen, rejected = ("\n".join([recipe.title, "", *_numbered(order)]) for order in (steps, mixed))
    return {
        "prompt": [{"role": "user", "content": f"{_question(random, recipe)} Just the method, please."}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def _menu(random: Random, recipe: Recipe) -> tuple[str, str]:
    courses = [recipe] + [_recipe(random, recipe.diet) for _ in range(random.randint(1, 5))]
    for course in courses:
        course.servings = recipe.servings
    diet = f"{recipe.diet} " if recipe.diet else ""
    main = recipe.main.name
    question = f"Write a {diet}menu of {len(courses)} dishes for {recipe.servings}, please, with {main} first."
    return question, "\n\n".join(_answer(random, course) for course in courses)


def _recipe(random: Random, diet: str | None = None) -> Recipe:
    if diet is None:
        diet = random.choice(("", "", "", "vegetarian", "vegan"))

    def allowed(foods: tuple[Food, ...]) -> list[Food]:
        return [food for food in foods if not (food.meat and diet) and not (food.dairy and diet == "vegan")]

    dish = random.choice(DISHES)
    foods = [random.choice(allowed(MAINS))]
    foods += random.sample(allowed(VEGETABLES), random.randint(1, 5))
    foods += random.sample(AROMAS, random.randint(0, 3))
    if dish.staple:
        foods.append(random.choice(STAPLES))
    if dish.liquid:
        foods.append(random.choice(allowed(LIQUIDS)))
    foods.append(random.choice(allowed(FATS)))
    finish = random.choice([f for f in FINISHES if diet != "vegan" or f not in DAIRY_FINISHES])
    mood = random.choice(MOODS)
    title = f"{mood} {foods[0].name.title().replace(chr(39) + 'S', chr(39) + 's')} {dish.name.title()}"
    spices = random.sample(SPICES, random.randint(1, 3))
    return Recipe(dish, title, random.choice((1, 2, 2, 3, 4, 4, 6, 8)), diet, foods, spices, finish)


def _question(random: Random, recipe: Recipe) -> str:
    dish, main, other = recipe.dish.name, recipe.main.name, recipe.foods[1].name
    diet = f"{recipe.diet} " if recipe.diet else ""
    people = "just me" if recipe.servings == 1 else f"{recipe.servings} people"
    openings = (
        f"How do I make a {diet}{dish} with {main}?",
        f"I have {main} and {_some(recipe.foods[1])}. What can I cook?",
        f"Please give me a {diet}recipe for {dish} with {main}, for {people}.",
        f"{main.capitalize()} {dish}, {diet or 'nothing fancy, '}for {people}?".replace(" ,", ","),
        f"My fridge holds {main}, {other} and regret. Can you save dinner for {people}?",
        f"I want something {diet or 'warm '}tonight. There is {main} left, and I am in the mood for {dish}.",
    )
    question = random.choice(openings)
    if random.random() < 0.3:
        question += f" I have about {_minutes(recipe)} minutes."
    if random.random() < 0.15:
        question += " I am a beginner, so please be gentle."
    return question


def _answer(random: Random, recipe: Recipe) -> str:
    lines = [recipe.title, f"Serves {recipe.servings}, ready in {_minutes(recipe)} minutes.", "", "Ingredients:"]
    lines += [f"- {_amount(food, recipe.servings)}" for food in recipe.foods]
    lines += [f"- {_spoons(recipe.servings)} {spice}" for spice in recipe.spices]
    lines += [f"- {recipe.finish}, to finish", "", "Method:"]
    lines += _numbered(_steps(random, recipe))
    if random.random() < 0.5:
        lines += ["", random.choice(JOKES)]
    return "\n".join(lines)


def _numbered(steps: list[str]) -> list[str]:
    return [f"{number}. {step}" for number, step in enumerate(steps, 1)]


def _steps(random: Random, recipe: Recipe) -> list[str]:
    chosen = recipe.foods
    fat = chosen[-1]
    staple = next((food for food in chosen if food in STAPLES), None)
    liquid = next((food for food in chosen if food in LIQUIDS), None)
    garnish = [food for food in chosen[1:] if food in VEGETABLES]
    aromas = [food for food in chosen if food in AROMAS]
    dish, main = recipe.dish, recipe.main
    steps = [f"Prepare the {main.name}: {main.cut}. The {garnish[0].name} wants to be {garnish[0].cut}."]
    steps += [f"Have the {food.name} {food.cut}." for food in garnish[1:]]
    verb = random.choice(("Heat", "Warm", "Heat" if fat.name == "olive oil" else "Melt"))
    steps.append(f"{verb} the {fat.name} in the {dish.vessel} over a {random.choice(('medium', 'high', 'low'))} heat.")
    if aromas:
        names = _and([f"{food.name}, {food.cut}" for food in aromas], "; ")
        steps.append(f"Add the {names}. Stir until it smells like a good idea.")
    minutes = max(3, dish.minutes // 5)
    steps.append(f"Add the {main.name} and the {_and(recipe.spices)} and cook for {minutes} minutes until golden.")
    minutes = max(3, dish.minutes // 6)
    steps.append(f"Add the {_and([food.name for food in garnish])} and cook for another {minutes} minutes.")
    if staple and dish.staple == "in":
        steps.append(f"Stir in the {staple.name}, {staple.cut}.")
    if liquid:
        steps.append(f"Pour in the {liquid.name} and simmer for {max(5, dish.minutes // 2)} minutes.")
    if staple and dish.staple == "beside":
        steps.append(f"Meanwhile cook the {staple.name}, {staple.cut}, and serve it beside.")
    steps.append(f"Finish with {recipe.finish}, and salt to taste.")
    return steps


def _scale(random: Random, recipe: Recipe) -> tuple[str, str]:
    servings = random.choice([n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12) if n != recipe.servings])
    question = random.choice((
        f"And for {servings}?", f"Can you scale it to {servings} servings?", f"What if we are {servings}?",
    ))  # fmt: skip
    lines = [f"For {servings} you need:"] + [f"- {_amount(food, servings)}" for food in recipe.foods]
    lines += [f"- {_spoons(servings)} {spice}" for spice in recipe.spices]
    if servings > 2 * recipe.servings:
        lines.append(f"Use a larger {recipe.dish.vessel.split()[-1]}, or two.")
    recipe.servings = servings
    return question, "\n".join(lines)


def _substitute(random: Random, recipe: Recipe) -> tuple[str, str]:
    food = random.choice(recipe.foods)
    question = random.choice((
        f"I have no {food.name}. What can I use instead?", f"Can I leave out the {food.name}?",
        f"What could replace the {food.name}?",
    ))  # fmt: skip
    answer = f"Take {food.instead} instead of the {food.name}."
    if food is recipe.main:
        answer += f" It carries the {recipe.dish.name}, so season it well with {_and(recipe.spices)}."
    elif food.unit in ("g", "ml"):
        answer += f" The same amount will do: {_measure(food, recipe.servings)} for {recipe.servings}."
    else:
        answer += " Nobody will notice, and if they do, call it a variation."
    return question, answer


def _how_long(random: Random, recipe: Recipe) -> tuple[str, str]:
    minutes, hands = _minutes(recipe), len(recipe.foods) * 2
    question = random.choice(("How long does it take?", "Will it be ready in an hour?", "How much of that is work?"))
    answer = f"About {minutes} minutes, of which {hands} are spent with a knife in your hand."
    if question.startswith("Will"):
        answer = ("Yes. " if minutes <= 60 else "Not quite. ") + answer
    return question, answer


def _wine(random: Random, recipe: Recipe) -> tuple[str, str]:
    question = random.choice(("What should I drink with it?", "Which wine goes with that?", "And to drink?"))
    spice = recipe.spices[0]
    answer = f"With {spice} and {recipe.main.name} I would open {random.choice(WINES)}."
    return question, answer + random.choice(
        ("", " Water is fine too.", f" Some of it may fall into the {recipe.dish.vessel}.")
    )


def _keep(random: Random, recipe: Recipe) -> tuple[str, str]:
    days = 1 if recipe.main.meat else 3
    question = random.choice(("Can I make it the day before?", "How long does it keep?", "Can I freeze it?"))
    answer = f"It keeps for {days} day{'s' * (days > 1)} in the fridge"
    if recipe.dish.name == "salad":
        return question, answer + ", but add the dressing at the last moment. Do not freeze it."
    return question, answer + f" and for three months in the freezer. Add the {recipe.finish} after warming it up."


def _minutes(recipe: Recipe) -> int:
    return recipe.dish.minutes + 5 * ((len(recipe.foods) + 1) // 2)


def _amount(food: Food, servings: int) -> str:
    cut = f", {food.cut}" if food.cut else ""
    return f"{_measure(food, servings)} {_plural(food, servings)}{cut}"


def _measure(food: Food, servings: int) -> str:
    amount = food.each * servings
    if food.unit in ("g", "ml"):
        return f"{round(amount / 5) * 5 or 5} {food.unit}"
    whole, half = int(amount), amount % 1 >= 0.5
    number = (str(whole) if whole else "") + ("½" if half else "") or "½"
    return f"{number} {food.unit}".strip()


def _plural(food: Food, servings: int) -> str:
    if food.unit or food.each * servings <= 1:
        return food.name
    head, of, tail = food.name.partition(" of ")
    if head.endswith("f") and head != "beef":
        head = head[:-1] + "ve"
    return head + ("es" if head.endswith(("o", "ch")) and head != "avocado" else "s") + of + tail


def _some(food: Food) -> str:
    return f"some {food.name}" if food.unit else f"a few {_plural(food, 12)}"


def _spoons(servings: int) -> str:
    return "a pinch of" if servings == 1 else f"{max(1, servings // 2)} tsp"


def _and(names: list[str], comma: str = ", ") -> str:
    return names[0] if len(names) == 1 else comma.join(names[:-1]) + " and " + names[-1]


if __name__ == "__main__":
    main()
