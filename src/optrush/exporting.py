"""Write the trained model as a Hugging Face folder that transformers loads, and check that its logits are equal."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from optrush import model_card
from optrush.config import Config, scrubbed
from optrush.data import readers, schema
from optrush.data import sample as recipes
from optrush.data.batch import collate
from optrush.data.chat_template import AS_STORED, COMPARED_ROWS, Tokens
from optrush.data.schema import Document
from optrush.data.tokenizer import answer_ends, open_tokenizer
from optrush.errors import ConfigError, DataError, NeedsError, RunError, UserError, exhausted, write_remedy
from optrush.files import regular
from optrush.models import fp8_folder, gguf
from optrush.models.experts import StackedMatrices
from optrush.models.hf import load_plain
from optrush.models.source import GENERATION, read_generation
from optrush.models.text_part import text_config
from optrush.models.weights import Folder, export_weights
from optrush.peft import io
from optrush.peft.quantized import QuantizedLinear
from optrush.restore import RebuiltModel, open_run, rebuild
from optrush.tokenizer_files import ENGINE, copy_processor, copy_tokenizer
from optrush.trainer import run_dir
from optrush.trainer.distributed import agree, from_first, from_stages, gathered, is_gathered
from optrush.trainer.trainer import Trainer

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_model(trainer: Trainer, output: Path, steps: int, source: Path | None) -> Path:
    """Write `model/` in the run's folder atomically.

    Every rank calls it (sharded parameters are gathered one at a time), rank 0 writes.
    """
    summary = trainer.sources.summary if trainer.world.rank == 0 else ""
    _write_whole(trainer, output / "model", source, lambda f: _write_card(f, trainer, output, steps, source, summary))
    if io.adapters(trainer.model):
        write_adapter(trainer, output / "adapter", source)
    return output / "model"


def publish(trainer: Trainer, source: Path | None, folder: Path) -> bool:
    """Write the trained model to a folder for other programs, atomically; every rank calls it.

    Returns:
        True if it wrote plain LoRA adapters; False for the whole model with merged adapters.
    """
    kinds = [adapter.settings() for adapter in io.adapters(trainer.model).values()]
    plain = all(kind["peft_type"] == "LORA" and not kind.get("use_dora") for kind in kinds)
    if alone := bool(kinds) and plain and all(".adapter." in t.name for t in trainer.trained):
        write_adapter(trainer, folder, source)
    else:
        _write_whole(trainer, folder, source)
    return alone


def _write_whole(
    trainer: Trainer, folder: Path, source: Path | None, more: Callable[[Path], None] = lambda fresh: None
) -> None:
    tensors, error = published_tensors(trainer), None
    if trainer.world.rank == 0:

        def fill(fresh: Path) -> None:
            _fill_model(fresh, trainer, tensors, source)
            more(fresh)

        error = _write_folder(folder, fill)
    for _ in tensors:  # other ranks must still gather the tensors that rank 0 skipped
        pass
    agree(error)


def write_adapter(trainer: Trainer, folder: Path, source: Path | None = None) -> Path:
    """Write trained adapters in PEFT's format, atomically; every rank calls it.

    Args:
        source: the base model's folder, for its tokenizer.
    """
    values, error = trained_parameters(trainer), None
    if trainer.world.rank == 0:
        error = _write_folder(folder, lambda fresh: _fill_adapter(fresh, trainer, values, source))
    agree(error)
    return folder


def _write_folder(folder: Path, fill: Callable[[Path], None]) -> RunError | None:
    """Fill a temporary folder and rename it over an existing one; return the error, if any."""
    fresh, old = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old.tmp")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        fill(fresh)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError, UserError) as e:
        shutil.rmtree(fresh, ignore_errors=True)
        do = f"{write_remedy(e)}; {run_dir.resume_line(folder.parent)}"
        return RunError(f"{folder}", f"it could not be written: {e}", do)
    return None


def _fill_adapter(fresh: Path, trainer: Trainer, values: dict[str, Tensor], source: Path | None) -> None:
    """Write an adapter's files, its tokenizer, and the generation config."""
    path = trainer.config.model.path
    local = source is not None and path is not None and (path == "tiny" or Path(path).is_dir())
    base = str(source.resolve()) if local and source is not None else path or trainer.config.model.shape
    io.save_adapter(fresh, trainer.model, trainer.weight_map, values, str(base))
    _write_tokenizer(fresh, trainer, source)
    write_generation(trainer, fresh, source)


def _fill_model(
    fresh: Path, trainer: Trainer, tensors: Iterator[tuple[str, Tensor]], source: Path | None, shard_bytes: float = 5e9
) -> None:
    """Write weights, tokenizer and generation config; the caller writes the model card."""
    export_weights(fresh, tensors, trainer.weight_map, trainer.hf, shard_bytes, source)
    if source is not None:
        copy_processor(source, fresh)
    _write_tokenizer(fresh, trainer, source)
    write_generation(trainer, fresh, source)


def _write_card(fresh: Path, trainer: Trainer, run: Path, steps: int, source: Path | None, summary: str = "") -> None:
    ends = [] if trainer.tokenizer is None else trainer.tokenizer.convert_ids_to_tokens(ends_of(trainer, source)[1])
    text = model_card.card(trainer.config, run, steps, source, summary, ends)
    (fresh / model_card.NAME).write_text(text, encoding="utf-8")


def _write_tokenizer(fresh: Path, trainer: Trainer, source: Path | None) -> None:
    """Write the tokenizer's own files, with the run's tokens and template."""
    m, tokenizer = trainer.config.model, trainer.tokenizer
    folder = source if m.tokenizer is None else Path(m.tokenizer)
    if folder is not None:
        template = None if m.chat_template is None or tokenizer is None else tokenizer.chat_template
        copy_tokenizer(folder, fresh, tokenizer, m.add_tokens, template)


def trained_parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Return the trained parameters by canonical name, whole, on the host of rank 0; every rank calls it."""
    world = trainer.world

    def local() -> Iterator[tuple[str, Tensor]]:
        for t in trainer.trained:
            if t.name not in trainer.counted_elsewhere:
                values = t.whole
                yield t.name, values.cpu() if world.leads else values

    return {name: t for name, t in from_stages(world, local()) if world.rank == 0}


def ends_of(trainer: Trainer, source: Path | None) -> tuple[list[int], list[int]]:
    """Return the end-of-answer ids of (the base, the trained model); equal if training adds none."""
    has_file = source is not None and (source / GENERATION).is_file()  # else readers use config.json's
    settings = read_generation(source) if source is not None and has_file else {**text_config(trainer.hf), **trainer.hf}
    known = settings.get("eos_token_id")
    base = known if isinstance(known, list) else [] if known is None else [known]
    generates = trainer.tokenizer is not None and not trainer.config.scored
    return base, answer_ends(trainer.tokenizer, base) if generates else base


def write_generation(trainer: Trainer, fresh: Path, source: Path | None) -> None:
    """Write the published generation config with all end-of-answer tokens of the trained model."""
    published = None if source is None or not (source / GENERATION).is_file() else source / GENERATION
    base, ends = ends_of(trainer, source)
    if base == ends:
        if published is not None:
            shutil.copyfile(published, fresh / GENERATION)
        return
    saved = {} if published is None else read_generation(published.parent)
    config = {**text_config(trainer.hf), **trainer.hf}
    others = {} if published is not None else {key: config.get(key) for key in SPECIAL}
    kept = {key: value for key, value in {**others, **saved, "eos_token_id": ends}.items() if value is not None}
    (fresh / GENERATION).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def published_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Return the published model's parameters by canonical name, whole and on the host of rank 0; other ranks only
    gather. Adapters are merged in float32 and the sum is rounded; quantized weights are dense.
    """
    return from_stages(trainer.world, _published(trainer, _kept(trainer)))


def _published(trainer: Trainer, kept: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield this stage's parameters, whole and on the host of its first rank."""
    model, first = trainer.model, trainer.world.leads
    changed = {name: m for name, m in model.linears() if m.quantized is not None or m.adapter is not None}
    for name, linear in changed.items():
        with _gathered(model, name), trainer.storage.gathered(linear.parameters()):
            weight = gathered(linear.dequantized(torch.float32).detach())
            # A copy: without an adapter the gathered tensor is freed before it is written.
            bias: Tensor | None = None
            if linear.bias is not None:
                bias = gathered(linear.bias.detach()).to(torch.float32, copy=True)
            if linear.adapter is not None:
                weight, bias = linear.adapter.merge(weight, bias)
            to = torch.device("cpu") if first else weight.device
            yield f"{name}.weight", weight.detach().to(to, kept)
            if bias is not None:
                yield f"{name}.bias", bias.detach().to(to, kept)
    merged = set[str]()
    for owner, experts in model.named_modules():
        if not isinstance(experts, StackedMatrices) or (experts.adapter is None and experts.quantized is None):
            continue
        adapter = experts.adapter
        inside = ("adapter.", "quantized.")
        merged |= {f"{owner}.{inner}" for inner, _ in experts.named_parameters() if inner.startswith(inside)}
        with _gathered(model, owner), trainer.storage.gathered(experts.parameters()):
            for kind in experts.sizes if adapter is None or experts.quantized is not None else adapter.kinds:
                dense = gathered(experts.dense(kind, torch.float32).detach())
                to = torch.device("cpu") if first else dense.device
                merged.add(f"{owner}.{kind}")
                yield (
                    f"{owner}.{kind}",
                    (dense if adapter is None else adapter.merge(kind, dense, gathered)).to(to, kept),
                )
    for name, p in model.named_parameters():
        if name in merged or name in trainer.counted_elsewhere:
            continue
        if any(name.startswith(f"{owner}.") for owner in changed):
            continue
        with trainer.storage.gathered([p]):
            values = gathered(p.detach())
            yield name, values.cpu() if first else values


@contextmanager
def _gathered(model: nn.Module, name: str) -> Iterator[None]:
    """Hold the parameters of the module of that name whole within the context."""
    owners = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
    cut = next((m for o in owners if is_gathered(m := model.get_submodule(o))), None)
    if cut is not None:
        cut.unshard()
    yield
    if cut is not None:
        cut.reshard()


# --- Verification of a written folder: its bytes, then the logits of our forward pass against transformers' on the
# folder.
#
# Bytes: each tensor is read back and compared with the intended one. Logits: both sides in float32 arithmetic, on the
# same tokens, so that differences come from the layout (a bug) or from rounding the weights when adapters were merged
# or `--dtype` converted them. The two models are never in memory together: only the logits are kept.


ROWS, LENGTH = 4, 128  # compared documents, and tokens of each at most
RANDOM_SEED = 0
# Largest allowed difference of a logit, as a share of the largest logit. EXACT, without rounding: float32's noise in
# the sums of a deep model. Rounded weights have relative errors up to 2^-12 (float16) and 2^-9 (bfloat16).
EXACT = 1e-4
ROUNDED = {torch.float32: EXACT, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Compared:
    """Differences of the reloaded model's logits from the trained model's."""

    tokens: int
    texts: str  # description of the tokens
    scale: float  # the largest logit
    worst: float  # the largest difference
    mean: float  # of all differences
    agreement: float  # fraction of tokens with the same predicted next token
    tolerance: float  # of worst / scale
    rounded: bool  # whether weights were rounded when written

    @property
    def sound(self) -> bool:
        return self.worst <= self.tolerance * self.scale  # False for NaN

    def __str__(self) -> str:
        how = "rounding included" if self.rounded else "nothing was rounded"
        return (
            f"logits after reloading, {self.texts}, {how}: largest difference {self.worst:.3g} of {self.scale:.3g} "
            f"({self.worst / self.scale:.1e}; at most {self.tolerance:.0e}), mean {self.mean:.3g}, "
            f"same next token for {self.agreement:.2%}"
        )


def tensor_digest(t: Tensor) -> str:
    """Hash a tensor's bytes, on the host."""
    return hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def demand_bytes(folder: Path, written: Mapping[str, str]) -> None:
    """Raise RunError unless the folder holds these tensors; `written`: digests by Hugging Face name."""
    held = Folder(folder)
    for name, sha in written.items():
        try:
            with safe_open(regular(folder / held.files[name]), "pt") as file:
                same = tensor_digest(file.get_tensor(name)) == sha
        except (KeyError, OSError, SafetensorError):
            same = False
        if not same:
            raise RunError(f"{folder} is not the trained model: {name} differs after reloading")


def comparison_texts(trainer: Trainer, paths: Sequence[str], sample: str | None) -> tuple[list[list[int]], str]:
    """Return token ids for the comparison and their name: the first documents of the data, else random tokens.

    Args:
        paths: files of `data.eval` or `data.path`.
        sample: `data.sample`.
    """
    documents: list[list[int]] = []
    if trainer.tokenizer is not None:
        documents = list(islice(_documents(Tokens(trainer.tokenizer), paths, sample, trainer.config), ROWS))
    if documents:
        return documents, f"the first {len(documents)} documents of the data"
    assert isinstance(trainer.model.embedding.weight, Tensor)
    ids = np.random.default_rng(RANDOM_SEED).integers(0, trainer.model.embedding.weight.shape[0], (ROWS, LENGTH // 2))
    return ids.tolist(), f"{ROWS} rows of random tokens"


def _documents(tokens: Tokens, paths: Sequence[str], sample: str | None, config: Config) -> Iterator[list[int]]:
    """Yield the documents of the files that are readable here."""
    if sample is not None:
        talks = recipes.conversations(ROWS, config.seed)
        rows = [(schema.RowLocation(Path(sample), i), {"messages": talk}) for i, talk in enumerate(talks, 1)]
        yield from _tokenised(tokens, iter(rows), schema.row_rules(config))
    for path in paths:
        try:
            if path.startswith(readers.HUB) or not Path(path).exists():
                continue
            for file in readers.find_files(path):
                yield from _tokenised(tokens, readers.read_rows_or_errors(file), schema.row_rules(config))
        except (DataError, OSError):
            continue


def _tokenised(
    tokens: Tokens, rows: Iterator[tuple[schema.RowLocation, Any]], rules: schema.RowRules
) -> Iterator[list[int]]:
    for where, row in islice(rows, 10 * ROWS):
        try:
            if not isinstance(row, DataError):
                for document in tokens.batch([(where, schema.parse_row(where, row, rules))], "all"):
                    if not isinstance(document, DataError):
                        yield document[0].ids[:LENGTH].tolist()
        except DataError:  # training rejects the row, too
            continue


@torch.no_grad()
def trained(trainer: Trainer, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return float32 logits (T, V) of the trained model for each text, on the host. Its weights become float32."""
    trainer.model.eval()
    stored = [m for m in trainer.model.modules() if isinstance(m, QuantizedLinear)]
    codes = {id(p) for s in stored for p in s.parameters()}  # codes are bytes in any dtype
    for p in trainer.model.parameters():
        if id(p) not in codes:
            p.data = p.data.float()
    all_logits = []
    for ids in texts:
        document = Document(np.array(ids, np.int32), np.arange(len(ids)) > 0)
        row = collate([[(0, document)]], len(ids), single=True, most=1).to(trainer.world.device)
        hidden = trainer.model(row.tokens, row.positions, row.documents)  # (1, T, D)
        logits = trainer.model.head.logits(hidden)[0]
        all_logits.append(logits[_last(trainer.model.head, ids)].cpu() if trainer.model.head.scores else logits.cpu())
    return all_logits


def _last(head: nn.Module, ids: Sequence[int]) -> slice:
    """Return the index of a text's last token before padding."""
    last = max(i for i, token in enumerate(ids) if token != head.pad)
    return slice(last, last + 1)


@torch.no_grad()
def reloaded(folder: Path, texts: Sequence[Sequence[int]], device: torch.device, scores: bool = False) -> list[Tensor]:
    """Return the folder's logits, computed by transformers only; for a reward model the last token's."""
    model = load_plain(folder, torch.float32, device, scores)
    given = (torch.tensor([list(ids)], device=device) for ids in texts)
    return [model(ids, use_cache=False).logits.float().cpu().flatten(0, -2) for ids in given]


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor], texts: str, dtype: torch.dtype, exact: bool) -> Compared:
    """Compare logits, (T, V) each. `exact`: the weights were written in their trained dtype."""
    a, b = torch.cat(list(ours)), torch.cat(list(theirs))
    off = (a - b).abs()
    return Compared(
        tokens=len(a), texts=texts, scale=a.abs().max().item(), worst=off.max().item(), mean=off.mean().item(),
        agreement=(a.argmax(-1) == b.argmax(-1)).float().mean().item(),
        tolerance=EXACT if exact else ROUNDED[dtype], rounded=not exact,
    )  # fmt: skip


def demand_sound(found: Compared, folder: Path) -> None:
    """Raise RunError if the folder's logits differ from the trained model's."""
    if not found.sound:
        raise RunError(f"{folder} is not the trained model: {found}; the folder is kept for inspection")


# --- `optrush export`: a run's checkpoint as a folder for other programs, verified against the trained model.
#
# Written under a temporary name, verified, then renamed. A folder that fails the check keeps the temporary name.


@dataclass(frozen=True)
class Delivered:
    out: Path
    step: int
    passed: tuple[tuple[str, str], ...]  # damaged checkpoints that were skipped
    dtype: str | None  # of the weights; None: adapter files
    size_bytes: int
    compared: Compared | None

    def facts(self) -> dict[str, Any]:
        """Return the result as a JSON document."""
        document = asdict(self) | {"out": str(self.out)}
        document["passed"] = [list(pair) for pair in self.passed]
        if self.compared is not None:
            document["compared"]["relative"] = self.compared.worst / self.compared.scale
        return document


def export_folder(run: Path, out: Path | None, adapter: bool) -> Path:
    """Return the target folder: `model/` or `adapter/` of the run, or `out`.

    Raises:
        ConfigError: no run, or the folder is not empty.
    """
    folder, _ = open_run(run)
    where = out or folder / ("adapter" if adapter else "model")
    if where.exists() and (not where.is_dir() or any(where.iterdir())):
        found = "it is not empty" if where.is_dir() else "a file, not a folder"
        raise ConfigError(f"to export to {where}", found, "name another folder: --out DIR")
    if not where.absolute().parent.is_dir():
        raise ConfigError(f"to export to {where}", f"{where.absolute().parent} is not a folder", "create it first")
    return where


def export_run(
    run: Path,
    out: Path | None = None,
    *,
    checkpoint: str | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    verifies: bool = True,
    max_shard_bytes: float = 5e9,
) -> Delivered:
    """Export a run's checkpoint.

    Args:
        out: the folder; None: the run's own `model/`, or `adapter/`.
        checkpoint: a step or a folder; None: the best one, else the newest intact one.
        dtype: of the weights; None: as trained.
        adapter: export the adapter's files instead of the merged model.

    Raises:
        UserError: see `rebuild`; the folder is not free; no adapter in this run.
        RunError: the folder differs from the trained model.
    """
    run_dir.check_local(f"to export to {out}", out or "")
    where = export_folder(run, out, adapter)
    folder = where.absolute().parent
    at_work = any((folder / name).exists() for name in (run_dir.RUN, run_dir.LOCK))  # a run may write there
    try:
        with run_dir.lock(folder) if at_work else nullcontext(), _beside(where, at_work) as fresh:
            rebuilt = rebuild(run, checkpoint)
            if adapter and not io.adapters(rebuilt.trainer.model):
                done = "this run has no adapter: it trained the model's own weights"
                raise ConfigError("--adapter", done, "remove it")
            kind = None if adapter else _kept(rebuilt.trainer) if dtype is None else getattr(torch, dtype)
            compared = None
            written: dict[str, str] = {}
            with _writing(where):
                if kind is None:
                    _fill_adapter(fresh, rebuilt.trainer, trained_parameters(rebuilt.trainer), rebuilt.base)
                else:
                    written = _write_merged(rebuilt, fresh, dtype, max_shard_bytes)
            if kind is not None and verifies:
                compared = _verify(rebuilt, fresh, written, kind)
            with _writing(where):
                if where.exists():
                    where.rmdir()  # empty
                os.rename(fresh, where)
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        do = "export on the CPU: CUDA_VISIBLE_DEVICES= optrush export ..."
        raise RunError(f"out of memory while exporting ({next(iter(str(error).splitlines()), '')}); {do}") from error
    size, said = sum(f.stat().st_size for f in where.iterdir()), None if kind is None else str(kind)[len("torch.") :]
    return Delivered(where, rebuilt.manifest.step, rebuilt.passed, said, size, compared)


def export_gguf(
    run: Path, out: Path | None, kind: gguf.Kind, *, checkpoint: str | None = None, verifies: bool = True
) -> tuple[Path, int]:
    """Export a run's checkpoint as one GGUF file; return it and the number of its tensors.

    The folder for transformers is written first, and compared with the trained model, then converted and removed.

    Raises:
        UserError: see `export_run`; the file exists; the format does not support the model or its tokenizer.
        RunError: the folder or the file differs from the trained model.
    """
    gguf.demand_gguf()
    folder, config = open_run(run)
    file = out or folder / f"model-{kind}.gguf"
    if file.exists():
        raise ConfigError(f"to export to {file}", "it exists", "name another file: --out FILE.gguf")
    if file.suffix != ".gguf" or not file.absolute().parent.is_dir():
        raise ConfigError(f"to export to {file}", "not a .gguf file in an existing folder", "--out FILE.gguf")
    part = file.with_name(file.name + ".tmp")
    try:
        with _writing(file), tempfile.TemporaryDirectory(dir=file.absolute().parent, prefix=".gguf-") as fresh:
            export_run(run, Path(fresh) / "model", checkpoint=checkpoint, verifies=verifies)
            _refuse_other_tokens(Path(fresh) / "model", config)
            tensors = gguf.write_gguf(Path(fresh) / "model", part, kind, folder.resolve().name)
            os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    return file, tensors


def _refuse_other_tokens(folder: Path, config: Config) -> None:
    """Raise NeedsError if tokenizer.json tokenizes the run's first documents differently."""
    if (folder / ENGINE).is_file():
        tokens = Tokens(open_tokenizer(folder))
        paths = [origin.path for origin in config.data.origins]
        documents = islice(_documents(tokens, paths, config.data.sample, config), COMPARED_ROWS)
        if (found := tokens.otherwise(folder, documents)) is not None:
            raise NeedsError("the tokenizer as GGUF", found, f"export to hf; or {AS_STORED}, and train again")


def export_fp8(
    run: Path, out: Path | None, *, checkpoint: str | None = None, verifies: bool = True
) -> tuple[Path, int]:
    """Export a run's checkpoint as a folder in 8-bit floats for vLLM; return it and the number of its linears.

    The folder for transformers is written first, and compared with the trained model, then converted and removed.

    Raises:
        UserError: see `export_run`; the folder is not free; the format has no layout for the model.
        RunError: the folder differs from the trained model.
    """
    where = export_folder(run, out or open_run(run)[0] / "model-fp8", adapter=False)
    part = where.with_name(where.name + ".tmp")
    try:
        with _writing(where), tempfile.TemporaryDirectory(dir=where.absolute().parent, prefix=".fp8-") as fresh:
            export_run(run, Path(fresh) / "model", checkpoint=checkpoint, verifies=verifies)
            part.mkdir()
            linears = fp8_folder.write_fp8(Path(fresh) / "model", part)
            if where.exists():
                where.rmdir()  # empty
            os.rename(part, where)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return where, linears


def check_push(repository: str) -> None:
    """Raise ConfigError, before anything is written, if an upload to the hub is impossible."""
    import huggingface_hub

    asked = f"--push {repository}"
    if readers.HUB_ID.fullmatch(repository) is None or ":" in repository:
        raise ConfigError(asked, "not a repository name", "write --push ORGANISATION/NAME")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ConfigError(asked, "HF_HUB_OFFLINE is set", "unset it, or remove --push")
    if huggingface_hub.get_token() is None:
        raise ConfigError(asked, "no hub token", "log in: hf auth login, or set HF_TOKEN")


def push_to_hub(written: Path, repository: str) -> str:
    """Upload a folder or one file to a hub repository, created as private if new; return its address.

    Raises:
        RunError: the upload failed; local files stay. The message has no secrets of the environment.
    """
    import huggingface_hub

    api, secret = huggingface_hub.HfApi(), huggingface_hub.get_token()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        if written.is_dir():
            api.upload_folder(repo_id=repository, folder_path=written, commit_message="Upload the model")
        else:
            api.upload_file(path_or_fileobj=written, path_in_repo=written.name, repo_id=repository)
    except Exception as error:  # from the library and its dependencies
        told = scrubbed(f"{type(error).__name__}: {error}".splitlines()[0])
        told = told if secret is None else told.replace(secret, "***")
        raise RunError(f"{written} is written, but could not be uploaded to {repository}: {told}") from None
    return str(url)


@contextmanager
def _beside(where: Path, at_work: bool) -> Iterator[Path]:
    """Create a temporary folder next to the target; remove it after an error, unless the comparison failed.

    Args:
        at_work: its parent is a locked run folder: remove leftovers of a kill.

    Raises:
        ConfigError: it exists, or it cannot be created.
    """
    fresh = where.with_name(where.name + ".tmp")
    if at_work and fresh.name in run_dir.KNOWN:
        shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir()
    except FileExistsError:
        do = "check and delete it, or use another folder: --out DIR"
        raise ConfigError(f"to export to {where}", f"the temporary folder {fresh} exists", do) from None
    except OSError as error:
        do = "use another folder: --out DIR"
        raise ConfigError(f"to export to {where}", f"{fresh}: {error.strerror}", do) from None
    try:
        yield fresh
    except RunError:
        raise
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


@contextmanager
def _writing(where: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"to export to {where}", f"{error}", "free space, or use another folder: --out DIR") from None


def _write_merged(rebuilt: RebuiltModel, fresh: Path, dtype: str | None, max_shard_bytes: float) -> dict[str, str]:
    """Write the merged model, tokenizer, generation config and card; return digests of the intended tensors."""
    trainer, written = rebuilt.trainer, dict[str, str]()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, t in published_tensors(trainer):
            kept = t if dtype is None else t.to(getattr(torch, dtype))
            written.update((hf, tensor_digest(part)) for hf, part in trainer.weight_map.stored(name, kept))
            yield name, kept

    _fill_model(fresh, trainer, tensors(), rebuilt.base, max_shard_bytes)
    _write_card(fresh, trainer, rebuilt.folder, rebuilt.manifest.step, rebuilt.base)
    return written


def _kept(trainer: Trainer) -> torch.dtype:
    """Return the embedding's dtype, used for published weights; every rank calls it."""
    weight = trainer.model.embedding.weight
    name = from_first("" if weight is None else str(weight.dtype))  # a pipeline stage may have none
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _verify(rebuilt: RebuiltModel, fresh: Path, written: Mapping[str, str], kind: torch.dtype) -> Compared:
    demand_bytes(fresh, written)
    trainer, d = rebuilt.trainer, rebuilt.config.data
    exact = kind == _kept(trainer) and not io.adapters(trainer.model)
    exact = exact and not any(isinstance(m, QuantizedLinear) for m in trainer.model.modules())
    paths = [d.eval] if isinstance(d.eval, str) else [origin.path for origin in d.origins]
    texts, said = comparison_texts(trainer, paths, d.sample)
    ours = trained(trainer, texts)
    device = trainer.world.device
    trainer.model.to("meta")  # its memory is the reloaded model's now
    theirs = reloaded(fresh, texts, device, rebuilt.config.scored)
    compared = compare(ours, theirs, said, kind, exact)
    demand_sound(compared, fresh)
    return compared
