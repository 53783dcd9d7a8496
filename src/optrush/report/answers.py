"""FILE.html of `optrush generate`: each prompt with its answer, or two side by side. One file that fetches nothing.

In the look of the reports; what a page may hold and fetch is said in bench/report. What models and users wrote is
escaped, and shown without control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optrush.console import shown
from optrush.report import charts
from optrush.trainer.run_dir import put

MOST = 500  # rows on a page


def write_answers_page(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The page of these answers, whole or not at all."""
    put(path, answers_page(facts, rows))


def answers_page(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(charts.__file__).parent)
    house = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    house.filters |= {"seen": shown, "text": text_of, "many": lambda n: f"{n:,.0f}"}
    content = {"f": facts, "rows": rows[:MOST], "left_out": max(0, len(rows) - MOST)}
    return house.get_template("answers.html.j2").render(**content, hatching=charts.hatching())


def text_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as a person reads it."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
