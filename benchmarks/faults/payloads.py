"""A corpus of hostile inputs: what each writes, and which command meets it. All of them together: benchmarks/faults.

Each ends as exit code 2 in three lines, or is accepted; none may run code (a canary file), end with a traceback, or take
longer than its time.
"""

# ruff: noqa: E501 - tables

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from optrush.models.config_json import _TYPE_OF
from optrush.trainer.checkpoint import encode_manifest, find_checkpoints, manifest_digest

from hostile import CANARY, Box, Ended, called

DEEP = "[" * 100_000
MARK = "<script>alert(1)</script>"


class Payload(NamedTuple):
    """One input: `attempt` writes it into a fresh box and calls a command. refused: it must not be accepted."""

    kind: str
    name: str
    attempt: Callable[[Box], Ended]
    refused: bool = False


def verdict(payload: Payload, box: Box) -> str:
    """Meet a payload; return what is wrong, empty if nothing is."""
    for name in ("out", "edited"):
        place = box.folder / name
        shutil.rmtree(place, ignore_errors=True) if not place.is_symlink() else place.unlink()
    os.chdir(box.folder)
    ended = payload.attempt(box)
    canaries = [
        str(p) for p in (*box.folder.rglob(f"*{CANARY}*"), Path("/tmp") / CANARY) if p.name == CANARY and p.exists()
    ]
    if canaries:
        Path(canaries[0]).unlink()
        return f"the canary is there: {canaries[0]}"
    if ended.failure:
        return ended.failure
    if payload.refused and not ended.refused:
        return f"exit code {ended.code}, not refused in three lines: {ended.err[-500:]}"
    if ended.code != 0 and not ended.refused:
        return f"exit code {ended.code}: {ended.err[-500:]}"
    pages = [box.folder / "out" / "report.html"]
    if any(MARK in page.read_text() for page in pages if page.is_file()):
        return "a script of the input is in the page"
    return ""


def touch(box: Box) -> str:
    """A shell command that makes the canary."""
    return f"touch {box.folder / CANARY}"


# --- configurations

TAGS = (
    "!!python/object/apply:os.system", "!!python/object/apply:subprocess.check_output", "!!python/object/new:os.system",
    "!!python/name:os.system", "!!python/module:os", "!!python/object:collections.Counter", "!!python/tuple",
    "!!python/bytes", "!!python/complex", "!!binary", "!!set", "!!omap", "!!pairs", "!include", "!env", "!ruby/object:Gem",
    "!!js/function", "!<tag:yaml.org,2002:python/object/apply:os.system>",
)  # fmt: skip
PLACES = (
    "model: {tag} ['{command}']", "data: {{path: {tag} '{command}'}}", "? {tag} '{command}'\n: 1",
    "with: {{packing: {tag} {{a: '{command}'}}}}",
)  # fmt: skip
YAMLS = {
    "bomb of aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]",
    "alias of itself": "model: &x {path: *x}", "undefined alias": "model: *x", "anchor alone": "seed: &x 1",
    "merge": "<<: {seed: 1}", "merge of an alias": "a: &a {seed: 1}\n<<: *a", "value key": "=: 1",
    "deep list": "model: " + "[" * 5000, "deep mapping": "model: " + "{a: " * 5000, "deep block": "- " * 5000,
    "list as a key": "? [a]\n: 1", "mapping as a key": "? {a: 1}\n: 1", "null as a key": "~: 1", "number as a key": "1: 1",
    "10 MB": "a: 1\n" * 2_000_000, "a line of 1 MB": "model: " + "x" * 1_000_000, "100,000 keys": "\n".join(f"k{i}:" for i in range(9000)),
    "a NUL": "model: \0", "an escaped NUL": 'output: "\\0"', "half a character": 'output: "\\ud800"', "a bell": 'output: "\\a"',
    "a right-to-left override": 'seed: "\u202e1"', "a byte order mark inside": "seed: \ufeff1", "only a mark": "\ufeff",
    "5,000 digits": "seed: " + "9" * 5000, "4,000 digits": "seed: " + "9" * 4000, "infinite": "seed: .inf", "no number": "seed: .nan",
    "base 60": "seed: 1:30", "hexadecimal": "seed: 0x" + "f" * 1000, "huge exponent": "optim: {lr: 1e999999}", "negative": "seed: -1",
    "a date": "seed: 2001-02-30", "a boolean": "seed: yes", "another version": "%YAML 9.0\n---\nseed: 1", "two documents": "a: 1\n---\nb: 1",
    "a directive": "%TAG ! tag:evil,2000:\n---\nseed: !x 1", "a comment alone": "# x", "tabs": "model:\t- x\n\t- y", "only ---": "---",
    "an endless key": "? " * 5000, "an endless quote": 'model: "' + "x" * 50_000, "5,000 quotes": "'" * 5001,
}  # fmt: skip


def _yaml(text: str) -> Callable[[Box], Ended]:
    return lambda box: called("train", box.write(text.replace("{here}", str(box.folder))))


def _tagged(form: str, tag: str) -> Callable[[Box], Ended]:
    return lambda box: called("train", box.write(form.format(tag=tag, command=touch(box))))


def configurations() -> Iterator[Payload]:
    for tag, form in itertools.product(TAGS, PLACES):
        yield Payload("yaml", f"{tag} in {form}", _tagged(form, tag), refused=True)
    for name, text in YAMLS.items():
        yield Payload("yaml", name, _yaml(text), refused=True)
    for flag in (
        "seed=" + "[" * 3000, "model=!!python/name:os.system x", "with.packing=&a [*a]", "output=\ud800",
        "seed=" + "9" * 5000,
    ):  # fmt: skip
        yield Payload(
            "yaml", f"--set {flag[:40]}", lambda box, flag=flag: called("train", box.write(), "--set", flag), True
        )


# --- config.json

WRONG: tuple[Any, ...] = ("x", [], {}, -7, 10**400, float("nan"), True, ["x", 1], 2**62)


def _config(changes: dict[str, Any], verb: str = "train") -> Callable[[Box], Ended]:
    return lambda box: called(verb, box.write(model=str(box.edited(**changes))))


def _config_text(text: str) -> Callable[[Box], Ended]:
    return lambda box: called("train", box.write(model=str(box.edited(text))))


JSONS = {
    "deep": DEEP, "deep mapping": '{"a": ' * 50_000, "empty": "", "a list": "[]", "a number": "1", "null": "null", "a NUL": "\0",
    "half": '{"model_type": "lla', "5,000 digits": '{"a": ' + "9" * 5000 + "}", "twice": '{"a": 1, "a": 2}', "17 MB": " " * (17 << 20),
    "half a character": '{"model_type": "\\ud800"}', "a mark": '\ufeff{"model_type": "llama"}',
}  # fmt: skip


def model_configs() -> Iterator[Payload]:
    for n, key in enumerate(sorted(_TYPE_OF)):
        for k in range(3):
            value = WRONG[(3 * n + 2 * k) % len(WRONG)]
            verb = ("train", "plan")[k % 2]
            yield Payload("config.json", f"{key}: {str(value)[:20]}", _config({key: value}, verb))
    for name, text in JSONS.items():
        yield Payload("config.json", name, _config_text(text), refused=True)
    sizes = {"num_hidden_layers": 10**6, "hidden_size": 2**30, "vocab_size": 2**30, "intermediate_size": 2**30}
    for (key, value), how in itertools.product(sizes.items(), ("native", "transformers")):

        def attempt(box: Box, key: str = key, value: int = value, how: str = how) -> Ended:
            model = {"path": str(box.edited(**{key: value})), "implementation": how}
            return called("train", box.write(model=model))

        yield Payload("config.json", f"{key}: {value} in {how}", attempt, refused=True)


# --- files of weights


def _replaced(name: str, content: bytes | str, gone: tuple[str, ...] = (), **changes: Any) -> Callable[[Box], Ended]:
    """A model folder in which one file is another one."""

    def attempt(box: Box) -> Ended:
        folder = box.edited(**changes)
        for other in (name, *gone):
            (folder / other).unlink(missing_ok=True)
        raw = (
            content
            if isinstance(content, bytes)
            else content.replace("{touch}", touch(box)).encode("utf-8", "surrogatepass")
        )
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(raw)
        return called("train", box.write(model=str(folder), objective="sft", data={"path": "chat.jsonl"}))

    return attempt


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Box], Ended]:
    """The model's own safetensors file with another header."""

    def attempt(box: Box) -> Ended:
        raw = (box.model / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        head = change(json.loads(raw[8 : 8 + size]))
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        return _replaced("model.safetensors", len(text).to_bytes(8, "little") + text + raw[8 + size :])(box)

    return attempt


def _first(changes: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    def change(head: dict[str, Any]) -> dict[str, Any]:
        name = min(key for key in head if key != "__metadata__")
        return {**head, name: {**head[name], **changes}}

    return change


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda head: b"{", "deep": lambda head: DEEP.encode(), "a list": lambda head: [], "empty": lambda head: {},
    "no UTF-8": lambda head: b'{"\xff": 1}', "metadata of numbers": lambda head: {**head, "__metadata__": {"a": 1}},
    "metadata as a list": lambda head: {**head, "__metadata__": []}, "a tensor as a number": lambda head: {**head, "x": 1},
    "a path as a name": lambda head: {**head, "../../x": head[min(head)]}, "twice": lambda head: b'{"a": {}, "a": {}}',
    "one more": lambda head: {**head, "x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
    "one less": lambda head: dict(list(head.items())[1:]), "10 MB of blanks": lambda head: json.dumps(head).encode() + b" " * (10 << 20),
    **{f"{key} {value}": _first({key: value}) for key, value in [
        ("dtype", "F33"), ("dtype", 1), ("dtype", None), ("dtype", "I8"), ("shape", [-1]), ("shape", [2**63]), ("shape", [2**40, 2**40]),
        ("shape", "x"), ("shape", [1.5]), ("shape", None), ("shape", []), ("shape", [[1]]), ("data_offsets", [0, 2**62]),
        ("data_offsets", [8, 0]), ("data_offsets", [-1, 5]), ("data_offsets", [0]), ("data_offsets", "x"), ("data_offsets", [0, 4, 8]),
        ("data_offsets", [2**64, 2**65]), ("data_offsets", [0, 0]),
    ]},
}  # fmt: skip
RAW = {
    "nothing": b"", "seven bytes": b"1234567", "a length of 2**63": b"\xff" * 8 + b"{}", "a length of 0": bytes(8),
    "a length of 1": b"\x01" + bytes(7) + b"{", "a length of 1 GiB": (1 << 30).to_bytes(8, "little") + b"{}", "zeros": bytes(1 << 20),
    "a zip file": b"PK\x03\x04" + bytes(100), "HTML": b"<!doctype html>" + bytes(100), "a pointer of LFS": b"version https://git-lfs",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
TARGETS: tuple[Any, ...] = (
    "../../../../etc/passwd", "/etc/passwd", "..", ".", "", "a/../model.safetensors", "./model.safetensors", "..\\x.safetensors",
    "../model/model.safetensors", "x\0.safetensors", "file:///etc/passwd", "http://x/model.safetensors", "~/x.safetensors", None, 1, [], {},
    "$(touch x).safetensors", "a" * 5000, "model.safetensors\n", "pytorch_model.bin",
)  # fmt: skip


def weights() -> Iterator[Payload]:
    for name, change in HEADERS.items():
        yield Payload("weights", f"header: {name}", _header(change))
    for name, raw in RAW.items():
        yield Payload("weights", name, _replaced("model.safetensors", raw), refused=True)
    for target in TARGETS:
        text = json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": target}})
        yield Payload(
            "weights", f"index to {target!r:.40}", _replaced(INDEX, text, ("model.safetensors",)), refused=True
        )
    for text in (DEEP, "[]", "{}", '{"weight_map": []}', '{"weight_map": "x"}', '{"weight_map": null}', "\0", ""):
        yield Payload("weights", f"index {text[:20]!r}", _replaced(INDEX, text, ("model.safetensors",)), refused=True)


class _Touch:
    """Makes the canary when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def pickled(zipped: bool = False) -> bytes:
    raw = pickle.dumps({"weight": _Touch(f"/tmp/{CANARY}")}, protocol=2)
    if not zipped:
        return raw
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:  # as torch.save writes it
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/version", "3")
    return whole.getvalue()


def pickles() -> Iterator[Payload]:
    gone = ("model.safetensors",)
    for name, zipped in itertools.product(
        ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "consolidated.00.pth"), (False, True)
    ):
        yield Payload("pickle", f"{name}, zipped {zipped}", _replaced(name, pickled(zipped), gone), refused=True)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json", INDEX):
        yield Payload("pickle", f"as {name}", _replaced(name, pickled(), gone if name == INDEX else ()), refused=True)
    for name in (
        "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin", "tokenizer.pkl",
        "vocab.pkl",
    ):  # fmt: skip
        yield Payload("pickle", f"{name} in the folder", _replaced(name, pickled(True)))
    for name in ("adapter_model.bin", "adapter_model.safetensors"):

        def attempt(box: Box, name: str = name) -> Ended:
            folder = box.folder / "adapter"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / name).write_bytes(pickled(True))
            (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
            return called("train", box.write(**{"with": {"lora": {"init": str(folder)}}}))

        yield Payload("pickle", f"an adapter's {name}", attempt, refused=True)


# --- code in a model's folder

CODE = f"import os\nos.system('touch /tmp/{CANARY}')\nclass X: pass\n"


def code() -> Iterator[Payload]:
    maps = {"AutoConfig": "evil.X", "AutoModelForCausalLM": "evil.X", "AutoTokenizer": ["evil.X", "evil.X"]}
    for changes in (
        {"auto_map": maps}, {"auto_map": maps, "model_type": "evil"}, {"auto_map": {"AutoConfig": "somebody/repo--evil.X"}, "model_type": "x"},
        {"auto_map": 1}, {"auto_map": {"AutoConfig": 1}}, {"trust_remote_code": True, "auto_map": maps},
        {"_attn_implementation": "somebody/kernel", "attn_implementation": "evil"}, {"custom_generate": "evil"},
        {"quantization_config": {"quant_method": "evil", "modules": "evil.X"}}, {"architectures": ["evil.XForCausalLM"]},
    ):  # fmt: skip
        yield Payload("code", json.dumps(changes)[:60], _replaced("evil.py", CODE, (), **changes))
    for name in (
        "modeling_llama.py", "configuration_llama.py", "tokenization.py", "custom_generate/generate.py", "__init__.py",
        "sitecustomize.py",
    ):  # fmt: skip
        yield Payload("code", name, _replaced(name, CODE))
    for tokenizer in (
        {"tokenizer_class": "X", "auto_map": maps}, {"tokenizer_class": "evil.X"}, {"auto_map": maps},
        {"tokenizer_class": 1},
    ):  # fmt: skip
        yield Payload(
            "code", f"tokenizer_config.json {tokenizer}"[:60], _replaced("tokenizer_config.json", json.dumps(tokenizer))
        )
    for key in ("trust_remote_code", "model.trust_remote_code", "remote_code"):
        yield Payload(
            "code", f"--set {key}", lambda box, key=key: called("train", box.write(), "--set", f"{key}=true"), True
        )


# --- chat templates

ESCAPES = (
    "''.__class__.__mro__[1].__subclasses__()", "cycler.__init__.__globals__.os.popen('{touch}').read()",
    "lipsum.__globals__['os'].popen('{touch}').read()", "self.__init__.__globals__.__builtins__.__import__('os').system('{touch}')",
    "joiner.__init__.__globals__.os.system('{touch}')", "namespace.__init__.__globals__.os.system('{touch}')",
    "(messages|attr('__class__'))", "messages|map(attribute='__class__')|list", "'{0.__class__.__mro__}'.format(messages)",
    "'{a.__class__}'.format_map({'a': messages})", "messages.append.__self__.__class__", "raise_exception.__globals__",
    "raise_exception('x' * 100000)", "strftime_now.__globals__", "strftime_now('%' * 1000)", "strftime_now(1)", "self._TemplateReference__context",
    "messages.__setitem__(0, 1)", "messages.clear()", "messages.append(messages)", "messages[0].update({'role': 'x'})", "messages[0].pop('role')",
    "messages|groupby('__class__')", "messages|sort(attribute='__class__')", "dict(a=1).__class__", "range(3).__class__", "1 / 0", "1 % 0", "[][5]",
    "{}['a']", "none.x.y", "undefined_thing.x", "messages|nothing", "messages is nothing", "nothing()", "messages()", "'a'()", "'a' + 1", "-'a'",
    "'%s' % (1, 2)", "'%(a)s' % 1", "'{}'.format()", "'{:%%%}'.format(1)", "'\\ud800'", "'\\0'", "messages|tojson(indent='x')", "'a'|int(base=99)",
    "'x'|round", "messages|sum", "messages|max(attribute=1)", "messages|first|first|first", "caller()", "super()", "varargs", "loop.index",
    "(1,)|batch(0)|list", "messages|slice(0)|list", "'a'|truncate(-5)", "'a'|wordwrap(0)", "messages|random", "messages|xmlattr", "{1: 2}|xmlattr",
)  # fmt: skip
STATEMENTS = (
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}", "{% from 'x' import y %}", "{% for x in 5 %}{% endfor %}",
    "{% set messages = 5 %}{{ messages.x }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% call x() %}{% endcall %}", "{% do 1 %}",
    "{% if %}", "{{", "{%", "{#", "{% endfor %}", "{% for m in messages %}{% break %}{% endfor %}", "{% block a %}{{ self.a() }}{% endblock %}",
    "{% generation %}{{ messages }}{% endgeneration %}", "{% filter upper %}", "{% autoescape x %}{% endautoescape %}", "{% raw %}", "", " ", "\0",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "{% if 1 %}" * 200 + "{% endif %}" * 200, "{{ " + "not " * 2000 + "1 }}", "{{ 1" + " + 1" * 3000 + " }}",
)  # fmt: skip


def templates() -> Iterator[Payload]:
    for text in (*(f"{{{{ {escape} }}}}" for escape in ESCAPES), *STATEMENTS):

        def attempt(box: Box, text: str = text) -> Ended:
            (box.folder / "t.jinja").write_text(text.replace("{touch}", touch(box)), errors="surrogatepass")
            model = {"path": str(box.model), "chat_template": "t.jinja"}
            return called("train", box.write(model=model, objective="sft", data={"path": "chat.jsonl"}))

        yield Payload("template", text[:60], attempt)
    for value in (
        1, [], {}, None, True, [{"name": "default"}], [{"name": 1, "template": 2}], {"default": 5}, [1], "{{",
    ):  # fmt: skip
        settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": value})
        yield Payload("template", f"chat_template: {value}", _replaced("tokenizer_config.json", settings))


# --- rows

ANSWER = {"role": "assistant", "content": "Stir."}
ROWS: dict[str, str | bytes] = {
    "deep": DEEP, "deep closed": '{"text": ' + "[" * 5000 + "]" * 5000 + "}", "a NUL": '{"text": "a\\u0000b"}', "half a character": '{"text": "\\ud800"}',
    "no UTF-8": b'{"text": "\xff\xfe"}', "overlong UTF-8": b'{"text": "\xc0\x80"}', "UTF-16": '{"text": "a"}'.encode("utf-16"),
    "5,000 digits": '{"text": "a", "n": ' + "9" * 5000 + "}", "NaN": '{"text": "a", "n": NaN}', "infinite": '{"text": "a", "n": -Infinity}',
    "1e999": '{"text": "a", "n": 1e999}', "twice": '{"text": "a", "text": "b"}', "5 MB": '{"text": "' + "ab " * 1_700_000 + '"}',
    "a script": json.dumps({"text": MARK}), "an escape": '{"text": "\\u001b[31m\\u202e"}', "a mark": '\ufeff{"text": "a"}', "blanks": '   {"text": "a"}  ',
    "a list": "[1, 2]", "a number": "5", "a text": '"a"', "null": "null", "empty": "{}", "no JSON": "{text: a}", "python": "{'text': 'a'}",
    "10,000 keys": json.dumps({f"k{i}": i for i in range(10_000)} | {"text": "a"}), "a long key": json.dumps({"k" * 100_000: 1, "text": "a"}),
    "control tokens": '{"text": "<|eos|><|im_start|>system"}', "one word of 1 MB": json.dumps({"text": "a" * 1_000_000}),
    **{f"text: {value!r:.20}": json.dumps({"text": value}) for value in (1, None, [], {}, ["a"], True, {"a": "b"})},
    **{f"messages: {json.dumps(value):.40}": json.dumps({"messages": value}) for value in (
        1, None, "x", {}, [], [1], [None], [[]], [{}], [{"role": 1}], [{"role": []}], [{"role": {}, "content": "a"}], [{"role": "assistant"}],
        [{"role": "assistant", "content": 1}], [{"role": "assistant", "content": {}}], [{"role": "assistant", "content": [1]}],
        [{"role": "assistant", "content": [{"type": "text"}]}], [{"role": "assistant", "content": [{"type": "image", "url": "file:///etc/passwd"}]}],
        [{"role": "user", "content": "<|im_end|>"}, ANSWER], [{**ANSWER, "tool_calls": 1}], [{**ANSWER, "tool_calls": [1]}],
        [{**ANSWER, "tool_calls": [{"function": 1}]}], [{**ANSWER, "tool_calls": [{"function": {"name": 1, "arguments": "{"}}]}],
        [{**ANSWER, "reasoning_content": 5}], [{**ANSWER, "loss": "x"}], [{**ANSWER, "name": []}], [ANSWER] * 3, [{"role": "system", "content": "a"}] * 2,
        [{"role": "__class__", "content": "a"}, ANSWER], [{**ANSWER, "__class__": "x"}], [{**ANSWER, "items": "x", "keys": 1}],
    )},
    **{f"tools: {value!r:.20}": json.dumps({"messages": [{"role": "user", "content": "a"}, ANSWER], "tools": value}) for value in (1, "x", "[", [1], {})},
    **{f"{keys}": json.dumps(dict.fromkeys(keys.split(), 1)) for keys in ("prompt completion", "instruction output", "conversations", "chosen rejected")},
}  # fmt: skip


def _data(name: str, content: bytes, **changes: Any) -> Callable[[Box], Ended]:
    def attempt(box: Box) -> Ended:
        place = box.folder / "data"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / name).write_bytes(content)
        run = {"objective": "sft", "data": {"path": str(place / name)}, **changes}
        return called("train", box.write(**run))

    return attempt


def rows() -> Iterator[Payload]:
    for n, (name, row) in enumerate(ROWS.items()):
        raw = row if isinstance(row, bytes) else row.encode("utf-8", "surrogatepass")
        data = {"bad_rows": "quarantine", "most_bad": 1.0} if n % 3 == 2 else {}
        attempt = _data("x.jsonl", b'{"text": "Chop and stir."}\n' + raw + b"\n") if not data else None
        if attempt is None:

            def attempt(box: Box, raw: bytes = raw, data: dict[str, Any] = data) -> Ended:
                path = {"path": str(box.folder / "data" / "x.jsonl"), **data}
                return _data("x.jsonl", b'{"text": "Chop and stir."}\n' * 3 + raw + b"\n", data=path)(box)

        yield Payload("rows", name, attempt)
    bomb = gzip.compress(bytes(200 << 20), 9)
    files = {
        "x.jsonl.gz": bomb, "x.txt.gz": bomb, "y.jsonl.gz": b"\x1f\x8b" + bytes(50), "x.jsonl.xz": b"\xfd7zXZ" + bytes(50), "x.jsonl.zst": bytes(50),
        "x.jsonl.bz2": b"BZh9" + bytes(50), "x.parquet": b"PAR1" + bytes(50) + b"PAR1", "y.parquet": pickled(), "x.json": DEEP.encode(),
        "y.json": b'{"a": 1}', "z.json": b"[1, 2]", "x.csv": b'text\n"' + b"a" * 200_000, "y.csv": b"\0,\0\n1,2\n", "z.csv": b"text,text\na,b\n",
        "x.tsv": b"", "x.txt": b"\xff\xfe", "x.arrow": bytes(50), "x.pkl": pickled(), "x.tar": bytes(1024), "x": b"{}", ".jsonl": b'{"text": "a"}\n',
    }  # fmt: skip
    for name, raw in files.items():
        yield Payload("rows", name, _data(name, raw))
    for name in (
        "a;touch x.jsonl", "$(touch x).jsonl", "`touch x`.jsonl", "-rf.jsonl", "a\nb.jsonl", "%s%n.jsonl", "<b>.jsonl",
        "*.jsonl", "\udcff.jsonl", "[a].jsonl",
    ):  # fmt: skip
        yield Payload("rows", f"a file {name!r}", _data(name, b'{"text": "Chop and stir."}\n' * 3))


# --- names of outputs, links in them


def names() -> Iterator[Payload]:
    for name in (
        "$x^$", MARK.replace("/", "|"), "$(touch x)", "; touch x", "`touch x`", "| touch x", "a\nb", "a\tb", "-rf", "--help", "%s%n%x", "{0.__class__}",
        "[red]x[/red]", "ü" * 80, "\u202eexe", "\U0001f35c", "a" * 255, "a" * 256, "~nobody/x", "${HOME}", "'", '"', "\\", "*", "?", "[a]", "!x", "&x", "#x", "a b",
        "out/../out", "./out/.", "NUL", "..", ".", "/", "/dev/null/x", "/proc/self/x", "run.yaml",
    ):  # fmt: skip

        def attempt(box: Box, name: str = name) -> Ended:
            place = box.folder / "named"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            os.chdir(place)
            ended = called("train", box.write(output=name))
            pages = [p for p in (*place.rglob("report.html"), *place.rglob("run.yaml")) if p.is_file()]
            if any(MARK.replace("/", "|") in page.read_text() for page in pages if page.suffix == ".html"):
                return ended._replace(failure="a script of the name is in the page")
            if any(
                yaml.safe_load(page.read_text())["output"] != str(page.parent.resolve())
                for page in pages
                if page.suffix == ".yaml"
            ):
                return ended._replace(failure="run.yaml names another folder")
            return ended

        yield Payload("names", f"output {name!r:.40}", attempt)
    for link, target in itertools.product((
        "report.html.tmp", "loss.png", "metrics.jsonl", "run.yaml", ".lock", "data.json.tmp", "checkpoints",
        "tensorboard", "quarantine.jsonl", "model.tmp",
    ), ("victim", "missing")):  # fmt: skip

        def planted(box: Box, link: str = link, target: str = target) -> Ended:
            victim = box.folder / target
            victim.unlink(missing_ok=True)
            if target == "victim":
                victim.write_text("mine")
            (box.folder / "out").mkdir()
            (box.folder / "out" / link).symlink_to(victim)
            ended = called("train", box.write())
            touched = victim.exists() and (target == "missing" or victim.read_text() != "mine")
            return ended._replace(failure="written through the link") if touched else ended

        yield Payload("links", f"{link} to {target}", planted, refused=True)


# --- what a run left, changed by somebody: manifests with a digest that is right, other files


def _resumed(change: Callable[[Path], None], *verb: str) -> Callable[[Box], Ended]:
    def attempt(box: Box) -> Ended:
        changes = {"train": {"steps": 2, "save_every": 1, "export": False}}
        kept = box.folder / "kept"
        if not kept.exists():
            begun = called("train", box.write(**changes))
            if begun.code != 0:
                return begun._replace(failure=f"the run to be changed failed: {begun.err}")
            (box.folder / "out").rename(kept)
        shutil.copytree(kept, box.folder / "out")
        change(box.folder / "out")
        return called(*(verb or ("train", box.write(**changes), "--resume", "auto")))

    return attempt


def _manifest(**changes: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        for path in find_checkpoints(out):
            body = {**json.loads((path / "manifest.json").read_text()), **changes}
            if "name" in changes:
                first = min(body["files"])
                body["files"] = {changes["name"]: body["files"][first]}
                del body["name"]
            body["digest"] = manifest_digest(body)
            (path / "manifest.json").write_bytes(encode_manifest(body))

    return change


def _file(name: str, content: bytes) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        for path in out.glob(name) if "*" in name else [out / name]:
            path.write_bytes(content)

    return change


def leftovers() -> Iterator[Payload]:
    for name in (
        "../../../etc/passwd", "/etc/passwd", "rank-0.safetensors/../x", "rank-0.bin", "", "..", "rank-0.safetensors\n",
        "rank-" + "9" * 5000 + ".safetensors",
    ):  # fmt: skip
        yield Payload("manifest", f"names {name!r:.40}", _resumed(_manifest(name=name)), refused=True)
    for key, value in [
        ("step", -1), ("step", "x"), ("step", 10**400), ("tensors", {}), ("tensors", []), ("files", {}), ("files", []), ("config", {}), ("config", {"data": 1}),
        ("config", {"data": {}}), ("fingerprints", {}), ("fingerprints", {"data": "x" * 10**6}), ("fingerprints", {"date": "x"}), ("state", {"x": {}}), ("position", -1), ("position", 10**30),
        ("ranks", 0), ("skipped", -5), ("versions", {}), ("run_id", "../../x"), ("run_id", MARK), ("format", 2), ("extra", 1), ("skipped_in_a_row", 10**9),
        ("tensors", {"param/x": {"dtype": "F32", "shape": [10**18], "pieces": [{"file": "rank-0.safetensors", "offset": [0], "shape": [10**18]}]}}),
        ("tensors", {"param/x": {"dtype": "F32", "shape": [-1], "pieces": []}}),
    ]:  # fmt: skip
        yield Payload("manifest", f"{key}: {str(value)[:40]}", _resumed(_manifest(**{key: value})))
    texts = {
        "deep": DEEP.encode(), "a list": b"[]", "a number": b"1", "nothing": b"", "no UTF-8": b"\xff\xfe",
        "wrong": b'{"step": "x", "name": 1, "rows": 5}',
    }  # fmt: skip
    for file, (name, text) in itertools.product((
        "data.json", "checkpoints/best.json", "tensorboard/tracker.json", "metrics.jsonl", "run.yaml",
        "checkpoints/*/manifest.json",
    ), texts.items()):  # fmt: skip
        yield Payload("leftovers", f"{file}: {name}", _resumed(_file(file, text)))
    for file, (name, text) in itertools.product(("metrics.jsonl", "run.yaml"), texts.items()):
        yield Payload("leftovers", f"report of {file}: {name}", _resumed(_file(file, text), "report", "out"))
    for file, (name, text) in itertools.product((
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
        "added_tokens.json", "chat_template.jinja",
    ), texts.items()):  # fmt: skip
        yield Payload("leftovers", f"the model's {file}: {name}", _replaced(file, text))


def corpus() -> list[Payload]:
    """All of them, in a fixed order."""
    parts = (configurations, model_configs, weights, pickles, code, templates, rows, names, leftovers)
    return [payload for part in parts for payload in part()]
