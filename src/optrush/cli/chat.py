"""chat: talk to a model in the terminal, or to a base and its trained model side by side."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module, util
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from optrush.cli.options import (
    Greedy,
    Json,
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
from optrush.console import passing, shown
from optrush.errors import ConfigError, UserError

if TYPE_CHECKING:
    from optrush.config import Sampling
    from optrush.data.images import Picture
    from optrush.data.schema import Message
    from optrush.generation import Answer, GenerationModel, ModelSource, Prompt


WIDE = 100  # minimum columns of a terminal for two answers side by side
HELP = """\
/system TEXT          another system prompt, and a new conversation
/reset                a new conversation
/set NAME=VALUE       temperature, top_p, top_k, max_tokens, greedy
/image FILE           a picture for the next message
/save FILE            append the conversation to FILE, as a row that can be trained on
/quit                 leave; so does Ctrl-D. Ctrl-C stops an answer"""


def chat(
    context: typer.Context,
    model: TheModel,
    base: Annotated[bool, typer.Option("--base", help="also answer with the model that the run started from")] = False,
    system: System = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    max_tokens: MaxTokens = 512,
    greedy: Greedy = False,
    seed: Seed = None,
    image: Annotated[
        list[Path], typer.Option("--image", metavar="FILE", help="a picture for the first message; may be repeated")
    ] = [],  # noqa: B006 - typer copies it
    message: Annotated[
        list[str], typer.Option("--message", metavar="TEXT", help="send this message, then exit; may be repeated")
    ] = [],  # noqa: B006 - typer copies it
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Talk to a model in the terminal.

    Answers are streamed, and the conversation continues; /help lists the commands. --base shows two answers, with the
    base model's on the left. An answer ends at the end tokens of the model's generation config or chat template.
    """
    if as_json and not message:
        raise ConfigError("--json", "no --message: a conversation in a terminal is no document", "give both")
    demand_used(context)
    from optrush.config import Sampling

    sampling = Sampling(temperature, top_p, top_k, max_tokens, greedy)
    from optrush.generation import GenerationModel, base_of, find_model

    source = find_model(model)
    sources = [base_of(source, "--base"), source] if base else [source]
    trained = GenerationModel(source)
    models = [*(GenerationModel(s, trained.tokenizer.chat_template) for s in sources[:-1]), trained]
    if not plain and trained.template is None:
        found, do = "its tokenizer has no chat template", "--plain continues what you write as it stands"
        raise ConfigError(f"to chat with {model}", found, do)
    session = Conversation(models, sampling, drawn(seed), system, plain)
    for file in image:
        session.show(f"--image {file}", file)
    if message:
        turns = [session.turn(text, (lambda n, piece: None) if as_json else None) for text in message]
        if as_json:
            print(json.dumps(session.document(turns)))
        return
    _converse(session)


class Conversation:
    """One conversation per model: the same questions, with each model's own answers."""

    def __init__(
        self, models: list[GenerationModel], sampling: Sampling, seed: int, system: str | None, plain: bool
    ) -> None:
        self.models, self.sampling, self.seed, self.system, self.plain = models, sampling, seed, system, plain
        self.asked = 0
        self.images: list[Picture] = []  # for the next message
        self.reset()

    def show(self, asked: str, file: Path) -> None:
        """Add an image to the next message.

        Raises:
            ConfigError: texts are continued, a model does not support images, or the file is not an image.
        """
        from optrush.data.images import Picture
        from optrush.errors import DataError
        from optrush.generation import home

        if self.plain:
            raise ConfigError(asked, "a text that is continued has no images", "leave --plain out")
        for model in self.models:
            if isinstance(model.images, DataError):
                raise ConfigError(
                    asked, f"{model.name}: {model.images.found}", "leave images out, or name another model"
                )
            picture = Picture(str(home(str(file), asked).absolute()))
            try:
                model.images.look(picture, Path())
            except ValueError as error:
                raise ConfigError(asked, f"{error}", "name the file of an image") from None
        self.images.append(picture)

    def reset(self) -> None:
        """Start a new conversation."""
        from optrush.data.schema import Message

        first = [] if self.system is None else [Message("system", self.system)]
        self.talks: list[list[Message]] = [list(first) for _ in self.models]
        self.texts = [""] * len(self.models)

    def turn(self, text: str, write: Callable[[int, str], None] | None = None) -> dict[str, Any]:
        """Answer with every model; store the turn after all answers.

        Args:
            write: called with (index of the model, piece of text); None: the terminal.
        """
        from optrush.data.images import MARK
        from optrush.data.schema import Message, RowLocation

        where = RowLocation(Path("this conversation"), self.asked + 1)
        user = Message("user", MARK * len(self.images) + text, images=tuple(self.images))
        prompts: list[Any] = [t + text for t in self.texts] if self.plain else [[*t, user] for t in self.talks]
        ids = [s.ids(p, where) for s, p in zip(self.models, prompts, strict=True)]
        answers: list[Answer] = []
        with _screen(self.models) if write is None else nullcontext() as screen:
            shows = write if screen is None else screen.write
            assert shows is not None
            for n, model in enumerate(self.models):
                answers.append(model.stream(ids[n], self.sampling, self.seed + self.asked, partial(shows, n)))
        self.asked += 1
        self.images = []  # after a rejected message, the next one keeps its images
        for n, answer in enumerate(answers):
            if self.plain:
                self.texts[n] += text + answer.text
            elif answer.text.strip():  # templates do not support empty turns
                self.talks[n] += [user, Message("assistant", answer.text)]
        answered = [{"model": s.name, **dataclasses.asdict(a)} for s, a in zip(self.models, answers, strict=True)]
        return {"message": text, "answers": answered}

    def document(self, turns: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the conversation and its sampling."""
        return {
            "models": [s.name for s in self.models], "system": self.system, "seed": self.seed,
            "sampling": dataclasses.asdict(self.sampling), "turns": turns,
        }  # fmt: skip

    def command(self, line: str) -> str | None:
        """Run /NAME; return the text to show, or None to leave.

        Raises:
            ConfigError: the command does not exist or fails.
        """
        from optrush.generation import home

        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "quit":
            return None
        if name == "system":
            if self.plain:
                raise ConfigError("/system", "a text that is continued has no system prompt", "leave it out")
            self.system = rest or None
        if name in ("system", "reset"):
            gone, self.images = self.images, []
            self.reset()
            return "a new conversation" + (", without the picture of the next message" if gone else "")
        if name == "set":
            self.sampling = self.sampling.changed(rest)
            return ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(self.sampling).items())
        if name == "image" and rest:
            self.show(line, Path(rest))
            return f"{rest}, with the next message"
        if name == "save" and rest:
            return self._save(home(rest, line))
        if name in ("help", "?"):
            return HELP
        raise ConfigError(line, "no such command", "/help lists them; a space before / sends it to the model")

    def _save(self, file: Path) -> str:
        from optrush.generation import row_of

        row = {"text": self.texts[-1]} if self.plain else {"messages": [row_of(m) for m in self.talks[-1]]}
        if not self.texts[-1] and not any(m.role == "assistant" for m in self.talks[-1]):
            raise ConfigError(f"/save {file}", "the conversation is empty", "send a message first")
        try:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(row, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            found = getattr(error, "strerror", None) or f"{error}"
            raise ConfigError(f"/save {file}", found, "name another file") from None
        return f"appended to {file}"


def _converse(session: Conversation) -> None:
    """Answer lines from standard input until its end or a command to leave; print the user's errors and continue."""
    if util.find_spec("readline") is not None:
        import_module("readline")  # arrow keys and a history in input()
    asks = sys.stdin.isatty()
    if asks:
        name = shown(session.models[-1].name)
        print(f"{name}; /reset begins a new conversation, /help lists the commands, Ctrl-D leaves", file=sys.stderr)
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
    """Yield the typed lines."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\nCtrl-D leaves", file=sys.stderr)


# --- the screen


class _Lines:
    """Show streamed answers one below the other."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.at = names, -1

    def __enter__(self) -> _Lines:
        return self

    def write(self, n: int, piece: str) -> None:
        if n != self.at and len(self.names) > 1:
            sys.stdout.write(("\n\n" if self.at >= 0 else "") + f"--- {shown(self.names[n])}\n")
        self.at = n
        sys.stdout.write(shown(piece))
        sys.stdout.flush()

    def __exit__(self, *_: object) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class _Columns:
    """Show two answers side by side: their last lines while they grow, all lines at the end."""

    def __init__(self, names: list[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(highlight=False, markup=False)
        self.names, self.texts = names, [""] * len(names)
        self.live = Live(console=self.console, transient=True, auto_refresh=False)

    def __enter__(self) -> _Columns:
        self.live.start()
        return self

    def write(self, n: int, piece: str) -> None:
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


def _screen(models: list[GenerationModel]) -> _Lines | _Columns:
    from rich.console import Console

    names = [s.name for s in models]
    wide = sys.stdout.isatty() and Console().width >= WIDE
    return _Columns(names) if len(names) > 1 and wide else _Lines(names)


# --- generate: answers to a file of prompts by one or two models.


def generate(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="a run's folder, a Hugging Face folder or hub id, tiny")
    ] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="file of prompts to answer")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.jsonl", help="file for the answers")] = None,
    base: Annotated[bool, typer.Option("--base", help="also answer with the model that the run started from")] = False,
    against: Annotated[
        str | None, typer.Option("--against", metavar="OTHER", help="also answer with this model")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="prompts per batch")] = 8,
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
    gets one row per prompt; --base and --against add the other model's answer.
    """
    if model is None or prompts is None or out is None:
        do = "optrush generate MODEL --prompts FILE --out FILE.jsonl"
        raise ConfigError("optrush generate", "no MODEL, --prompts or --out", do)
    demand_used(context)
    if base and against is not None:
        raise ConfigError(f"--base with --against {against}", "each names the other model", "leave one of the two out")
    _check_out(out)
    from optrush.config import Sampling

    sampling = Sampling(temperature, top_p, top_k, max_tokens, greedy)
    from optrush.generation import base_of, find_model
    from optrush.generation import prompts as read

    source = find_model(model)
    other = base_of(source, "--base") if base else None if against is None else find_model(against)
    facts = _write_answers(list(read(prompts, plain, system)), source, other, sampling, drawn(seed), batch, out)
    print(json.dumps(facts) if as_json else out)


def _check_out(out: Path) -> None:
    asked = f"--out {out}"
    if out.suffix != ".jsonl":
        raise ConfigError(asked, "no name of JSON Lines", "name a file that ends in .jsonl")
    if out.exists():
        raise ConfigError(asked, f"{out} exists", "name another file, or remove it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(asked, f"no folder {out.parent}", "make it first")


def _write_answers(
    prompts: list[Prompt], source: ModelSource, other: ModelSource | None, sampling: Sampling, seed: int, batch: int,
    out: Path,
) -> dict[str, Any]:  # fmt: skip
    """Generate with each model in turn, and write each row when its answers are complete."""
    from optrush.generation import generate_answers, template_of

    how: dict[str, Any] = {"sampling": sampling, "seed": seed, "batch": batch}
    others = None
    if other is not None:
        stream = generate_answers(other, prompts, template=template_of(source), **how)
        others = list(passing(stream, len(prompts), f"answers of {other.name}"))
    part = out.with_name(out.name + ".part")  # kept after an interruption
    answers = passing(generate_answers(source, prompts, **how), len(prompts), f"answers of {source.name}")
    first = next(answers)  # all checks come before the first write
    tokens = 0
    part.unlink(missing_ok=True)
    with part.open("x", encoding="utf-8") as file:
        for n, answer in enumerate(chain([first], answers)):
            tokens += answer.tokens
            row = {"prompt": prompts[n].shown(), **answer.facts()}
            row |= {} if others is None else others[n].facts("other")
            row |= {} if prompts[n].reference is None else {"reference": prompts[n].reference}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    part.rename(out)
    return {
        "model": source.name, "other": None if other is None else other.name, "rows": len(prompts), "out": str(out),
        "seed": seed, "sampling": dataclasses.asdict(sampling), "tokens": tokens,
    }  # fmt: skip


# --- export: a run's checkpoint as a folder for transformers, checked against the trained model.


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder, or its run.yaml", show_default=False)],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="STEP|FOLDER", help="default: the best, else the newest intact one"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="default: RUN/model")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="convert the weights to this type (default: as trained)"),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="export the adapter alone, in PEFT's format")] = False,
    to: Annotated[
        Literal["hf", "gguf", "fp8"],
        typer.Option(
            "--to", help="hf: a folder for transformers; gguf: a file for llama.cpp; fp8: 8-bit floats for vLLM"
        ),
    ] = "hf",
    gguf_type: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"] | None,
        typer.Option("--gguf-type", help="with --to gguf: type of the matrices (default f16)"),
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="ORG/NAME", help="upload what was written to this hub repository")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="skip the check that loads the folder and compares logits")
    ] = False,
    max_shard_gb: Annotated[
        float | None,
        typer.Option("--max-shard-gb", min=0.001, metavar="GB", help="maximum size of a weight file (default 5)"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of a run as a folder that transformers loads, as a GGUF file, or in 8-bit floats.

    Adapters are merged in float32, then rounded. With the weights go the tokenizer with its chat template, the
    generation config and a model card. Then the folder is loaded by transformers and its logits are compared with the
    trained model's; a difference beyond what rounding explains is an error (exit code 1). The run's data is not needed.
    """
    if adapter and dtype is not None:
        raise ConfigError(f"--adapter with --dtype {dtype}", "an adapter is written as it was trained", "leave one out")
    if adapter and max_shard_gb is not None:
        raise ConfigError(f"--adapter with --max-shard-gb {max_shard_gb:g}", "an adapter is one file", "leave one out")
    if gguf_type is not None and to != "gguf":
        raise ConfigError(
            f"--gguf-type {gguf_type}", "--to hf, whose types are --dtype's", "give --to gguf, or --dtype"
        )
    if to != "hf" and (adapter or dtype is not None or max_shard_gb is not None):
        void = "--adapter" if adapter else f"--dtype {dtype}" if dtype is not None else "--max-shard-gb"
        written = f"the whole model in {'--gguf-type' if to == 'gguf' else '8-bit floats'} is written"
        raise ConfigError(f"{void} with --to {to}", written, f"leave {void} out")
    from optrush.exporting import check_push, export_run, push_to_hub

    if push is not None:
        check_push(push)
    if to != "hf":
        facts = _converted(run, out, gguf_type or "f16" if to == "gguf" else None, checkpoint, not no_verify)
        if push is not None:
            facts["pushed"] = push_to_hub(Path(facts["out"]), push)
        print(json.dumps(facts) if as_json else facts.get("pushed", facts["out"]))
        return
    result = export_run(
        run, out, checkpoint=checkpoint, dtype=dtype, adapter=adapter, verifies=not no_verify,
        max_shard_bytes=1e9 * (5.0 if max_shard_gb is None else max_shard_gb),
    )  # fmt: skip
    pushed = None if push is None else push_to_hub(result.out, push)
    if as_json:
        print(json.dumps(result.facts() | ({} if pushed is None else {"pushed": pushed})))
        return
    for name, reason in result.passed:
        print(f"{name} was passed over: {reason}", file=sys.stderr)
    print(f"step {result.step}, {result.dtype or 'an adapter'}, {result.size_bytes / 1e9:.2f} GB", file=sys.stderr)
    if not no_verify:
        print(result.compared or "an adapter's files are not compared: merge them to be sure", file=sys.stderr)
    print(pushed or result.out)


def _converted(
    run: Path, out: Path | None, gguf_type: Literal["f32", "f16", "bf16", "q8_0"] | None, checkpoint: str | None,
    verifies: bool,
) -> dict[str, Any]:  # fmt: skip
    """Export as a GGUF file, or without `gguf_type` in 8-bit floats; return the document of --json."""
    from optrush.exporting import export_fp8, export_gguf

    if gguf_type is not None:
        file, tensors = export_gguf(run, out, gguf_type, checkpoint=checkpoint, verifies=verifies)
        return {"out": str(file), "tensors": tensors, "type": gguf_type, "size_bytes": file.stat().st_size}
    where, linears = export_fp8(run, out, checkpoint=checkpoint, verifies=verifies)
    return {"out": str(where), "linears": linears, "size_bytes": sum(f.stat().st_size for f in where.iterdir())}
