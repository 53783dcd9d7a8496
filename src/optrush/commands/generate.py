"""generate: answers to a file of prompts, by one model or two; and judging two without knowing whose is whose."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from optrush.commands.options import Json
from optrush.commands.sampling import (
    Greedy,
    MaxTokens,
    Plain,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
    demand_used,
    drawn,
    given,
)
from optrush.console import shown
from optrush.errors import ConfigError

if TYPE_CHECKING:
    from optrush.config import Sampling
    from optrush.generate import Place, Prompt
    from optrush.judge import Case, Verdict

SAYS_EVERY_s = 10.0  # off a terminal


def generate(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="a run's folder, a Hugging Face folder or hub id, tiny")
    ] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="rows to be answered")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.jsonl", help="the answers")] = None,
    base: Annotated[bool, typer.Option("--base", help="also by the model that the run began with")] = False,
    against: Annotated[str | None, typer.Option("--against", metavar="OTHER", help="also by this model")] = None,
    judge_by: Annotated[
        Literal["reference"] | None,
        typer.Option("--judge-by", help="which of two models finds the rows' own answers likelier"),
    ] = None,
    judge: Annotated[
        Path | None, typer.Option("--judge", metavar="FILE.jsonl", help="judge two answers blindly, in the terminal")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="prompts answered at once")] = 8,
    system: System = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    max_tokens: MaxTokens = 512,
    greedy: Greedy = False,
    seed: Seed = None,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Answer a file of prompts.

    Rows are messages (answered after the last user turn), prompt or text, in any format that training reads. FILE.jsonl
    gets a row for each, FILE.html shows them; --base or --against answers twice.

    --judge FILE.jsonl, alone, shows two answers at a time in random order: 1 or 2 is better, 0 neither, q stops. The
    verdicts lie in FILE.verdicts.jsonl, and judging goes on where it stopped. What is printed is how often the model
    was preferred to the other, with a 95 % interval.
    """
    if judge is not None:
        others = given(context, context.params.keys() - {"model", "judge", "seed", "as_json"})
        if model is not None or others:
            found = f"{min(others)} beside it" if others else "a model beside it"
            raise ConfigError(f"--judge {judge}", found, "generate first; then: optrush generate --judge FILE.jsonl")
        _judge(judge, 0 if seed is None else seed, as_json)
        return
    if model is None or prompts is None or out is None:
        do = "optrush generate MODEL --prompts FILE --out FILE.jsonl"
        raise ConfigError("optrush generate", "no MODEL, --prompts or --out", do)
    demand_used(context)
    if base and against is not None:
        raise ConfigError(f"--base with --against {against}", "one other model is asked", "leave one of the two out")
    if judge_by is not None and not base and against is None:
        raise ConfigError(f"--judge-by {judge_by}", "one model: nothing to compare", "add --base or --against OTHER")
    _check_out(out)
    from optrush.config import Sampling

    sampling = Sampling(temperature, top_p, top_k, max_tokens, greedy)
    from optrush import generate
    from optrush.generate import prompts as read

    place = generate.find(model)
    other = generate.base_of(place, "--base") if base else None if against is None else generate.find(against)
    asked = list(read(prompts, plain, system))
    if judge_by is not None and not any(p.row for p in asked):
        found = "no row has an answer of its own"
        raise ConfigError(f"--judge-by {judge_by} on {prompts}", found, "give rows that end with an assistant turn")
    facts = _answer(asked, place, other, sampling, drawn(seed), batch, out, measures=judge_by is not None)
    if as_json:
        print(json.dumps(facts))
        return
    if facts["likelier"] is not None:
        print(facts["likelier_said"], file=sys.stderr)
    print(f"{out}\n{facts['page']}")


def _check_out(out: Path) -> None:
    asked = f"--out {out}"
    if out.suffix != ".jsonl":
        raise ConfigError(asked, "no name of JSON Lines", "end it in .jsonl")
    for path in (out, out.with_suffix(".html")):
        if path.exists():
            raise ConfigError(asked, f"{path} exists", "name another file, or remove it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(asked, f"no folder {out.parent}", "make it first")


def _answer(
    asked: list[Prompt], place: Place, other: Place | None, sampling: Sampling, seed: int, batch: int, out: Path,
    *, measures: bool,
) -> dict[str, Any]:  # fmt: skip
    """Asks one model after the other, writes the rows as they come, then the page."""
    from optrush import generate
    from optrush.generate import ask, likelier
    from optrush.report import answers as answers_page

    how: dict[str, Any] = {"seed": seed, "batch": batch, "measures": measures}
    total, rows = len(asked) * (1 if other is None else 2), []
    with _progress(total) as advance:
        theirs = None
        if other is not None:
            template = generate.template_of(place)
            theirs = list(ask(other, asked, sampling, template=template, advance=advance, **how))
        part, ours = out.with_name(out.name + ".part"), []  # a part stays when this is stopped
        answers = ask(place, asked, sampling, advance=advance, **how)
        first = next(answers)  # nothing is written before everything that can be refused was
        with part.open("w", encoding="utf-8") as file:
            for n, said in enumerate(chain([first], answers)):
                ours.append(said)
                row = {"prompt": asked[n].shown(), **said.facts()}
                row |= {} if theirs is None else theirs[n].facts("other")
                row |= {} if asked[n].reference is None else {"reference": asked[n].reference}
                rows.append(row)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
        part.rename(out)
    facts = {
        "model": place.name, "other": None if other is None else other.name, "rows": len(rows), "out": str(out),
        "page": str(out.with_suffix(".html")), "seed": seed, "sampling": dataclasses.asdict(sampling),
        "tokens": sum(s.answer.tokens for s in ours), "likelier": None, "likelier_said": None,
    }  # fmt: skip
    if measures and theirs is not None:
        found = likelier(list(zip(ours, theirs, strict=True)))
        facts["likelier"] = found.facts()
        facts["likelier_said"] = f"the reference is likelier under {place.name} than under {facts['other']}: {found}"
    answers_page.write_answers_page(facts, rows, out.with_suffix(".html"))
    return facts


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar with an ETA on a terminal, now and then a line elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from optrush.console import err

    begun = last = time.monotonic()
    done = 0
    with Progress(
        MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(), console=err, transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=total)

        def advance(n: int) -> None:
            nonlocal done, last
            done += n
            progress.advance(task, n)
            now = time.monotonic()
            if not sys.stderr.isatty() and now - last > SAYS_EVERY_s:
                last, eta = now, (now - begun) / done * (total - done)
                print(f"{done}/{total} answers  ETA {eta:.0f} s", file=sys.stderr)

        yield advance


# --- judging


def _judge(path: Path, seed: int, as_json: bool) -> None:
    from optrush import judge as judging

    known = judging.cases(path, seed)
    kept = path.with_name(path.stem + ".verdicts.jsonl")
    given = judging.verdicts(kept, known)
    with kept.open("a", encoding="utf-8") as file:
        for case in known:
            if case.row in given:
                continue
            verdict: Verdict | None = "tie" if case.answer == case.other else _asked(case, len(given), len(known))
            if verdict is None:
                break
            given[case.row] = verdict
            file.write(judging.line(case, verdict, seed))
            file.flush()
    found = judging.rate(list(given.values()))
    if as_json:
        facts = {"judged": len(given), "rows": len(known), "preferred": found.facts(), "verdicts": str(kept)}
        print(json.dumps(facts))
        return
    print(f"judged {len(given)} of {len(known)}; `answer` preferred to `other`: {found}")


def _asked(case: Case, done: int, total: int) -> Verdict | None:
    """What a person says of one pair; None: no more."""
    from optrush.report.answers import text_of

    first, second = case.sides
    print(f"\n=== {done + 1} of {total}\n{shown(text_of(case.prompt))}", file=sys.stderr)
    print(f"\n--- 1\n{shown(first)}\n\n--- 2\n{shown(second)}\n", file=sys.stderr)
    while True:
        print("better: 1, 2, 0 neither, q stops > ", end="", file=sys.stderr, flush=True)
        try:
            key = input().strip().lower()
        except (EOFError, KeyboardInterrupt):
            return None
        if key == "q":
            return None
        if (verdict := case.verdict(key)) is not None:
            return verdict
