"""import: translate a configuration of another trainer into the YAML of a run, key by key, or refuse it by its key.

The tables of keys are in `import_keys`; this module reads the file, and combines what they give: rows, accumulation
and ranks become the slots of a step, an adapter and its base become techniques.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml

from optrush.cli.import_keys import (
    CHATS,
    FACTORY_COLUMNS,
    FACTORY_KEYS,
    FACTORY_REFUSED,
    FACTORY_ROLES,
    FACTORY_UNNAMED,
    FOREIGN,
    INSTRUCTION,
    KIND_NAMES,
    KINDS,
    LEAVE,
    LOGGED,
    LOGGER,
    PAIRS,
    ROW_IDLE,
    ROW_KINDS,
    SHARDED,
    SPEED,
    TOOLS,
    Rule,
    Tool,
    ToolName,
)
from optrush.cli.import_sharding import Sharding, read_sharding
from optrush.config import (
    COMPARED,
    JUDGED,
    SECTIONS,
    Config,
    Model,
    parse_config,
    parse_scalar,
    parse_yaml,
    refuse_secrets,
)
from optrush.errors import ConfigError, UserError

Notes = list[str]
LEARNING = ("roles_to_train", "train_on_eos", "train_on_eot", "drop_system_message", "message_field_training")
ALIKE = 0.9  # of difflib's ratio: a slip of the keyboard and not another word
ANSWERS = ("assistant", "gpt")  # their roles
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_DATA_FILE = re.compile(r"\.(jsonl?|parquet|csv|txt|arrow|zst|gz)\Z")


def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a YAML, JSON, or a command line", show_default=False)],
    tool: Annotated[
        ToolName | None,
        typer.Option("--from", metavar="TOOL", help=f"{', '.join(get_args(ToolName))}; found if unsaid"),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="data.path, where FILE names data by a list elsewhere")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="GPUs that FILE was meant for: a step has so many rows")
    ] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="YAML", help="the file to write; else printed")] = None,
) -> None:
    """Translate another trainer's configuration.

    FILE is of axolotl, LLaMA-Factory or TRL (SFT, DPO, KTO, reward models), or holds the command line of a train.py
    with the arguments of transformers. Each key is mapped, or has no effect here and is listed, or is refused by name
    (exit code 2).
    """
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}", "it exists", "name another file, or remove it")
    found = translate(file, tool, data, ranks)
    if out is None:
        print(found.text, end="")
    else:
        try:
            out.write_text(found.text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {out}", f"{error.strerror}", "name another file") from None
        print(f"optrush train {shlex.quote(str(out))}{f' --ranks {found.ranks}' if found.ranks > 1 else ''} --dry-run")
    for note in found.notes:
        typer.echo(note, err=True)


@dataclass(frozen=True)
class Imported:
    """A translated configuration."""

    tool: ToolName
    text: str  # our YAML
    notes: tuple[str, ...]  # what has no effect here, or another one
    config: Config
    ranks: int  # that a step's rows are for


# --- from a file to facts


def translate(file: Path, tool: ToolName | None = None, data: str | None = None, ranks: int = 1) -> Imported:
    """Translate a file of another trainer.

    Args:
        tool: whose file it is; None: found by its keys.
        data: `data.path` in place of what the file names.
        ranks: processes of the run that the file describes; its own command line may name them.

    Raises:
        ConfigError: not read, of no known tool, or a key or a value without a counterpart.
    """
    given, lines, spoken = _read(file)
    kind = tool or spoken or _recognised(given, file)
    notes: Notes = []
    facts = _facts(given, TOOLS[kind], _Place(file, lines), notes)
    if data is not None:
        facts = {key: value for key, value in facts.items() if key not in DATA_FACTS} | {"data.path": data}
    composer = _Composer(kind, facts, ranks, _Place(file, lines), notes)
    tree = composer.tree()
    text = f"# Translated from {file.name} of {kind}.\n{yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)}"
    config = parse_config(text, str(file))
    refuse_secrets(config)
    return Imported(kind, text, tuple(dict.fromkeys(notes)), config, composer.ranks)


@dataclass(frozen=True)
class _Place:
    """Where a key is."""

    file: Path
    lines: Mapping[Any, int]

    def of(self, key: str) -> str:
        parts = tuple(int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", key) if part)
        line = next((self.lines[parts[:n]] for n in range(len(parts), 0, -1) if parts[:n] in self.lines), None)
        return f"{self.file}:{line}: `{key}`" if line else f"{self.file}: `{key}`"


def _read(file: Path) -> tuple[dict[str, Any], Mapping[Any, int], ToolName | None]:
    """Return the keys of a YAML, a JSON or a command line, their lines, and the tool that a command names."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{file}", f"{error.strerror}", "name a file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}", f"not UTF-8: {error.reason}", "save it as UTF-8") from None
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{file}", f"not JSON: {error}", "mend it") from None
        return found, {}, None
    if re.search(r"(^|\s)--[a-z][\w-]+", re.sub(r"(?m)#.*$", "", text)) and not re.search(r"(?m)^[a-z_]+:(\s|$)", text):
        return *_arguments(text, file), None
    given, lines = parse_yaml(text, str(file))
    return given, lines, None


def _arguments(text: str, file: Path) -> tuple[dict[str, Any], Mapping[Any, int]]:
    """Return the arguments of the last command in a text that has any, and under `@script` what is run."""
    commands = [line for line in re.sub(r"\\\r?\n", " ", text).splitlines() if re.search(r"\s--[a-z]", line)]
    try:
        words = shlex.split(commands[-1], comments=True) if commands else []
    except ValueError as error:
        raise ConfigError(f"{file}", f"no command line: {error}", "mend its quotes") from None
    at = next(
        (n for n, word in enumerate(words) if word.endswith(".py") or word in ("sft", "dpo", "kto", "reward")), -1
    )
    given: dict[str, Any] = {"@script": Path(words[at]).name if at >= 0 else ""}
    launcher = dict(_pairs(words[: max(at, 0)]))
    for name in ("num_processes", "nproc_per_node", "num_gpus"):
        if name in launcher:
            given["@ranks"] = launcher[name]
    own = {key: value for key, value in launcher.items() if SHARDED.match(key)}
    if "config_file" in launcher:
        given["config_file"] = launcher["config_file"]
    if own:
        given["accelerate launch"] = own
    return given | dict(_pairs(words[at + 1 :])), {}


def _pairs(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield --key value, --key=value, and --key alone as true; several values as a list."""
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
    script = str(given.get("@script", ""))
    keys = given.keys()
    if "base_model" in keys and not script:
        return "axolotl"
    if keys & {"stage", "finetuning_type", "cutoff_len", "template"}:
        return "llama-factory"
    if re.fullmatch(r"kto(\.py)?", script) or (not script and keys & {"desirable_weight", "undesirable_weight"}):
        return "trl-kto"
    if re.fullmatch(r"gkd(\.py)?", script) or (not script and keys & {"lmbda", "seq_kd"}):
        return "trl-gkd"
    if re.fullmatch(r"reward(_modeling)?(\.py)?", script) or (not script and "center_rewards_coefficient" in keys):
        return "trl-reward"
    if re.fullmatch(r"dpo(\.py)?", script) or (
        not script and keys & {"beta", "precompute_ref_log_probs", "f_divergence_type"}
    ):
        return "trl-dpo"
    if "train" in script:
        return "train.py"
    if script and not re.fullmatch(r"sft(\.py)?", script):
        raise ConfigError(f"{file}", f"a command of {script}", f"name it: --from {', '.join(get_args(ToolName))}")
    if keys & {"model_name_or_path", "model_name"}:
        return "trl-sft"
    found = ", ".join(sorted(map(str, keys))[:6]) or "no key"
    raise ConfigError(f"{file}", f"of no known tool: {found}", f"name it: --from {', '.join(get_args(ToolName))}")


class Refusals(ConfigError):
    """Several keys that are refused, each with its own three lines."""

    def __init__(self, each: list[ConfigError]) -> None:
        super().__init__(each[-1].asked, each[-1].found, each[-1].do)
        self.each = each

    def __str__(self) -> str:
        return "\n".join(map(str, self.each))


@dataclass
class _Facts:
    """Values of a file, by place in our YAML or @fact."""

    tool: Tool
    place: _Place
    notes: Notes
    of: dict[str, Any] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)  # the key that gave each

    def add(self, key: str, value: Any) -> None:
        """Add a key's value, or note that it has no effect; raise ConfigError for one without a counterpart."""
        rule = self.tool.keys.get(key)
        if rule is None and LOGGER.match(key):
            rule = LOGGED
        if rule is None:
            if value is not False:
                raise ConfigError(
                    self.place.of(key), f"a key of {self.tool.name} without a counterpart", self.hint(key)
                )
            self.notes.append(f"{key}: off there, and absent here")
        elif rule.idle:
            self.notes.append(f"{key}: {rule.idle}")
        elif rule.to:
            self.put(key, value, rule)
        elif not any(value == v and type(value) is type(v) for v in rule.only):
            raise ConfigError(self.place.of(key), f"{value!r}, which has no counterpart", rule.do or LEAVE)

    def hint(self, key: str) -> str:
        """Return what to do with an unknown key: the known one that is spelled nearly alike, if any."""
        close = () if FOREIGN.match(key) else difflib.get_close_matches(key, self.tool.keys, 1, ALIKE)
        return LEAVE + "".join(f"; did you mean `{name}`?" for name in close)

    def put(self, key: str, value: Any, rule: Rule) -> None:
        """Put a key's value in the place of its rule."""
        found = _valued(key, value, rule, self.place)
        known = rule.to in self.by
        if rule.to == "@with":
            self.of["@with"] = {**self.of.get("@with", {}), **found}
        elif found is None:
            self.of.setdefault(rule.to, None)  # given as none: no default of the tool takes its place
        elif known and self.of[rule.to] != found and rule.to != "@packing":  # any of its keys may pack
            do = f"keep one of `{self.by[rule.to]}` and `{key}`"
            raise ConfigError(self.place.of(key), f"{value!r}, where `{self.by[rule.to]}` gives another value", do)
        elif not (known and found is False):
            self.of[rule.to], self.by[rule.to] = found, key


def _facts(given: Mapping[str, Any], tool: Tool, place: _Place, notes: Notes) -> dict[str, Any]:
    """Return the values of a file by place in our YAML or @fact, defaults of the tool included."""
    facts = _Facts(tool, place, notes)
    refused: list[ConfigError] = []
    for key, value in given.items():
        if key.startswith("@"):
            facts.of[key] = value
        elif (rule := tool.keys.get(key)) is not None and value is None and rule.null:
            refused.append(ConfigError(place.of(key), f"null: {rule.null}", rule.do))
        elif not (value is None or value in ("", [], {})):
            try:
                facts.add(key, value)
            except ConfigError as error:
                refused.append(error)
    if refused:
        raise refused[0] if len(refused) == 1 else Refusals(refused)
    merged = {**tool.defaults, **facts.of, "@by": facts.by}
    if "@with" in facts.of and "@with" in tool.defaults and "gradient_checkpointing" not in given:
        merged["@with"] = {**tool.defaults["@with"], **facts.of["@with"]}
    return merged


def _valued(key: str, value: Any, rule: Rule, place: _Place) -> Any:
    """Return a value as the rule translates it, or raise ConfigError."""
    kinds = next((kinds for places, kinds in KINDS if rule.to in places), None)
    if kinds is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        raise ConfigError(place.of(key), f"{value!r}", f"give {' or '.join(KIND_NAMES[kind] for kind in kinds)}")
    if rule.values is None:
        return value
    truth = True if value in ("true", "True") else False if value in ("false", "False") else value
    for known, ours in rule.values.items():
        if known == truth and isinstance(known, bool) == isinstance(truth, bool):
            return ours
    choices = ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in rule.values)
    raise ConfigError(place.of(key), f"{value!r}, which has no counterpart", rule.do or f"take one of {choices}")


# --- from facts to our YAML

DATA_FACTS = ("@data", "@datasets", "@pretraining", "@data_config", "@data_split", "@dataset_dir")


class _Composer:
    """Combines facts into the tree of our YAML."""

    def __init__(self, tool: ToolName, facts: dict[str, Any], ranks: int, place: _Place, notes: Notes) -> None:
        self.tool, self.facts, self.place, self.notes = tool, facts, place, notes
        self.ranks = int(facts.get("@ranks", ranks))
        self.columns: dict[str, str] = {}
        self.roles: dict[str, str] = {}
        self.with_: dict[str, Any] = {name: dict(options) for name, options in facts.get("@with", {}).items()}

    def get(self, name: str, default: Any = None) -> Any:
        return self.facts.get(name, default)

    def refuse(self, key: str, found: str, do: str) -> ConfigError:
        return ConfigError(self.place.of(key), found, do)

    def tree(self) -> dict[str, Any]:
        """Return our YAML as values."""
        tree: dict[str, Any] = {"model": {}, "objective": "sft", "data": {}, "batch": {}, "optim": {}, "train": {}}
        for place, value in self.facts.items():
            section, _, key = place.partition(".")
            if place.startswith("@") or value is None:
                continue
            if not key:
                tree[section] = value
            else:
                tree.setdefault(section, {})[key] = value
        if "path" not in tree["model"]:
            raise self.refuse("model", "none is named", "name one")
        self._model(tree)
        self._data(tree)
        self._objective(tree)
        self._batch(tree)
        self._optim(tree)
        self._cadences(tree)
        self._techniques(tree)
        tree["with"] = self.with_
        order = ("model", "objective", *SECTIONS, "data", "batch", "optim", "train", "seed", "output", "with")
        return {
            key: tree[key] for key in (*order, *(k for k in tree if k not in order)) if tree.get(key) not in ({}, None)
        }

    def _model(self, tree: dict[str, Any]) -> None:
        if (revision := self.get("@revision")) not in (None, "main"):
            if "revision" not in Model.model_fields:
                raise self.refuse("model_revision", f"{revision!r}", "download that revision, and name its folder")
            tree["model"]["revision"] = str(revision)
        if (tokens := self.get("@tokens")) is not None:
            if not isinstance(tokens, list):
                raise self.refuse("tokens", f"{tokens!r}", "list the tokens to add: [<a>, <b>]")
            tree["model"]["add_tokens"] = tokens
        template = self.get("@template")
        if template == "chatml":
            tree["model"]["chat_template"] = "chatml"
            self.notes.append("chatml: a text begins with the tokenizer's begin-of-text token, where it has one")
        elif template is not None:
            self.notes.append(f"{template}: the chat template of the model's own tokenizer is taken")
        if (own := self.get("@tokenizer")) not in (None, tree["model"]["path"]):
            raise self.refuse(
                "tokenizer_config",
                f"{own}, another tokenizer than the model's",
                "put its files into the model's folder",
            )
        for name, token in (self.get("@special") or {}).items():
            self.notes.append(f"special_tokens.{name}: {token}; the tokenizer's own is taken, and no token is padding")

    # Data

    def _data(self, tree: dict[str, Any]) -> None:
        data, d = tree["data"], self.facts
        if "path" not in data:
            if "@datasets" in d or "@pretraining" in d:
                data["path"] = self._axolotl(tree)
            elif "@data" in d:
                named = (
                    self._factory(tree)
                    if self.tool == "llama-factory"
                    else [
                        self._origin({"path": d["@data"], "name": d.get("@data_config"), "split": d.get("@data_split")})
                    ]
                )
                data["path"] = named[0] if len(named) == 1 else named
            else:
                raise self.refuse("data", "none is named", "name it: --data FILE, a hub id, or a folder")
        if (field_ := self.get("@text_field")) not in (None, "text"):
            self.columns[field_] = "text"
        if self.columns:
            data["columns"] = self.columns
        if self.roles:
            data["roles"] = self.roles
        held = data.get("eval")
        if held in (0, 0.0):
            del data["eval"]
        elif isinstance(held, (int, float)) and held >= 1:
            raise self.refuse("data.eval", f"{held} rows", "give the share of the rows that is held out, such as 0.05")
        for key, place in (("@eval_data", "eval_dataset"), ("@test_datasets", "test_datasets")):
            if self.get(key):
                data["eval"] = self._held_out(place, self.get(key))
        if "eval" not in data:
            self._test_split(data)
        clean: dict[str, Any] = {}
        if self.get("@dedup"):
            clean["exact_duplicates"] = True
        if self.get("@least"):
            clean["tokens"] = [self.get("@least"), None]
        if clean:
            data["clean"] = clean

    def _held_out(self, key: str, given: Any) -> str:
        entry = given[0] if isinstance(given, list) and len(given) == 1 else given
        entry = {"path": entry} if isinstance(entry, str) else entry
        path = self._origin(entry) if isinstance(entry, dict) and isinstance(entry.get("path"), str) else None
        if not isinstance(path, str) or not (path.startswith("hub:") or Path(path).suffix or Path(path).exists()):
            raise self.refuse(key, f"{given!r}", "name one file of held-out rows, or give a share: data.eval: 0.05")
        return path

    def _test_split(self, data: dict[str, Any]) -> None:
        """Hold out the split of a hub's data set that TRL evaluates on, or note why not."""
        given = self.get("@test_split")
        if self.get("@eval_strategy") in (None, "no", False):
            if given is not None:
                self.notes.append("dataset_test_split: nothing is evaluated there without `eval_strategy`")
        elif (given or self.tool.startswith("trl-")) and str(data["path"]).startswith("hub:") and "@data" in self.facts:
            named = {"path": self.get("@data"), "name": self.get("@data_config"), "split": given or "test"}
            data["eval"] = self._origin(named)
        elif given is not None:
            do = "here held-out rows are a file, a split of the hub or a share: data.eval: 0.05"
            self.notes.append(f"dataset_test_split: {given}; {do}")

    def _origin(self, entry: Mapping[str, Any]) -> Any:
        """Return one source as our data.path has it."""
        from optrush.data.readers import HUB, HUB_SET

        path, split, config = entry["path"], entry.get("split"), entry.get("name")
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

    def _axolotl(self, tree: dict[str, Any]) -> Any:
        """Return data.path of `datasets` or `pretraining_dataset`; sets the objective and the columns."""
        given = self.get("@datasets") or self.get("@pretraining")
        entries = [given] if isinstance(given, (str, dict)) else list(given)
        objectives, found = set(), []
        for n, entry in enumerate(entries):
            if not isinstance(entry, str | dict):
                raise self.refuse(f"datasets[{n}]", repr(entry), "name a file or a data set of the hub")
            entry = {"path": entry} if isinstance(entry, str) else dict(entry)
            kind = entry.pop("type", None) or ("pretrain" if "@pretraining" in self.facts else None)
            if isinstance(kind, dict):
                entry, kind = {**kind, **entry}, "alpaca"
            if kind not in ROW_KINDS:
                do = f"write the rows as messages, or take one of {', '.join(sorted(ROW_KINDS))}"
                raise self.refuse(f"datasets[{n}].type", f"{kind!r}, rows that are not known here", do)
            objective, columns = ROW_KINDS[kind]
            objectives.add(objective)
            self.columns |= columns
            self._columns_of(entry, n, kind in PAIRS and bool(self.get("@objective")))
            if objective == "sft":
                self._learning(entry, n, kind in CHATS)
            else:
                self._unread(entry, n)
            found.append(self._origin(entry))
        if len(objectives) > 1:
            raise self.refuse("datasets", "texts beside conversations", "train on one kind a run")
        tree["objective"] = objectives.pop()
        return found[0] if len(found) == 1 else found

    def _columns_of(self, entry: dict[str, Any], n: int, pairs: bool) -> None:
        """Note what the keys of a source's rows are, and refuse its keys that have no counterpart.

        Args:
            pairs: its conversations are the prompts of pairs.
        """
        turns = {"message_field_role": "role", "message_field_content": "content"}
        named = {turns[k]: entry[k] for k in turns if k in entry} | dict(entry.get("message_property_mappings") or {})
        key = entry.get("field_messages") or "messages"
        for ours, theirs in named.items():
            if ours in ("role", "content") and theirs not in ("role", "content", "from", "value"):
                self._turn_key(theirs, ours, key, pairs)
        if pairs:
            self.columns[key] = "prompt"
        elif key not in ("messages", "conversations"):
            self.columns[key] = "prompt" if self.get("@objective") else "messages"
        for theirs, ours in (("field", "text"), ("text_column", "text"), ("field_chosen", "chosen"),
                             ("field_rejected", "rejected"), *INSTRUCTION.items()):  # fmt: skip
            if entry.get(theirs) not in (None, "", ours):
                self.columns[entry[theirs]] = ours
        for role, names in (entry.get("roles") or {}).items():
            self.roles |= {name: role for name in names if name != role and name not in ("human", "gpt")}
        known = {"path", "split", "name", "data_files", "message_property_mappings", "field_messages", "field", "roles",
                 "text_column", "field_chosen", "field_rejected", *LEARNING, *turns, *INSTRUCTION}  # fmt: skip
        for key, value in entry.items():
            if key in ROW_IDLE:
                self.notes.append(f"datasets[{n}].{key}: the chat template of the model renders the rows")
            elif key not in known and value not in (None, "", [], False):
                raise self.refuse(f"datasets[{n}].{key}", f"{value!r}", LEAVE)

    def _turn_key(self, theirs: str, ours: str, key: str, pairs: bool) -> None:
        """Note what a key of turns is, in the lists that rows have them in; `key` has a row's conversation."""
        one = key if key == "conversations" else "messages"
        for turns in ("prompt", "chosen", "rejected") if pairs else (one,):
            self.columns[f"{turns}[].{theirs}"] = ours

    def _learning(self, entry: Mapping[str, Any], n: int, chats: bool) -> None:
        """Refuse what would learn other tokens of a source's rows than answers with their ends, and note the rest."""
        from optrush.data.schema import LEARNT

        if not chats:
            self._unread(entry, n)
            self.notes.append(f"datasets[{n}].type: headings of a prompt are those of the model's chat template")
            return
        if self.get("data.train_on") == "all":
            found = "true: of conversations every turn's text, without headers and ends"
            do = "train_on_inputs: false; data.train_on: all learns all tokens of a conversation"
            raise self.refuse("train_on_inputs", found, do)
        learnt = entry.get("roles_to_train")
        if learnt is not None and not (learnt and isinstance(learnt, list) and all(r in ANSWERS for r in learnt)):
            raise self.refuse(f"datasets[{n}].roles_to_train", f"{learnt}", "the assistant's turns are learnt")
        for key in ("train_on_eos", "train_on_eot"):
            if entry.get(key) not in (None, "turn"):
                found = f"{entry[key]!r}: other ends of turns than those of the answers that are learnt"
                raise self.refuse(f"datasets[{n}].{key}", found, f"{key}: turn")
        if entry.get("drop_system_message"):
            found = "true: the system's message is taken out of each row"
            raise self.refuse(f"datasets[{n}].drop_system_message", found, "take it out of the rows")
        if (mark := entry.get("message_field_training")) is None:
            self.notes.append(
                f"datasets[{n}]: a turn that is marked by {', '.join(LEARNT)} is learnt by its mark, which axolotl "
                "reads by message_field_training alone"
            )
        elif not isinstance(mark, str) or not mark:
            found = f"{mark!r}, which names no key of a turn"
            raise self.refuse(f"datasets[{n}].message_field_training", found, "name the key, or leave it out")
        elif mark not in LEARNT:
            self._turn_key(mark, "train", entry.get("field_messages") or "messages", pairs=False)
        given = (
            "" if self.get("@eot") else " not given: axolotl learns that end only where it is the end of a text, too;"
        )
        self.notes.append(f"eot_tokens:{given} an answer ends where the chat template ends it, and its end is learnt")

    def _unread(self, entry: Mapping[str, Any], n: int) -> None:
        """Note the keys of what is learnt that axolotl reads of conversations with answers alone."""
        for key in LEARNING:
            if entry.get(key) not in (None, "", [], False):
                self.notes.append(f"datasets[{n}].{key}: axolotl does not read it of rows of this type")

    def _factory(self, tree: dict[str, Any]) -> list[Any]:
        """Return the sources that LLaMA-Factory's list of data sets has under these names."""
        names = self.get("@data")
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        where = self.get("@dataset_dir", "data")
        around = [Path(where), *(parent / where for parent in self.place.file.resolve().parents)]
        listed = next((f for folder in around if (f := folder / "dataset_info.json").is_file()), None)
        if listed is None:
            found = f"{', '.join(names)}: names in {where}/dataset_info.json, which is not there"
            raise self.refuse("dataset", found, "name the rows: --data FILE")
        table = json.loads(listed.read_text("utf-8"))
        found_rows: list[Any] = []
        for name in names:
            if name not in table:
                raise self.refuse("dataset", f"{name}, which {listed} has not", "name the rows: --data FILE")
            entry = table[name]
            self._named(listed, name, entry)
            for key, do in FACTORY_REFUSED.items():
                if entry.get(key) is not None:
                    raise self.refuse("dataset", f"{name} has {key}: {entry[key]!r}", do)
            columns = dict(entry.get("columns") or {})
            sharegpt = entry.get("formatting") == "sharegpt"
            if sharegpt or entry.get("ranking"):
                columns.setdefault(*(("messages", "conversations") if sharegpt else ("prompt", "instruction")))
            self._tags(entry.get("tags") or {}, columns.get("messages", ""), bool(entry.get("ranking")))
            for column, theirs in columns.items():
                if column == "history":
                    raise self.refuse("dataset", f"{name} has history: earlier turns", "write the rows as messages")
                if column not in FACTORY_COLUMNS:
                    raise self.refuse("dataset", f"{name} has {column}", "train on text, without images and audio")
                ours = FACTORY_COLUMNS[column]
                if entry.get("ranking") and column in ("messages", "prompt"):
                    ours = "prompt"
                if tree["objective"] == "pretrain" or self.get("@objective") == "pretrain":
                    ours = "text" if column == "prompt" else ours
                if theirs not in (ours, "conversations" if ours == "messages" else ours):
                    self.columns[theirs] = ours
            source = entry.get("hf_hub_url") or str(listed.parent / entry.get("file_name", name))
            if entry.get("ranking") and not sharegpt and "system" not in {*columns, *_first_row(source)}:
                found = f"{name} has pairs of texts, which no chat template renders here"
                do = "give each row a `system`, which may be empty, and name it: columns: {system: system}"
                raise self.refuse("dataset", found, do)
            if tree["objective"] == "sft" and self.get("@objective") in (None, "sft"):
                self._unnamed(source, entry)
            found_rows.append(self._origin({"path": source, "split": entry.get("split"), "name": entry.get("subset")}))
        if "max_samples" in tree["data"] and len(names) > 1:
            tree["data"]["max_samples"] *= len(names)
            self.notes.append("max_samples: of each data set there, of all together here")
        return found_rows

    def _named(self, listed: Path, name: str, entry: Any) -> None:
        """Check that a data set of LLaMA-Factory's list is a mapping, and its parts are names."""
        given = entry if isinstance(entry, dict) else {}
        tables = [given.get(key) or {} for key in ("columns", "tags")]
        names = [given[key] for key in ("file_name", "hf_hub_url") if given.get(key) is not None]
        names += [value for table in tables if isinstance(table, dict) for value in table.values()]
        if given and all(isinstance(table, dict) for table in tables) and all(isinstance(n, str) for n in names):
            return
        raise self.refuse("dataset", f"{name} is {entry!r} in {listed}", "give names: columns: {prompt: instruction}")

    def _tags(self, tags: Mapping[str, str], key: str, pairs: bool) -> None:
        """Note what LLaMA-Factory's names for the keys and the roles of a turn are."""
        for tag, name in tags.items():
            if tag in FACTORY_KEYS:
                ours, known = FACTORY_KEYS[tag]
                if name not in known:
                    self._turn_key(name, ours, key, pairs)
            elif tag in FACTORY_ROLES:
                ours, known = FACTORY_ROLES[tag]
                if name not in known:
                    self.roles[name] = ours
            elif tag != "function_tag":
                raise self.refuse("dataset", f"tags: {tag}, which is not known here", LEAVE)

    def _unnamed(self, source: str, entry: Mapping[str, Any]) -> None:
        """Leave out columns that LLaMA-Factory does not read, and note how it joins those that it does."""
        named, row = entry.get("columns"), _first_row(source)
        for column in FACTORY_UNNAMED:
            ours = FACTORY_COLUMNS[column]
            read = column in named if named else column == "query"
            if not read and ours in row:
                self.columns[ours] = "ignore"
            elif not read and not Path(source).is_file():
                self.notes.append(f"dataset: here a column {ours!r} of {source} is read, there it is not")
        if entry.get("formatting", "alpaca") == "alpaca":
            self.notes.append("dataset: an empty line is between instruction and input, where theirs is a line break")

    # Objective, sizes, optimizer

    def _objective(self, tree: dict[str, Any]) -> None:
        named, known = self.get("@objective"), get_args(Config.model_fields["objective"].annotation)
        loss = self.get("@loss")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        if self.tool in ("trl-dpo", "trl-kto", "trl-reward"):
            named = self.tool.removeprefix("trl-")
        if self.tool == "trl-gkd":
            named = "distill"
            self._distill(tree["distill"])
        if named == "ipo":
            named, loss = "dpo", "ipo"
        if loss in ("orpo", "simpo"):
            named, loss = loss, None
        if named is not None:
            if named not in known:
                raise self.refuse("objective", f"{named}", f"optrush has {', '.join(known)}")
            tree["objective"] = named
        if loss is not None:
            if loss not in ("sigmoid", "ipo"):
                raise self.refuse("loss", f"{loss!r}", "dpo.loss: sigmoid or ipo")
            tree.setdefault("dpo", {})["loss"] = loss
        objective = tree["objective"]
        if objective != "dpo" and "dpo" in tree:
            beta = tree.pop("dpo").get("beta")
            if objective in SECTIONS and beta is not None:
                tree.setdefault(objective, {})["beta"] = beta
            else:
                self.notes.append("arguments of preferences: no effect without pairs")
        own = {
            "kto": ("@kto.desirable_weight", "@kto.undesirable_weight"),
            "simpo": ("@gamma",),
            "reward": ("@center",),
        }
        for place in own.get(objective, ()):
            if self.get(place) is not None:
                tree.setdefault(objective, {})[place.removeprefix("@kto.").removeprefix("@")] = float(self.get(place))
        if objective in SECTIONS and objective in tree:
            tree[objective] = {k: float(v) if isinstance(v, int) else v for k, v in tree[objective].items()}
        if objective == "pretrain":
            tree["data"].pop("train_on", None)
            tree["data"]["too_long"] = "split"
        elif objective in COMPARED:
            tree["data"].pop("train_on", None)
            tree["data"]["too_long"] = "drop"
            self.notes.append("answers that are too long are left out whole, where other trainers cut them")
        elif self.tool in ("trl-sft", "trl-gkd", "train.py") and "train_on" not in tree["data"]:
            answers = self.get("@answers")
            if answers or self.get("@assistant") or (answers is None and _completes(tree["data"]["path"])):
                tree["data"]["train_on"] = "assistant"
            elif answers is False:
                tree["data"]["train_on"] = "all"
            else:
                tree["data"]["train_on"] = "all"
                self.notes.append(
                    "data.train_on: all, as TRL learns conversations by default; of prompts with completions it "
                    "learns the completions alone: data.train_on: assistant"
                )
        if tree["data"].get("too_long") == "truncate":
            tree["data"]["most_truncated"] = 1.0

    def _distill(self, distill: dict[str, Any]) -> None:
        """Refuse what a teacher does elsewhere and not here."""
        if self.get("@lmbda"):
            found = f"{self.get('@lmbda')}: that share of the answers is generated while training (0.5 where unsaid)"
            raise self.refuse("lmbda", found, "lmbda: 0 learns from the rows")
        if distill["divergence"] == "@middle":
            raise self.refuse("beta", "0.5 where unsaid: between both divergences", "beta: 0 (forward) or 1 (reverse)")
        distill["temperature"] = float(distill["temperature"])
        if distill["temperature"] != 1:
            self.notes.append("temperature: the loss is multiplied by its square here, as in its source")

    def _batch(self, tree: dict[str, Any]) -> None:
        rows, times = int(self.get("@rows")), int(self.get("@accumulate", 1))
        if (total := self.get("@all_rows")) is not None:
            times = max(1, int(total) // rows)
        seq = int(tree["batch"]["seq"])
        if tree["objective"] in COMPARED:
            seq *= 2
            both = "an answer and a mismatched one" if tree["objective"] == JUDGED else "both answers of a pair"
            self.notes.append(f"batch.seq: {seq}, for {both} lie in one row")
        tree["batch"] = {"seq": seq, "tokens": rows * times * seq * self.ranks, "micro_tokens": rows * seq}

    def _optim(self, tree: dict[str, Any]) -> None:
        optim = tree["optim"]
        optim["betas"] = [float(self.get("@beta1")), float(self.get("@beta2"))]
        steps, ratio = float(self.get("@warmup_steps", 0)), float(self.get("@warmup_ratio", 0))
        optim["warmup"] = steps if steps > 0 else ratio
        for name in ("lr", "weight_decay", "eps", "clip"):
            if name in optim:
                optim[name] = float(optim[name])
        if optim.get("clip") == 0:
            raise self.refuse("max_grad_norm", "0", "optim.clip: null clips nothing")
        if optim["schedule"] == "@constant":  # transformers warms up only by another name
            optim["schedule"], optim["warmup"] = "constant", 0.0

    def _cadences(self, tree: dict[str, Any]) -> None:
        train, epochs = tree["train"], float(tree["train"].get("epochs", 1))
        train["epochs"] = epochs
        if int(self.get("@steps", -1)) > 0:
            train["steps"] = int(self.get("@steps"))
        logged = train.get("log_every") or (10 if self.tool.startswith("trl") else 500)  # where unsaid
        if isinstance(train.get("log_every"), float):
            train["log_every"] = max(1, int(train["log_every"]))
        for name, per_epoch in (("eval", self.get("@evals")), ("save", self.get("@saves"))):
            strategy, steps = self.get(f"@{name}_strategy"), self.get(f"@{name}_steps")
            if per_epoch is None and strategy == "epoch":
                per_epoch = 1
            elif per_epoch is None and name == "eval" and strategy == "steps":
                steps = steps or logged  # as transformers and TRL do
            if per_epoch and per_epoch * epochs > 1:  # else at the end
                train[f"{name}_every"] = round(1 / (per_epoch * epochs), 6)
            elif per_epoch is None and steps and strategy not in ("no", False):
                train[f"{name}_every"] = int(steps) if steps >= 1 else round(steps, 6)
        if "eval" not in tree["data"]:
            if train.get("stop_after") is not None:
                key = self.get("@by", {}).get("train.stop_after", "early_stopping_patience")
                found = f"{train['stop_after']} evaluations without a gain, where no rows are held out"
                raise self.refuse(key, found, "hold out a share of the rows, or leave it out")
            train.pop("eval_every", None)
            for place in ("@eval_strategy", "@eval_steps", "@evals"):
                if self.get(place) not in (None, "no", False, 0):
                    key = self.get("@by", {}).get(place, place)
                    self.notes.append(f"{key}: no effect without held-out rows: `data.eval: 0.05` holds out a share")

    # Techniques

    def _techniques(self, tree: dict[str, Any]) -> None:
        adapter = self._adapter()
        dtype = str(self.get("@dtype", "")).removeprefix("torch.")
        if self.get("@fp16"):
            self.with_["amp"] = {"dtype": "fp16"}
        elif self.get("@bf16") in (True, "auto", "true", "full") or self.get("@pure") or dtype == "bfloat16":
            pure = self.tool == "axolotl" or self.get("@pure") or dtype == "bfloat16"
            if pure and not adapter:
                self.with_["bf16"] = {"rounding": "nearest"}
            else:
                self.with_["amp"] = {}
        if self.get("@recompute") and not (self.with_.keys() & {"recompute", "offload-activations"}):
            self.with_["recompute"] = {}
        elif self.get("@recompute") is False:
            self.with_.pop("recompute", None)
        if self.get("@offload"):
            self.with_.pop("recompute", None)
            self.with_["offload-activations"] = {}
        if self.get("@packing"):
            self.with_["packing"] = {}
        elif self.get("@sorted"):
            self.with_["sort-by-length"] = {}
        elif not self.get("@whole_rows") and "compile" not in self.with_:
            self.with_["pad"] = {}
        if self.with_.get("attention", {}).get("impl") == "varlen" and not self.with_.keys() & {"amp", "bf16"}:
            self.with_["attention"] = {"impl": "sdpa"}
        if self.get("@neftune"):
            self.with_["neftune"] = {"alpha": float(self.get("@neftune"))}
        if int(self.get("@workers") or 0) > 0:
            self.with_["loader"] = {"workers": int(self.get("@workers"))}
        for name in ("fraction", "mib"):
            if self.get(f"@memory.{name}") is not None:
                self.with_["memory-cap"] = {name: self.get(f"@memory.{name}")}
        self._sharding()
        for plugin in self.get("@plugins") or []:
            if not re.search(r"\.(liger|cut_cross_entropy|kernels|swanlab)\.", str(plugin)):
                raise self.refuse("plugins", f"{plugin}", LEAVE)
            self.notes.append(f"plugins: {plugin}: {SPEED.idle}")
        self.with_.setdefault("attention", {"impl": "sdpa"})

    def _adapter(self) -> bool:
        """Add the adapter and its base's codes; return whether there is one."""
        adapter, lora = self.get("@adapter"), self.get
        four = self.get("@four") or self.get("@bits") == 4 or adapter == "qlora"
        eight = self.get("@eight") or self.get("@bits") == 8
        if adapter is None:
            if four or eight:
                by = self.get("@by", {})
                key = next(by[place] for place in ("@bits", "@four", "@eight") if self.get(place))
                raise self.refuse(key, "no adapter", "codes are not trained: add an adapter")
            if "@linear" in self.facts or self.get("@lora.init"):
                self.notes.append("arguments of lora: no effect without an adapter")
            return False
        targets = self.get("@targets")
        if self.get("@linear") or targets in ("all", "all-linear", None):
            found: Any = "all-linear"
        elif targets == "peft":  # its own choice for these families
            found = ["q_proj", "v_proj"]
        else:
            found = (
                [t.strip() for t in targets.split(",")]
                if isinstance(targets, str)
                else [str(t).strip(" ,") for t in targets]
            )
            if any(not re.fullmatch(r"\w+", t) for t in found):
                raise self.refuse("lora_target_modules", f"{targets!r}", "name the linears: [q_proj, v_proj]")
        found = self._with_experts(found)
        rank = int(lora("@lora.rank"))
        options: dict[str, Any] = {
            "rank": rank, "alpha": float(lora("@lora.alpha", 2 * rank)), "dropout": float(lora("@lora.dropout", 0)),
            "targets": found,
        }  # fmt: skip
        for name in ("rslora", "dora", "save", "init", "lr_ratio"):
            if lora(f"@lora.{name}"):
                options[name] = lora(f"@lora.{name}")
        if "lr_ratio" in options:
            options["lr_ratio"] = float(options["lr_ratio"])
        if self.get("@pissa"):
            turns = int(self.get("@pissa_iter", 16))  # LLaMA-Factory's default; below 0: exact
            options["init"] = f"pissa_niter_{turns}" if turns >= 0 else "pissa"
        if isinstance(options.get("save"), str):
            options["save"] = [s.strip() for s in options["save"].split(",")]
        self.with_["lora"] = options
        if four:
            self.with_["nf4"] = {"double": bool(self.get("@double"))}
        elif eight:
            self.with_["int8"] = {}
        return True

    def _with_experts(self, found: Any) -> Any:
        """Add experts to an adapter's targets: parameters there, whose names are those of linears beside them."""
        given = self.get("@parameters")
        if not given:
            return found
        parts = [str(name).rpartition(".") for name in (given if isinstance(given, list) else [given])]
        experts = all(parent.rpartition(".")[2] == "experts" for parent, _, _ in parts)
        if not experts or {name for _, _, name in parts} != {"gate_up_proj", "down_proj"}:
            do = "name mlp.experts.gate_up_proj and mlp.experts.down_proj, or neither"
            raise self.refuse("lora_target_parameters", f"{given!r}", do)
        if not isinstance(found, list):
            if self.get("@linear") or self.get("@targets") is not None:
                do = "name the linears: lora_target_modules: [q_proj, v_proj]"
                raise self.refuse("lora_target_parameters", "all linears beside it", do)
            return "experts"
        beside = {"gate_proj", "up_proj", "down_proj"}
        if beside & {*found} and not beside <= {*found}:
            raise self.refuse("lora_target_modules", f"{found}", f"name all of {', '.join(sorted(beside))}, or none")
        dense = ["dense"] if beside & {*found} else []
        return [*(name for name in found if name not in beside), *dense, "experts"]

    def _sharding(self) -> None:
        found: Sharding | None = None
        for place in ("@accelerate", "@launcher", "@sharding", "@fsdp_config"):  # a later one overrides
            one = self._cut(place)
            if one is None:
                continue
            if place == "@fsdp_config" and found is not None:  # the strategy is in one of the two
                one = replace(found, stage=min(found.stage, one.stage), recompute=one.recompute)
            elif place == "@fsdp_config" and self.tool != "axolotl":
                self.notes.append("fsdp_config: no effect without `fsdp`")
                continue
            found = one
        if found is not None and found.recompute and "offload-activations" not in self.with_:
            self.with_["recompute"] = {}
        if found is not None and self.ranks == 1:
            self.notes.append("sharding: give --ranks N, and the rows of a step and `with: {fsdp: ...}` follow")
        elif found is not None and found.stage >= 2:
            self.with_["fsdp"] = {"stage": found.stage}
        elif self.ranks > 1:
            self.with_["ddp"] = {}

    def _cut(self, place: str) -> Sharding | None:
        """Return what one key has of the model's sharding, and note what is not read of it."""
        given, key = self.get(place), self.get("@by", {}).get(place, "")
        found = read_sharding(given, self.place.file)
        if found is None:
            return None
        if found.in_host is not None:
            do = "leave it out: `with: {paged-states: {}}` keeps the optimizer's states there"
            name = f"{key}.{found.in_host}" if found.in_host else key
            raise self.refuse(name, "it keeps weights or states in host memory", do)
        if found.source == "missing file":
            self.notes.append(f"{key}: {given} is not here: stage {found.stage} is taken from its name")
        elif found.source == "settings":
            self.notes.append(f"{key}: how the model is cut is read of it, its other settings are not")
        return found


def _completes(path: Any) -> bool:
    """Return whether the rows of a file here are prompts with completions, of which TRL learns the completions."""
    row = _first_row(path)
    return "prompt" in row and "completion" in row


def _first_row(path: Any) -> Mapping[str, Any]:
    """Return the first row of a file that is here; else an empty one."""
    if not isinstance(path, str) or not Path(path).is_file():
        return {}
    from optrush.data.readers import read_rows

    try:
        return dict(next(read_rows(Path(path)))[1])
    except (UserError, StopIteration):
        return {}  # training says what is wrong with it
