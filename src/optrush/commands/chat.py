"""chat: talk to a model in the terminal, or to a base and what was trained from it side by side."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optrush.commands.options import Json
from optrush.commands.sampling import (
    Greedy,
    MaxTokens,
    Plain,
    Seed,
    System,
    Temperature,
    TheModel,
    TopK,
    TopP,
    demand_used,
    drawn,
)
from optrush.console import shown
from optrush.errors import ConfigError, UserError

if TYPE_CHECKING:
    from optrush.config import Sampling
    from optrush.data.schema import Message
    from optrush.generate import Answer, Speaker

WIDE = 100  # columns of a terminal from which two answers stand side by side
HELP = """\
/system TEXT          another system prompt, and a new conversation
/reset                a new conversation
/set NAME=VALUE       temperature, top_p, top_k, max_tokens, greedy
/save FILE            append the conversation to FILE, as a row that can be trained on
/quit                 leave; so does Ctrl-D. Ctrl-C stops an answer"""


def chat(
    context: typer.Context,
    model: TheModel,
    base: Annotated[bool, typer.Option("--base", help="the model that a run began with beside it")] = False,
    system: System = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    max_tokens: MaxTokens = 512,
    greedy: Greedy = False,
    seed: Seed = None,
    message: Annotated[
        list[str], typer.Option("--message", metavar="TEXT", help="say this and leave; may be repeated")
    ] = [],  # noqa: B006 - typer copies it
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Talk to a model in the terminal.

    Answers appear as they are made, and the conversation goes on; /help lists the commands. --base answers twice, with
    the base on the left. An answer ends where the model's generation config or its chat template says.
    """
    if as_json and not message:
        raise ConfigError("--json", "no --message: a conversation in a terminal is no document", "give both")
    demand_used(context)
    from optrush.config import Sampling

    sampling = Sampling(temperature, top_p, top_k, max_tokens, greedy)
    from optrush import generate

    place = generate.find(model)
    places = [generate.base_of(place, "--base"), place] if base else [place]
    own = generate.Speaker(place)
    speakers = [*(generate.Speaker(p, own.tokenizer.chat_template) for p in places[:-1]), own]
    if not plain and own.template is None:
        found, do = "its tokenizer has no chat template", "--plain continues what you write as it stands"
        raise ConfigError(f"to chat with {model}", found, do)
    session = Session(speakers, sampling, drawn(seed), system, plain)
    if message:
        turns = [session.turn(text, _silent if as_json else None) for text in message]
        if as_json:
            print(json.dumps(session.document(turns)))
        return
    _converse(session)


class Session:
    """One conversation with each speaker: the same questions, each with its own answers."""

    def __init__(self, speakers: list[Speaker], sampling: Sampling, seed: int, system: str | None, plain: bool) -> None:
        self.speakers, self.sampling, self.seed, self.system, self.plain = speakers, sampling, seed, system, plain
        self.asked = 0
        self.reset()

    def reset(self) -> None:
        """Forgets what was said."""
        from optrush.data.schema import Message

        first = [] if self.system is None else [Message("system", self.system)]
        self.talks: list[list[Message]] = [list(first) for _ in self.speakers]
        self.texts = [""] * len(self.speakers)

    def turn(self, text: str, told: Callable[[int, str], None] | None = None) -> dict[str, Any]:
        """Asks every speaker; what is said so far is kept once all have answered.

        Args:
            told: gets (speaker, piece); None: the terminal.
        """
        from optrush.data.schema import Message, Where

        where = Where(Path("this conversation"), self.asked + 1)
        user = Message("user", text)
        prompts: list[Any] = [t + text for t in self.texts] if self.plain else [[*t, user] for t in self.talks]
        ids = [s.ids(p, where) for s, p in zip(self.speakers, prompts, strict=True)]
        screen = _screen(self.speakers) if told is None else None
        answers: list[Answer] = []
        with screen or nullcontext():
            for n, speaker in enumerate(self.speakers):
                say = _at(n, screen.told if screen is not None else told or _silent)
                answers.append(speaker.stream(ids[n], self.sampling, self.seed + self.asked, say))
        self.asked += 1
        for n, answer in enumerate(answers):
            if self.plain:
                self.texts[n] += text + answer.text
            elif answer.text.strip():  # templates have no turn without words
                self.talks[n] += [user, Message("assistant", answer.text)]
        told_ = [{"model": s.name, **dataclasses.asdict(a)} for s, a in zip(self.speakers, answers, strict=True)]
        return {"message": text, "answers": told_}

    def document(self, turns: list[dict[str, Any]]) -> dict[str, Any]:
        """What was said, and how it was drawn."""
        return {
            "models": [s.name for s in self.speakers], "system": self.system, "seed": self.seed,
            "sampling": dataclasses.asdict(self.sampling), "turns": turns,
        }  # fmt: skip

    def command(self, line: str) -> str | None:
        """What /NAME does; the text to show, or None to leave.

        Raises:
            ConfigError: no such command, or it cannot be done.
        """
        from optrush.generate import home

        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "quit":
            return None
        if name == "system":
            if self.plain:
                raise ConfigError("/system", "a text that is continued has no system prompt", "leave it out")
            self.system = rest or None
        if name in ("system", "reset"):
            self.reset()
            return "a new conversation"
        if name == "set":
            self.sampling = self.sampling.changed(rest)
            return ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(self.sampling).items())
        if name == "save" and rest:
            return self._save(home(rest, line))
        if name in ("help", "?"):
            return HELP
        raise ConfigError(line, "no such command", "/help lists them; a space before / sends it to the model")

    def _save(self, file: Path) -> str:
        said = {"text": self.texts[-1]} if self.plain else {"messages": [m.shown() for m in self.talks[-1]]}
        if not self.texts[-1] and not any(m.role == "assistant" for m in self.talks[-1]):
            raise ConfigError(f"/save {file}", "nothing has been said", "ask something first")
        try:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(said, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:  # a name with a zero in it
            found = getattr(error, "strerror", None) or f"{error}"
            raise ConfigError(f"/save {file}", found, "name another file") from None
        return f"appended to {file}"


def _converse(session: Session) -> None:
    """The loop at the terminal."""
    if util.find_spec("readline") is not None:
        import_module("readline")  # arrow keys and a history in input()
    asks = sys.stdin.isatty()
    if asks:
        print(f"{shown(session.speakers[-1].name)}; /help lists the commands, Ctrl-D leaves", file=sys.stderr)
    for line in _lines("> " if asks else ""):
        try:
            if line.startswith("/"):
                said = session.command(line.rstrip())
                if said is None:
                    return
                print(shown(said), file=sys.stderr)
            elif line.strip():
                session.turn(line.lstrip(" ") if line.lstrip(" ").startswith("/") else line)
        except UserError as error:
            print(shown(str(error)), file=sys.stderr)


def _lines(prompt: str) -> Iterator[str]:
    """What is typed, until its end."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\nCtrl-D leaves", file=sys.stderr)


# --- the screen


class _Lines:
    """Answers one under the other, as they come."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.at = names, -1

    def __enter__(self) -> None: ...

    def told(self, n: int, piece: str) -> None:
        if n != self.at and len(self.names) > 1:
            sys.stdout.write(("\n\n" if self.at >= 0 else "") + f"--- {shown(self.names[n])}\n")
        self.at = n
        sys.stdout.write(shown(piece))
        sys.stdout.flush()

    def __exit__(self, *_: object) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class _Columns:
    """Two answers side by side; while they grow, their last lines, and all of them at the end."""

    def __init__(self, names: list[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(highlight=False, markup=False)
        self.names, self.texts = names, [""] * len(names)
        self.live = Live(console=self.console, transient=True, auto_refresh=False)

    def __enter__(self) -> None:
        self.live.start()

    def told(self, n: int, piece: str) -> None:
        self.texts[n] += shown(piece)
        self.live.update(self._table(max(4, self.console.height - 6)), refresh=True)

    def _table(self, most: int | None) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True, show_lines=False)
        width = (self.console.width - 3 * len(self.names) - 1) // len(self.names)
        cells = []
        for name, text in zip(self.names, self.texts, strict=True):
            table.add_column(Text(name), ratio=1, overflow="fold")
            lines = Text(text).wrap(self.console, width)
            cells.append(Text("\n").join(lines if most is None else lines[-most:]))
        table.add_row(*cells)
        return table

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        self.console.print(self._table(None))


def _screen(speakers: list[Speaker]) -> _Lines | _Columns:
    from rich.console import Console

    names = [s.name for s in speakers]
    wide = sys.stdout.isatty() and Console().width >= WIDE
    return _Columns(names) if len(names) > 1 and wide else _Lines(names)


def _silent(n: int, piece: str) -> None:
    """Who wants a document wants it whole."""


def _at(n: int, told: Callable[[int, str], None]) -> Callable[[str], None]:
    return lambda piece: told(n, piece)
