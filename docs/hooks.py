"""The hooks of mkdocs.yml: lays out the pages as they lie in the repository, and writes the reference pages.

mkdocs reads one folder; README.md, the records and the examples, which pages link to, are outside of docs/. So a folder
of symbolic links becomes the folder that it reads. `docs/reference/` is not committed: its pages are made here from the
command line's own help and from the schema of the configuration, and are never out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROOTS = ("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE",
         "docs", "benchmarks", "examples", "constraints.txt")  # fmt: skip
TEXTS = (
    "*.md",
    "*.css",
    "*.png",
    "*.svg",
    "*.jsonl",
    "*.json",
    "*.yaml",
    "*.ipynb",
    "*.py",
    "LICENSE",
    "constraints.txt",
)


def lay_out(folder: Path) -> Path:
    """Make a folder with a link to each file and folder that pages are in or link to."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ROOTS:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    return folder


def pages() -> list[str]:
    """Return the pages that a reader may come to, committed or made here."""
    committed = [p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "reference"]
    outside = [*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *ROOT.glob("examples/**/README.md")]
    return sorted(str(p.relative_to(ROOT)) for p in committed + outside) + list(MADE)


def expand(nav: Any, known: list[str]) -> Any:
    """Return the navigation with each pattern replaced by the pages that match it and that it does not name."""
    named = set(leaves(nav))
    if isinstance(nav, dict):
        return {title: expand(inner, known) for title, inner in nav.items()}
    if isinstance(nav, list):
        found = []
        for entry in nav:
            if isinstance(entry, str) and "*" in entry:
                found += [p for p in known if fnmatch(p, entry) and p not in named]
            else:
                found.append(expand(entry, known))
        return found
    return nav


def leaves(nav: Any) -> Iterator[str]:
    """Yield the paths that a navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(entry)


def verbs() -> str:
    """Write the page of the verbs: what `optrush VERB --help` prints."""
    import typer

    from optrush.cli.app import app

    text = ["# Verbs", "", "What `--help` prints, verb by verb. What each is for: [the README](../../README.md).", ""]
    for name, command in _commands("optrush", typer.main.get_command(app)):
        with command.make_context(name, [], resilient_parsing=True, terminal_width=100, max_content_width=100) as at:
            text += [f"## {name}", "", "```text", command.get_help(at).rstrip(), "```", ""]
    return "\n".join(text)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, each in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {inner}", each)


def configuration() -> str:
    """Write the page of the keys of a run's YAML: types and defaults of the schema, meanings of docs/contract.md."""
    from optrush.config import Config

    schema = Config.model_json_schema(by_alias=True)
    contract = (ROOT / "docs/contract.md").read_text("utf-8").partition("## Configuration")[2].partition("\n## ")[0]
    meanings = dict[str, str]()
    for keys, meaning in re.findall(r"^\| (`.*?) \| .*? \| (.*) \|$", contract, re.MULTILINE):
        meanings |= dict.fromkeys(re.findall(r"`([\w.]+)`", keys), meaning)
    text = [
        "# Configuration", "",
        "Every key of a run's YAML, from its schema. `optrush schema` prints the schema for editors. The options of",
        "each technique, under `with`, are on [its page](../techniques/README.md).", "",
        "| key | meaning | type | default |", "|---|---|---|---|",
    ]  # fmt: skip
    for key, kind, default in _keys(schema, schema, ""):
        meaning = meanings.get(key, "").replace("](", "](../").replace("](../http", "](http")
        text.append(f"| `{key}` | {meaning} | {kind} | {default} |")
    return "\n".join([*text, ""])


def _keys(schema: dict[str, Any], part: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield (key, type, default) of each key of an object, and of the objects in it."""
    for name, field in part.get("properties", {}).items():
        inner = next((x for x in _options(schema, field) if x.get("properties")), None)
        default = "required" if name in part.get("required", ()) else ""
        if "default" in field and not isinstance(field["default"], dict):
            default = f"`{json.dumps(field['default'])}`"
        kinds = dict.fromkeys(_kind(schema, x) for x in _options(schema, field))
        yield prefix + name, " or ".join(kinds), default
        if inner is not None:
            yield from _keys(schema, inner, f"{prefix}{name}.")


def _options(schema: dict[str, Any], field: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in field:
        return [schema["$defs"][field["$ref"].rpartition("/")[2]]]
    return [x for each in field["anyOf"] for x in _options(schema, each)] if "anyOf" in field else [field]


def _kind(schema: dict[str, Any], option: dict[str, Any]) -> str:
    if "enum" in option or "const" in option:
        return " or ".join(f"`{x}`" for x in option.get("enum", [option.get("const")]))
    if option.get("type") == "array":
        return "list"
    names = {"object": "block", "integer": "whole number", "number": "number", "string": "text", "boolean": "boolean"}
    bounds = [f"{sign} {option[key]:g}" for key, sign in
              (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
              if key in option]  # fmt: skip
    return " ".join([names.get(option.get("type", ""), "none" if option.get("type") == "null" else "any"), *bounds])


MADE: dict[str, Callable[[], str]] = {
    "docs/reference/verbs.md": verbs,
    "docs/reference/configuration.md": configuration,
}


# --- what mkdocs calls


def on_config(config: Any) -> Any:
    """Read the laid-out folder, with the patterns of the navigation expanded."""
    config["docs_dir"] = str(lay_out(ROOT / "build" / "pages"))
    config["nav"] = expand(config["nav"], pages())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Leave out what no page is or links to, and add the pages that are made."""
    from mkdocs.structure.files import File

    known = pages()
    for file in [f for f in files if f.src_dir == config["docs_dir"]]:  # not those of the theme
        named = file.src_uri in known or not file.src_uri.endswith(".md")
        if not named or not any(fnmatch(Path(file.src_uri).name, text) for text in TEXTS):
            files.remove(file)
    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    return files
