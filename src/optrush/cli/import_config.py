"""import: translate another trainer's configuration into the YAML of a run, key by key, or reject it by its key.

The tables of keys are in `optrush.foreign_keys`; this module reads the file, and combines their values: rows,
accumulation and ranks become the slots of a step, an adapter and its base become techniques.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from optrush import foreign_keys as foreign
from optrush.cli.import_sharding import Sharding, parallel_axes, read_sharding
from optrush.config import COMPARED, JUDGED, SECTIONS, Config, parse_config, parse_scalar, parse_yaml, refuse_secrets
from optrush.errors import ConfigError, UserError
from optrush.files import read_text
from optrush.foreign_keys import LEAVE, Rule, Tool, ToolName, split_names
from optrush.models.shapes import native_obstacle
from optrush.models.source import known_config
from optrush.peft.ledger import LINEARS, matching

Notes = list[str]
ALIKE = 0.9  # minimum of difflib's ratio for a typing error
ANSWERS = ("assistant", "gpt")  # roles of answers
LANGUAGE_MODEL = {"model.language_model", "language_model", "language_model.model"}
EMBEDDINGS = {"lm_head", "embed_tokens", "model.embed_tokens"}
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_ASSIGNED = re.compile(r"(?m)^\s*(?:export\s+)?([A-Za-z_]\w*)=(?:([\w./:@+-]*)|[\"']([^\"'$`\n]*)[\"'])\s*(?:#.*)?$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")  # shell variables
_DATA_FILE = re.compile(r"\.(jsonl?|parquet|csv|txt|arrow|zst|gz)\Z")
# Recognition of a tool: by the name of a command's script, else by keys.
SIGNS: tuple[tuple[ToolName, str, set[str]], ...] = (
    ("axolotl", "", {"base_model"}),
    ("llama-factory", "", {"stage", "finetuning_type", "cutoff_len", "template"}),
    ("trl-kto", r"kto(\.py)?", {"desirable_weight", "undesirable_weight"}),
    ("trl-gkd", r"gkd(\.py)?", {"lmbda", "seq_kd"}),
    ("trl-reward", r"reward(_modeling)?(\.py)?", {"center_rewards_coefficient"}),
    ("trl-dpo", r"dpo(\.py)?", {"beta", "precompute_ref_log_probs", "f_divergence_type"}),
    ("train.py", r".*train.*", set()),
    ("trl-sft", r"sft(\.py)?", {"model_name_or_path", "model_name"}),
)


def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML, JSON, or a command line", show_default=False)],
    tool: Annotated[
        ToolName | None,
        typer.Option("--from", metavar="TOOL", help=f"{', '.join(get_args(ToolName))} (default: found by its keys)"),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="data.path to use instead of what FILE names")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="number of GPUs that FILE was written for; sets the rows per step")
    ] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="YAML", help="file to write (default: print)")] = None,
) -> None:
    """Translate another trainer's configuration.

    FILE is a configuration of axolotl, LLaMA-Factory or TRL (SFT, DPO, KTO, reward models), or the command line of a
    train.py with the arguments of transformers. Each key is translated, listed as having no effect, or refused by name
    (exit code 2).
    """
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}", "it exists", "name another file, or remove it")
    imported = translate(file, tool, data, ranks)
    if out is None:
        print(imported.text, end="")
    else:
        try:
            out.write_text(imported.text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out}", f"{error.strerror}", "name another file") from None
        given_ranks = f" --ranks {imported.ranks}" if imported.ranks > 1 else ""
        print(f"optrush train {shlex.quote(str(out))}{given_ranks} --dry-run")
    for note in imported.notes:
        typer.echo(note, err=True)


@dataclass(frozen=True)
class Imported:
    """A translated configuration."""

    tool: ToolName
    text: str  # our YAML
    notes: tuple[str, ...]  # keys without an effect here, or with a different one
    config: Config
    ranks: int  # number of ranks that share a step's rows


# --- from a file to facts


def translate(file: Path, tool: ToolName | None = None, data: str | None = None, ranks: int = 1) -> Imported:
    """Translate another trainer's file.

    Args:
        tool: the file's trainer; None: found by its keys.
        data: `data.path` in place of the file's.
        ranks: processes of the described run; its own command line can set them.

    Raises:
        ConfigError: the file is unreadable or of an unknown tool, or a key or a value has no counterpart.
    """
    given, lines = _read(file)
    kind = tool or _recognised(given, file)
    place = _Place(file, lines)
    facts = _read_keys(given, foreign.TOOLS[kind], place)
    if data is not None:
        for name in ("@data", "@datasets", "@pretraining", "@data_config", "@data_split", "@dataset_dir"):
            facts.of.pop(name, None)
        facts.of["data.path"] = data
    composer = _Composer(kind, facts, ranks, place)
    text = yaml.safe_dump(composer.compose(), sort_keys=False, allow_unicode=True)
    text = f"# Translated from {file.name} of {kind}.\n{text}"
    config = parse_config(text, str(file))
    refuse_secrets(config)
    return Imported(kind, text, tuple(dict.fromkeys(facts.notes)), config, composer.ranks)


@dataclass(frozen=True)
class _Place:
    """The place of a key."""

    file: Path
    lines: Mapping[Any, int]

    def of(self, key: str) -> str:
        parts = tuple(int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", key) if part)
        line = next((self.lines[parts[:n]] for n in range(len(parts), 0, -1) if parts[:n] in self.lines), None)
        return f"{self.file}:{line}: `{key}`" if line else f"{self.file}: `{key}`"


def _read(file: Path) -> tuple[dict[str, Any], Mapping[Any, int]]:
    """Return the keys of a YAML, a JSON or a command line, and their lines."""
    try:
        text = read_text(file)
    except OSError as error:
        raise ConfigError(f"{file}", f"{error.strerror}", "name a file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}", f"not UTF-8: {error.reason}", "save it as UTF-8") from None
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text), {}
        except ValueError as error:
            raise ConfigError(f"{file}", f"not JSON: {error}", "fix it") from None
    if re.search(r"(^|\s)--[a-z][\w-]+", re.sub(r"(?m)#.*$", "", text)) and not re.search(r"(?m)^[a-z_]+:(\s|$)", text):
        return _arguments(text, file), {}
    return parse_yaml(text, str(file))


def _arguments(text: str, file: Path) -> dict[str, Any]:
    """Return the arguments of the last command in a text, and under `@script` its script."""
    given: dict[str, str] = {name: first or second for name, first, second in _ASSIGNED.findall(text)}
    text = _VARIABLE.sub(lambda m: str(given.get(m[1] or m[3], m[0] if m[2] is None else m[2])), text)
    commands = [line for line in re.sub(r"\\\r?\n", " ", text).splitlines() if re.search(r"\s--[a-z]", line)]
    try:
        words = shlex.split(commands[-1], comments=True) if commands else []
    except ValueError as error:
        raise ConfigError(f"{file}", f"no command line: {error}", "fix its quotes") from None
    scripts = ("sft", "dpo", "kto", "reward")
    at = next((n for n, (before, word) in enumerate(zip(["", *words], words, strict=False))
               if word.endswith(".py") or (word in scripts and not before.startswith("--"))), -1)  # fmt: skip
    arguments: dict[str, Any] = {"@script": Path(words[at]).name if at >= 0 else ""}
    launcher = dict(_pairs(words[: max(at, 0)]))
    for name, key in (("num_processes", "@ranks"), ("nproc_per_node", "@ranks"), ("num_gpus", "@ranks"),
                      ("config_file", "config_file")):  # fmt: skip
        if name in launcher:
            arguments[key] = launcher[name]
    if sharded := {key: value for key, value in launcher.items() if foreign.SHARDED.match(key)}:
        arguments["accelerate launch"] = sharded
    return arguments | dict(_pairs(words[at + 1 :]))


def _pairs(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of --key value and --key=value; True for a lone --key, a list for several values."""
    n = 0
    while n < len(words):
        word, n = words[n], n + 1
        if not word.startswith("--"):
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        values = [value] if equals else []
        while not equals and n < len(words) and not words[n].startswith("--"):
            values.append(words[n])
            n += 1
        read = [parse_scalar(v) for v in values]
        name = name.replace("-", "_")
        if name.startswith("no_") and not read:
            name, read = name.removeprefix("no_"), [False]
        yield name, True if not read else read[0] if len(read) == 1 else read


def _recognised(given: Mapping[str, Any], file: Path) -> ToolName:
    script, keys = str(given.get("@script", "")), given.keys()
    for tool, pattern, signs in SIGNS:
        by_script = script and tool != "llama-factory"  # LLaMA-Factory's command can have any name
        if re.fullmatch(pattern, script) if by_script else keys & signs:
            return tool
    found = f"a command of {script}" if script else f"of no known tool: {', '.join(sorted(keys)[:6]) or 'no key'}"
    raise ConfigError(f"{file}", found, f"name it: --from {', '.join(get_args(ToolName))}")


class Refusals(ConfigError):
    """Several rejected keys, each with its own three lines."""

    def __init__(self, each: list[ConfigError]) -> None:
        super().__init__(each[-1].asked, each[-1].found, each[-1].do)
        self.each = each

    def __str__(self) -> str:
        return "\n".join(map(str, self.each))


@dataclass
class _Facts:
    """Values of another trainer's mapping, by their keys' places in the tool's table."""

    tool: Tool
    place: _Place
    prefix: str = ""  # prefix of the mapping's keys in messages
    of: dict[str, Any] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)  # place -> its key
    notes: Notes = field(default_factory=list)

    def add(self, key: str, value: Any) -> None:
        """Add a key's value, or note that it has no effect; raise ConfigError for one without a counterpart."""
        rule = self.tool.keys.get(key) or (foreign.LOGGED if foreign.LOGGER.match(key) else None)
        if value is None and rule is not None and rule.null:
            raise self.refuse(key, f"null: {rule.null}", rule.do)
        if value is None or value in ("", [], {}):
            return
        if rule is None:
            if value is not False:
                raise self.refuse(key, f"a key of {self.tool.name} without a counterpart", self.hint(key))
            self.notes.append(f"{self.prefix}{key}: off there, and absent here")
        elif rule.idle and value not in [*(rule.values or ())]:
            self.notes.append(f"{self.prefix}{key}: {rule.idle}")
        elif rule.to:
            self.put(key, rule.to, self.valued(key, value, rule))
            self.notes += [rule.note] if rule.note else []
        elif not any(value == v and type(value) is type(v) for v in rule.only):
            raise self.refuse(key, f"{value!r}, which has no counterpart", rule.do or LEAVE)

    def refuse(self, key: str, found: str, do: str) -> ConfigError:
        return ConfigError(self.place.of(self.prefix + key), found, do)

    def hint(self, key: str) -> str:
        """Return the remedy for an unknown key: the known key with nearly the same spelling, if any."""
        close = () if foreign.FOREIGN.match(key) else difflib.get_close_matches(key, self.tool.keys, 1, ALIKE)
        return LEAVE + "".join(f"; did you mean `{name}`?" for name in close)

    def valued(self, key: str, value: Any, rule: Rule) -> Any:
        """Return a value translated by the rule, or raise ConfigError."""
        if (form := foreign.FORMS.get(rule.to)) is not None:
            if not isinstance(value, form.kinds) or isinstance(value, bool):
                raise self.refuse(key, f"{value!r}", form.do or f"give {form.words}")
            try:
                return form.read(value)
            except ValueError as error:
                raise self.refuse(key, f"{value!r}", str(error)) from None
        if rule.values is None:
            return value
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        truth = {"true": True, "false": False}.get(str(value).lower(), value)
        for known, ours in rule.values.items():
            if known == truth and (isinstance(known, bool) or not isinstance(truth, bool)):
                return ours
        choices = ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in rule.values)
        raise self.refuse(key, f"{value!r}, which has no counterpart", rule.do or f"take one of {choices}")

    def put(self, key: str, to: str, value: Any) -> None:
        """Set the value of a key's place."""
        if to == "with":
            self.of[to] = {**self.of.get(to, {}), **value}
        elif value is None:
            self.of.setdefault(to, None)  # an explicit null overrides the tool's default
        elif to in self.by and self.of[to] != value:
            found = f"{value!r}, where `{self.by[to]}` gives another value"
            raise self.refuse(key, found, f"keep one of `{self.by[to]}` and `{key}`")
        else:
            self.of[to], self.by[to] = value, key


def _read_keys(given: Mapping[str, Any], tool: Tool, place: _Place, prefix: str = "") -> _Facts:
    """Return the values of a mapping by place, including the tool's defaults."""
    facts, refused = _Facts(tool, place, prefix), list[ConfigError]()
    for key, value in given.items():
        if key.startswith("@"):
            facts.of[key] = value
            continue
        try:
            facts.add(key, value)
        except ConfigError as error:
            refused.append(error)
    refused += [facts.refuse(key, f"left out, {found}", do) for key, (found, do) in tool.needed.items()
                if given.get(key) is None]  # fmt: skip
    if refused:
        raise refused[0] if len(refused) == 1 else Refusals(refused)
    facts.of = {**tool.defaults, **facts.of}
    return facts


# --- from facts to our YAML


class _Composer:
    """Combines facts into the tree of our YAML."""

    def __init__(self, tool: ToolName, facts: _Facts, ranks: int, place: _Place) -> None:
        self.tool, self.facts, self.place, self.notes = tool, facts, place, facts.notes
        self.get = facts.of.get
        self.ranks = int(self.get("@ranks", ranks))
        self.columns: dict[str, str] = {}
        self.roles: dict[str, str] = {}
        self.tree: dict[str, Any] = {"model": {}, "data": {}, "optim": {}, "train": {}, "with": {}}
        for name, value in facts.of.items():
            if name[0] not in "@*" and value is not None:
                self.set(name, value)
        self.with_ = self.tree["with"]

    def set(self, name: str, value: Any) -> None:
        """Set the value of a dotted place."""
        *sections, last = name.split(".")
        part = self.tree
        for section in sections:
            part = part.setdefault(section, {})
        known = part.get(last, {})
        part[last] = known | copy.deepcopy(value) if isinstance(value, dict) else value

    def refuse(self, name: str, found: str, do: str) -> ConfigError:
        """Return the error of a key, or of the key that gave a place."""
        return ConfigError(self.place.of(self.facts.by.get(name, name)), found, do)

    def compose(self) -> dict[str, Any]:
        """Return our YAML as values."""
        for part in (self._model, self._data, self._objective, self._learnt, self._batch, self._optim, self._steps,
                     self._evaluations, self._precision, self._adapter, self._layout, self._sharding):  # fmt: skip
            part()
        order = ("model", "objective", *SECTIONS, "data", "batch", "optim", "train", "seed", "output", "with")
        return {key: self.tree[key] for key in order if self.tree.get(key) not in ({}, None)}

    def _model(self) -> None:
        """Complete the section `model`; refuse settings of tokenizer, config and weights without an equivalent."""
        model = self.tree["model"]
        if "path" not in model:
            raise self.refuse("model", "it is missing", "name one")
        if (tokenizer := self.get("@tokenizer")) not in (None, model["path"]):
            found = f"{tokenizer}, another tokenizer than the model's"
            raise self.refuse("@tokenizer", found, "put its files into the model's folder")
        if isinstance(tokens := self.get("@tokens"), dict):
            self.notes.append(f"tokens: {foreign.SPECIAL.idle}")
        elif tokens:
            model["add_tokens"] = tokens
        hf = known_config(model["path"])
        for key, value in dict(self.get("@config_json") or {}).items():
            dense = hf is not None and not any("expert" in name for name in hf)
            if key == "output_router_logits" and (not value or dense):
                self.notes.append(f"model_config.{key}: no effect: no loss of a router is added")
            elif hf is None or hf.get(key) != value:
                do = f'write "{key}": {json.dumps(value)} into config.json of a copy of the model, and name it'
                raise self.refuse("@config_json", f"{key}: {value!r}, which is not read from this file", do)
        if self.get("@random"):
            if hf is None or Path(model["path"]).exists():
                raise self.refuse(
                    "@random", "random weights of a model of unknown size", "name a known shape: model.shape"
                )
            model["shape"] = model["tokenizer"] = model.pop("path")
        if patterns := self.get("@unfrozen"):
            self._unfrozen([str(pattern) for pattern in patterns])

    def _unfrozen(self, patterns: list[str]) -> None:
        """Note that only some parameters are trained, if they are the language model; reject others."""
        names = {re.sub(r"\\?(\.\*|\.?weight|[\^$*.])+$", "", pattern.removeprefix("^")) for pattern in patterns}
        if self.get("@adapter") is not None:
            self.notes.append("unfrozen_parameters: no effect with an adapter: the adapter alone is trained")
        elif names & LANGUAGE_MODEL and "lm_head" in names and not names - LANGUAGE_MODEL - EMBEDDINGS:
            self.notes.append("unfrozen_parameters: the language model alone is trained")
        else:
            do = "leave it out, and add `adapter: lora`, or train all weights"
            raise self.refuse("@unfrozen", f"{', '.join(patterns)}: some parameters alone", do)

    # Data

    def _data(self) -> None:
        data = self.tree["data"]
        if "path" not in data:
            paths = self._paths()
            data["path"] = paths[0] if len(paths) == 1 else paths
        if (text := self.get("@text_field")) not in (None, "text"):
            self.columns[text] = "text"
        data |= {name: part for name, part in (("columns", self.columns), ("roles", self.roles)) if part}
        if held_out := self.get("@held_out"):
            data["eval"] = self._held_out(held_out)
        elif "eval" not in data:
            self._test_split(data)

    def _paths(self) -> list[Any]:
        """Return the sources of a file."""
        if given := self.get("@datasets") or self.get("@pretraining"):
            return self._axolotl([given] if isinstance(given, str | dict) else given)
        if not (given := self.get("@data")):
            raise self.refuse("data", "it is missing", "name it: --data FILE, a hub id, or a folder")
        if self.tool == "llama-factory":
            return self._factory(split_names(given))
        more = {"name": self.get("@data_config"), "split": self.get("@data_split")}
        return [self._origin({"path": path, **more}) for path in ([given] if isinstance(given, str) else given)]

    def _held_out(self, given: Any) -> str:
        entry = given[0] if isinstance(given, list) and len(given) == 1 else given
        entry = {"path": entry} if isinstance(entry, str) else entry
        path = self._origin(entry) if isinstance(entry, dict) else ""
        if not (path.startswith("hub:") or Path(path).suffix or Path(path).exists()):
            do = "name one file of held-out rows, or give a share: data.eval: 0.05"
            raise self.refuse("@held_out", f"{given!r}", do)
        return path

    def _test_split(self, data: dict[str, Any]) -> None:
        """Hold out the split of a hub data set that TRL evaluates on, or note the reason."""
        split, given = self.get("@test_split"), "@test_split" in self.facts.by
        if self.get("@eval_strategy") in (None, "no", False):
            reason = "nothing is evaluated there without `eval_strategy`"
        elif split and self.get("@data") and str(data["path"]).startswith("hub:"):
            data["eval"] = self._origin({"path": self.get("@data"), "name": self.get("@data_config"), "split": split})
            return
        else:
            reason = f"{split}; here held-out rows are a file, a split of the hub or a share: data.eval: 0.05"
        if given:
            self.notes.append(f"dataset_test_split: {reason}")

    def _origin(self, entry: Mapping[str, Any]) -> Any:
        """Return one source in the format of our data.path."""
        from optrush.data.readers import HUB, HUB_SET

        path, split, config = (entry.get(key) for key in ("path", "split", "name"))
        if not isinstance(path, str) or not path:
            raise self.refuse("path", f"{path!r}", "name a file or a data set of the hub")
        if files := entry.get("data_files"):
            listed = [files] if isinstance(files, str) else list(files)
            if len(listed) > 1:
                raise self.refuse("data_files", f"{len(listed)} files", "give each file an entry of its own")
            return listed[0]
        if not (_HUB.match(path) and not _DATA_FILE.search(path) and not Path(path).exists()):
            return path
        named = f"{path}{f'/{config}' if config else ''}{f':{split}' if split not in (None, 'train') else ''}"
        if HUB_SET.fullmatch(named) is None:
            found = " ".join(f"{key} {value!r}" for key, value in (("name", config), ("split", split)) if value)
            raise self.refuse("split", found, "name one split or one slice of it, as train or train[:20%]")
        return f"{HUB}{named}"

    def _axolotl(self, entries: list[Any]) -> list[Any]:
        """Return the sources of `datasets` or `pretraining_dataset`; set the objective and the columns."""
        objectives, paths = set(), []
        for n, entry in enumerate(entries):
            if not isinstance(entry, str | dict):
                raise self.refuse(f"datasets[{n}]", f"{entry!r}", "name a file or a data set of the hub")
            entry = {"path": entry} if isinstance(entry, str) else dict(entry)
            kind = entry.pop("type", None) or ("pretrain" if self.get("@pretraining") else None)
            if isinstance(kind, dict):
                entry, kind = {**kind, **entry}, "alpaca"
            if not isinstance(kind, str) or kind not in foreign.ROW_KINDS:
                do = f"write the rows as messages, or take one of {', '.join(sorted(foreign.ROW_KINDS))}"
                raise self.refuse(f"datasets[{n}].type", f"{kind!r}, rows that are not known here", do)
            objective, columns = foreign.ROW_KINDS[kind]
            objectives.add(objective)
            self.columns |= columns
            source = foreign.CHAT_SOURCE if kind in foreign.CHATS else foreign.TEXT_SOURCE
            facts = _read_keys(entry, source, self.place, f"datasets[{n}].")
            self.notes += facts.notes
            self._axolotl_columns(facts.of, kind in foreign.PAIRS and self.get("objective") is not None)
            if kind in foreign.CHATS:
                self._learning(entry, n)
            elif objective == "sft":
                self.notes.append(f"datasets[{n}].type: the model's chat template replaces the headings of a prompt")
            paths.append(self._origin(entry))
        if len(objectives) > 1:
            raise self.refuse("datasets", "texts and conversations in one run", "train on one kind a run")
        self.tree.setdefault("objective", objectives.pop())
        return paths

    def _axolotl_columns(self, source: dict[str, Any], pairs: bool) -> None:
        """Note the columns of a source; `pairs`: its conversations are the prompts of pairs."""
        from optrush.data.schema import READ_OF_TURN

        key = source.setdefault("@messages", "messages")
        compared = pairs or (self.get("objective") is not None and key not in ("messages", "conversations"))
        source[f"columns.{'prompt' if compared else 'messages'}"] = key
        for ours, theirs in source.get("@keys", {}).items():
            if ours in ("role", "content"):
                source[f"@{ours}"] = theirs
            elif theirs != ours and ours in READ_OF_TURN and isinstance(theirs, str):
                self._turn_key(theirs, ours, key, pairs)
            elif theirs != ours:
                found, do = f"{ours}: {theirs!r}, a key of turns that is not read", f"leave {ours} out"
                raise self.refuse("message_property_mappings", found, do)
        self._columns_of(source, source.get("@roles", {}), pairs)

    def _columns_of(self, source: Mapping[str, Any], roles: Mapping[str, list[str]], pairs: bool) -> None:
        """Note the columns of a source's rows and turns, and the names of the roles."""
        for ours in ("role", "content"):
            if (theirs := source.get(f"@{ours}", ours)) not in ("role", "content", "from", "value"):
                self._turn_key(theirs, ours, source.get("@messages", ""), pairs)
        for name, theirs in source.items():
            ours = name.removeprefix("columns.")
            if ours != name and theirs not in (ours, "conversations" if ours == "messages" else ours):
                self.columns[theirs] = ours
        for role, names in roles.items():
            self.roles |= {name: role for name in names if name not in (role, "human", "gpt", "observation")}

    def _turn_key(self, theirs: str, ours: str, key: str, pairs: bool) -> None:
        """Note the column of a key of turns, for each list of turns; `key` has a row's conversation."""
        own_key = key if key == "conversations" else "messages"
        for turns in ("prompt", "chosen", "rejected") if pairs else (own_key,):
            self.columns[f"{turns}[].{theirs}"] = ours

    def _learning(self, entry: Mapping[str, Any], n: int) -> None:
        """Reject settings that learn tokens other than answers with their ends, and note the rest."""
        from optrush.data.schema import LEARNT

        if self.get("data.train_on") == "all":
            found = "true: of conversations every turn's text, without headers and ends"
            do = "train_on_inputs: false; data.train_on: all learns all tokens of a conversation"
            raise self.refuse("train_on_inputs", found, do)
        learnt, mark = entry.get("roles_to_train"), entry.get("message_field_training")
        if learnt is not None and not (learnt and isinstance(learnt, list) and all(r in ANSWERS for r in learnt)):
            raise self.refuse(f"datasets[{n}].roles_to_train", f"{learnt}", "the assistant's turns are learnt")
        if mark is None:
            self.notes.append(
                f"datasets[{n}]: a turn that is marked by {', '.join(LEARNT)} is learnt by its mark, which axolotl "
                "reads by message_field_training alone"
            )
        elif not isinstance(mark, str) or not mark:
            found = f"{mark!r}, which names no key of a turn"
            raise self.refuse(f"datasets[{n}].message_field_training", found, "name the key, or leave it out")
        elif mark not in LEARNT:
            self._turn_key(mark, "train", entry.get("field_messages") or "messages", pairs=False)
        missing = "" if self.get("@eot") else (
            " not given: axolotl learns that end only where it is the end of a text, too;")  # fmt: skip
        self.notes.append(f"eot_tokens:{missing} an answer ends where the chat template ends it, and its end is learnt")

    def _factory(self, names: list[str]) -> list[Any]:
        """Return the sources of these names in LLaMA-Factory's list of data sets."""
        where = self.get("@dataset_dir", "data")
        around = [Path(where), *(parent / where for parent in self.place.file.resolve().parents)]
        listed = next((f for folder in around if (f := folder / "dataset_info.json").is_file()), None)
        if listed is None:
            found = f"{', '.join(names)}: names in {where}/dataset_info.json, which is not there"
            raise self.refuse("@data", found, "name the rows: --data FILE")
        table = json.loads(read_text(listed))
        paths = []
        for name in names:
            if name not in table:
                raise self.refuse("@data", f"{name}, which is not in {listed}", "name the rows: --data FILE")
            paths.append(self._factory_source(name, table[name], listed))
        if "max_samples" in self.tree["data"] and len(names) > 1:
            self.tree["data"]["max_samples"] *= len(names)
            self.notes.append("max_samples: of each data set there, of all together here")
        return paths

    def _factory_source(self, name: str, entry: Any, listed: Path) -> Any:
        """Return one source of LLaMA-Factory's list, and note its columns, tags and roles."""
        if not isinstance(entry, dict):
            raise self.refuse("@data", f"{name} is {entry!r} in {listed}", "give a mapping: file_name: rows.jsonl")
        place = _Place(listed, {})
        given = _read_keys(entry, foreign.FACTORY_ENTRY, place, f"{name}.").of
        sharegpt, ranking = given.get("@formatting") == "sharegpt", bool(given.get("@ranking"))
        columns = given.get("@columns", {})
        if sharegpt or ranking:
            columns = dict([("messages", "conversations") if sharegpt else ("prompt", "instruction")]) | columns
        names = _read_keys(columns, foreign.FACTORY_COLUMNS, place, f"{name}.columns.").of
        tags = _read_keys(given.get("@tags", {}), foreign.FACTORY_TAGS, place, f"{name}.tags.").of
        moved = {"columns.instruction": "columns.text"} if self.get("objective") == "pretrain" else {}
        if ranking:
            moved = {"columns.messages": "columns.prompt"}
        read = {moved.get(ours, ours): theirs for ours, theirs in names.items()}
        roles = {role: [theirs] for role, theirs in tags.items() if role[0] != "@"}
        self._columns_of({**read, **tags, "@messages": columns.get("messages", "")}, roles, ranking)
        source = given.get("hf_hub_url") or str(listed.parent / given.get("file_name", name))
        if self.get("objective", "sft") == "sft" or (ranking and not sharegpt):
            self._unnamed(source, given)
        return self._origin({**given, "path": source})

    def _unnamed(self, source: str, given: Mapping[str, Any]) -> None:
        """Drop columns that LLaMA-Factory does not read, and note how it joins the others."""
        from optrush.data.schema import MEANT

        named, row = given.get("@columns") or foreign.FACTORY_NAMED, _first_row(source)
        tags = {"messages": "conversations"} if given.get("@formatting") == "sharegpt" else {"prompt": "instruction"}
        self.columns |= dict.fromkeys(MEANT & row.keys() - {*(tags | named).values()}, foreign.IGNORED)
        for column, ours in foreign.FACTORY_UNNAMED.items():
            if column not in named and not Path(source).is_file():
                self.notes.append(f"dataset: here a column {ours!r} of {source} is read, there it is not")
        if given.get("@formatting", "alpaca") == "alpaca":
            self.notes.append("dataset: an empty line is between instruction and input, where theirs is a line break")

    # Objective, sizes, optimizer

    def _objective(self) -> None:
        """Set the objective; move settings of any objective (`*.beta`) into its section, or note them."""
        tree, settings = self.tree, {name: value for name, value in self.facts.of.items()
                                    if name[0] == "*" and value is not None}  # fmt: skip
        objective, loss = tree.get("objective", "sft"), settings.get("*.loss")
        if objective == "ipo":
            objective, settings["*.loss"] = "dpo", "ipo"
        elif objective == "dpo" and loss in ("orpo", "simpo"):
            objective = settings.pop("*.loss")
        tree["objective"], section = objective, SECTIONS.get(objective)
        for name, value in settings.items():
            if section is not None and name[2:] in section.model_fields:
                self.set(f"{objective}.{name[2:]}", value)
            else:
                self.notes.append(f"{self.facts.by.get(name, name)}: no effect on {objective}")
        if tree.get("distill", {}).get("temperature", 1) != 1:
            self.notes.append("temperature: the loss is multiplied by its square here, as in the paper")

    def _learnt(self) -> None:
        """Set the target tokens of a row, and the treatment of rows that are too long."""
        data, objective = self.tree["data"], self.tree["objective"]
        if objective == "pretrain" or objective in COMPARED:
            data.pop("train_on", None)
            data["too_long"] = "split" if objective == "pretrain" else "drop"
        if objective in COMPARED:
            self.notes.append("answers that are too long are dropped; other trainers truncate them")
        if data.get("train_on") == "@rows":
            data["train_on"] = self._trl_learns(data["path"])
        if data.get("too_long") == "truncate":
            data["most_truncated"] = 1.0

    def _trl_learns(self, path: Any) -> str:
        """Return the part of a path's rows that TRL learns."""
        answers = self.get("@answers")
        if answers or self.get("@assistant") or (answers is None and {"prompt", "completion"} <= {*_first_row(path)}):
            return "assistant"
        if answers is None:
            self.notes.append(
                "data.train_on: all, as TRL learns conversations by default; of prompts with completions it "
                "learns the completions alone: data.train_on: assistant"
            )
        return "all"

    def _batch(self) -> None:
        rows, times = self.get("@rows"), self.get("@accumulate", 1)
        if (total := self.get("@all_rows")) is not None:
            times = max(1, total // rows)
        seq, objective = self.tree["batch"]["seq"], self.tree["objective"]
        if objective in COMPARED:
            seq *= 2
            both = "an answer and a mismatched one" if objective == JUDGED else "both answers of a pair"
            self.notes.append(f"batch.seq: {seq}, since one row has {both}")
        self.tree["batch"] = {"seq": seq, "tokens": rows * times * seq * self.ranks, "micro_tokens": rows * seq}

    def _optim(self) -> None:
        optim = self.tree["optim"]
        optim["betas"] = [self.get("@beta1"), self.get("@beta2")]
        steps = self.get("@warmup_steps", 0.0)
        optim["warmup"] = steps if steps > 0 else self.get("@warmup_ratio", 0.0)
        if optim["schedule"] == "@constant":  # in transformers, only its variant with warm-up warms up
            optim["schedule"], optim["warmup"] = "constant", 0.0
        self._schedule(dict(self.get("@schedule") or {}))

    def _schedule(self, options: dict[str, Any]) -> None:
        """Set the options of transformers' schedule: its floor, and for wsd the decay steps."""
        optim = self.tree["optim"]
        if optim["schedule"].endswith("cosine"):
            again, cycles = optim["schedule"] == "@cosine", options.pop("num_cycles", None)
            optim["schedule"] = "cosine"
            if again and type(cycles) is int and cycles > 0:
                optim["restarts"] = cycles - 1
            elif cycles is not None and (again or cycles != 0.5):  # transformers' default
                do = "give a whole number from 1 on, with the schedule cosine_with_restarts"
                raise self.refuse("@schedule", f"num_cycles: {cycles!r}", do)
        floors = {name: options.pop(name) for name in ("min_lr", "min_lr_rate", "min_lr_ratio") if name in options}
        for name, value in floors.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise self.refuse("@schedule", f"{name}: {value!r}", "give a number from 0 on")
            share = value / (optim["lr"] or 1.0) if name == "min_lr" else value
            if share > 1:
                raise self.refuse("@schedule", f"{name}: {value!r}, above the learning rate", "give a smaller one")
            if share:
                optim["min_lr_ratio"] = share
        if optim["schedule"] == "wsd":
            key = "@schedule" if options else "optim.schedule"
            kind = options.pop("decay_type", "cosine")
            if kind != "linear" or options.pop("warmup_type", "linear") != "linear":
                found = f"a decay of type {kind}, where optim.schedule: wsd has a linear one"
                raise self.refuse(key, found, "lr_scheduler_kwargs: {decay_type: linear, num_decay_steps: N}")
            if (steps := options.pop("num_decay_steps", None)) is not None:
                if type(steps) is not int or steps < 1:
                    raise self.refuse("@schedule", f"num_decay_steps: {steps!r}", "give a number of steps")
                optim["decay"] = steps
        if options:
            key, value = next(iter(options.items()))
            raise self.refuse("@schedule", f"{key}: {value!r}, which has no counterpart", LEAVE)

    def _steps(self) -> None:
        """Set the intervals of evaluation and saving, in steps or as a share of the run."""
        train = self.tree["train"]
        epochs = train.setdefault("epochs", 1.0)
        logged = train.get("log_every") or self.get("@logged")
        if isinstance(train.get("log_every"), float):
            train["log_every"] = max(1, int(train["log_every"]))
        for name in ("eval", "save"):
            per_epoch, strategy, steps = (self.get(f"@{name}{part}") for part in ("s", "_strategy", "_steps"))
            if per_epoch is None and strategy == "epoch":
                per_epoch = 1
            if strategy == "steps" and name == "eval":
                steps = steps or logged  # like transformers and TRL
            if per_epoch is None and steps and strategy not in ("no", False):
                train[f"{name}_every"] = int(steps) if steps >= 1 else round(steps, 6)
            elif per_epoch and per_epoch * epochs > 1:  # else at the end
                train[f"{name}_every"] = round(1 / (per_epoch * epochs), 6)

    def _evaluations(self) -> None:
        """Reject or note settings that need held-out rows, if there are none."""
        train = self.tree["train"]
        if "eval" in self.tree["data"]:
            return
        if "stop_after" in train:
            found = f"{train['stop_after']} evaluations without a gain, where no rows are held out"
            raise self.refuse("train.stop_after", found, "hold out a share of the rows, or leave it out")
        train.pop("eval_every", None)
        for place in ("@eval_strategy", "@eval_steps", "@evals"):
            if self.get(place) not in (None, "no", False, 0):
                key = self.facts.by.get(place, place)
                self.notes.append(f"{key}: no effect without held-out rows: `data.eval: 0.05` holds out a share")

    # Techniques

    def _precision(self) -> None:
        if "fp8" in self.with_ and "compile" not in self.with_:
            self.with_["compile"] = {}
            self.notes.append("fp8: `compile` is added, which rounds what enters a product")
        if "amp" not in self.with_:  # fp16
            if self.get("@pure") and self.get("@adapter") is None:
                self.with_["bf16"] = {"rounding": "nearest"}
            elif self.get("@pure") or self.get("@bf16"):
                self.with_["amp"] = {}
        varlen = self.with_.setdefault("attention", {"impl": "sdpa"})["impl"] == "varlen"
        if varlen and not (self.with_.keys() & {"amp", "bf16"} and self._in_our_decoder()):
            self.with_["attention"] = {"impl": "sdpa"}

    def _in_our_decoder(self) -> bool:
        """Return whether our decoder supports the model's family; False if its config.json is not available."""
        if (path := self.tree["model"].get("path")) == "tiny":
            return True
        if (hf := known_config(path)) is None:
            self.notes.append(
                "attention: sdpa, since the model's config.json is not here; `impl: varlen` may be faster"
            )
        return hf is not None and native_obstacle(hf) is None

    def _adapter(self) -> None:
        """Complete the adapter, and add the quantization of its base."""
        adapter = self.get("@adapter")
        options = {name: value for name, value in self.with_.pop("lora", {}).items() if value is not False}
        codes = next((name for name in ("@bits", "@four", "@eight") if self.get(name)), "")
        bnb = _read_keys(self.get("@bnb") or {}, foreign.BITSANDBYTES, self.place, "bnb_config_kwargs.")
        self.notes += bnb.notes
        if adapter is None:
            if codes:
                raise self.refuse(codes, "no adapter", "codes are not trained: add an adapter")
            if "@linear" in self.facts.of or "init" in options:
                self.notes.append("arguments of lora: no effect without an adapter")
            return
        options.setdefault("alpha", 2.0 * options["rank"])
        options["targets"] = self._with_experts(self._targets(options.get("targets")))
        if self.get("@pissa"):
            turns = self.get("@pissa_iter", 16)  # LLaMA-Factory's default; below 0: exact
            options["init"] = f"pissa_niter_{turns}" if turns >= 0 else "pissa"
        self.with_["lora"] = options
        if adapter == "qlora" or self.get("@four") or self.get("@bits") == 4:
            self.with_["nf4"] = {"double": bool(bnb.of.get("@double", self.get("@double")))}
        elif codes:
            self.with_["int8"] = {}

    def _targets(self, given: Any) -> Any:
        """Return the linears with adapters, in the format of `lora:targets`."""
        if self.get("@linear") or given in ("all", "all-linear", None):
            return "all-linear"
        if isinstance(given, str) and re.search(r"[^\w.,\s]", given):  # a regular expression, as in PEFT
            try:
                matching(given, LINEARS)
            except UserError as error:
                raise self.refuse("with.lora.targets", error.found, error.do) from None
            return given
        return ["q_proj", "v_proj"] if given == "peft" else split_names(given)  # PEFT's choice for these families

    def _with_experts(self, targets: Any) -> Any:
        """Add experts to an adapter's targets: they are parameters there, named like other linears."""
        given = self.get("@parameters")
        if not given:
            return targets
        parts = [str(name).rpartition(".") for name in (given if isinstance(given, list) else [given])]
        experts = all(parent.rpartition(".")[2] == "experts" for parent, _, _ in parts)
        if not experts or {name for _, _, name in parts} != {"gate_up_proj", "down_proj"}:
            do = "name mlp.experts.gate_up_proj and mlp.experts.down_proj, or neither"
            raise self.refuse("@parameters", f"{given!r}", do)
        if isinstance(targets, str) and targets != "all-linear":
            targets = [*matching(targets, LINEARS)]
        if not isinstance(targets, list):
            if self.get("@linear") or self.get("with.lora.targets") is not None:
                do = "name the linears: lora_target_modules: [q_proj, v_proj]"
                raise self.refuse("@parameters", "all linears as well", do)
            return "experts"
        inside = {"gate_proj", "up_proj", "down_proj"}
        dense = inside & {*targets}
        if dense and dense != inside:
            do = f"name all of {', '.join(sorted(inside))}, or none of them"
            raise self.refuse("with.lora.targets", f"{targets}", do)
        return [*(name for name in targets if name not in inside), *(["dense"] if dense else []), "experts"]

    def _layout(self) -> None:
        """Set the layout of rows and recomputation, and check plugins."""
        if "offload-activations" not in self.with_:
            self.with_ |= copy.deepcopy(self.get("@recompute") or {})
        if "packing" in self.with_:
            self.with_.pop("sort-by-length", None)
        elif not self.get("@whole_rows") and not self.with_.keys() & {"compile", "sort-by-length"}:
            self.with_["pad"] = {}
        for plugin in self.get("@plugins", []):
            if not re.search(r"\.(liger|cut_cross_entropy|kernels|swanlab|expert_parallel|lm_eval)\.", str(plugin)):
                raise self.refuse("@plugins", f"{plugin}", LEAVE)
            if ".cut_cross_entropy." in str(plugin):
                self.with_.setdefault("fused-loss", {})
            else:
                self.notes.append(f"plugins: {plugin}: {foreign.SPEED.idle}")

    def _sharding(self) -> None:
        """Translate sharding and parallel axes into techniques; refuse axes that do not divide the ranks."""
        sharding: Sharding | None = None
        for place in ("@accelerate", "@launcher", "@sharding", "@fsdp_config"):  # a later one overrides
            if place == "@fsdp_config" and sharding is None and self.tool != "axolotl" and self.get(place):
                self.notes.append("fsdp_config: no effect without `fsdp`")
                continue
            if (part := self._cut(place)) is None:
                continue
            if place == "@fsdp_config" and sharding is not None:  # the strategy is in one of the two
                part = replace(sharding, stage=min(sharding.stage, part.stage), recompute=part.recompute)
            sharding = part
        if sharding is not None and sharding.recompute and "offload-activations" not in self.with_:
            self.with_["recompute"] = {}
        if sharding is not None and self.ranks == 1:
            self.notes.append("sharding: give --ranks N, and the rows of a step and `with: {fsdp: ...}` follow")
        elif sharding is not None and sharding.stage >= 2:
            self.with_["fsdp"] = {"stage": sharding.stage}
        elif self.ranks > 1:
            self.with_["ddp"] = {}
        axes = parallel_axes(self.get)
        within = math.prod(axes[name]["size"] for name in ("tensor", "context") if name in axes)
        for name in axes.keys() & {"tensor", "context", "experts"}:
            each = axes[name]["size"] if name == "experts" else within
            if self.ranks % each:
                do = f"give --ranks N, a multiple of {each}: the number of GPUs that it was written for"
                raise self.refuse(f"@{name}", f"{axes[name]['size']}, where the run has --ranks {self.ranks}", do)
        if axes and self.ranks == 1:
            self.notes.append("several GPUs: give --ranks N, and the techniques that share the work follow")
        elif axes:
            self.with_ |= axes
            self.with_.pop("ddp" if "fsdp" in self.with_ else "", None)

    def _cut(self, place: str) -> Sharding | None:
        """Return the model's sharding from one key, and note the parts that are not read."""
        given, key = self.get(place), self.facts.by.get(place, "")
        sharding = read_sharding(given, self.place.file)
        if sharding is None:
            return None
        if sharding.in_host is not None:
            name = f"{key}.{sharding.in_host}" if sharding.in_host else key
            if self.get("@adapter") is None:
                self.with_["paged-states"] = {}
                self.notes.append(
                    f"{name}: `paged-states` keeps the optimizer's states in host memory, not the weights"
                )
            else:
                self.notes.append(f"{name}: weights stay on the GPUs, and `optrush plan` says what fits")
        if sharding.source == "missing file":
            self.notes.append(f"{key}: {given} is not here: stage {sharding.stage} is taken from its name")
        elif sharding.source == "settings":
            self.notes.append(f"{key}: only its sharding is read, not its other settings")
        return sharding


def _first_row(path: Any) -> Mapping[str, Any]:
    """Return the first row of an available file; else an empty one."""
    if not isinstance(path, str) or not Path(path).is_file():
        return {}
    from optrush.data.readers import read_rows

    try:
        return dict(next(read_rows(Path(path)))[1])
    except (UserError, StopIteration):
        return {}  # training reports the error
