"""Generate text with a model: find its folder, render prompts with its chat template, sample answers.

Our own decoder answers many prompts if it has the model (models/sampling.py), else transformers'
generate, which also streams a chat. A prompt is rendered exactly as training renders a conversation
(data/chat_template.py). An answer ends at the tokens of the model's generation config or where its template ends a
turn. A model's output is untrusted text: print it through `console.shown`.
"""

from __future__ import annotations

import base64
import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

from optrush.config import Config, Data, Model, Sampling
from optrush.data import schema
from optrush.data.chat_template import Tokens, tokenizing
from optrush.data.images import MARK, ImageReader, SeenImage
from optrush.data.mask import Template, any_of
from optrush.data.readers import read_rows
from optrush.data.schema import Completion, Document, Message, RowLocation, Text, parts_of
from optrush.data.tokenizer import answer_ends, image_reader, open_tokenizer
from optrush.errors import ConfigError, DataError, NeedsError, RunError, exhausted, first_line
from optrush.files import check_model_files, parse_json, read_text, regular
from optrush.hardware import first_device
from optrush.kernels.attention import FLASH
from optrush.models.config_json import read_config_json
from optrush.models.decoder import Decoder
from optrush.models.hf import load, load_plain
from optrush.models.kv_cache import check_cacheable
from optrush.models.sampling import Drawing, PromptIds, sample
from optrush.models.shapes import native_obstacle
from optrush.models.source import FILES, locate, read_generation
from optrush.models.text_part import is_multimodal, text_config
from optrush.models.vision import tower_inputs
from optrush.models.weights import WeightMap
from optrush.restore import open_run
from optrush.technique import compilers, library
from optrush.trainer.run_dir import RUN

ADAPTER = "adapter_config.json"
TURNS = 16  # answers computed before output starts, as a multiple of the slots
WEIGHTS = "adapter_model.safetensors"
# Fields taken from the folder's generation_config.json, with its end tokens: properties of the model. Only the
# flags set the sampling.
OWN = ("bos_token_id", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
       "begin_suppress_tokens")  # fmt: skip
STORED = ("float32", "bfloat16", "float16")  # compute dtypes of our own decoder


# --- which folder


@dataclass(frozen=True)
class ModelSource:
    """A model's folder; `adapter` is a folder with PEFT's files for it, `config` is that of its run."""

    name: str
    folder: Path
    adapter: Path | None = None
    config: Config | None = None


def find_model(text: str) -> ModelSource:
    """Find a model by name: a run folder (its model/, else its adapter/ on the base), or any other model.

    Raises:
        ConfigError: it does not exist, or is a run without a written model.
    """
    path = home(text, f"the model {text}")
    if (path / RUN).is_file() or path.name == RUN:
        folder, config = open_run(path)
        if (folder / "model" / "config.json").is_file():
            return ModelSource(text, folder / "model", None, config)
        if (folder / "adapter" / ADAPTER).is_file():
            return ModelSource(text, _published(config, text), folder / "adapter", config)
        raise ConfigError(f"to chat with {text}", "it has neither model/ nor adapter/", f"optrush export {text}")
    run_of = open_run(path.parent)[1] if path.name in ("model", "adapter") and (path.parent / RUN).is_file() else None
    if (path / ADAPTER).is_file():
        try:
            facts = parse_json(read_text(path / ADAPTER))
        except (OSError, ValueError):  # includes UnicodeDecodeError
            do = "copy the adapter's folder again"
            raise ConfigError(f"the adapter {text}", f"{ADAPTER} is not JSON", do) from None
        base = facts.get("base_model_name_or_path") if isinstance(facts, dict) else None
        if not isinstance(base, str) or not base:
            raise ConfigError(f"the adapter {text}", f"{ADAPTER} names no base model", "name the run's folder")
        return ModelSource(text, _located(base), path, run_of)
    return ModelSource(text, _located(text), None, run_of)


def home(text: str, asked: str) -> Path:
    """Return a path as typed, with `~` expanded.

    Raises:
        ConfigError: `~name` of an unknown user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(asked, f"{text}: no such user", "write the full path") from None


def base_of(source: ModelSource, asked: str) -> ModelSource:
    """Return the initial model of a run.

    Raises:
        ConfigError: the base is unknown, or had random weights.
    """
    if source.config is not None:
        return ModelSource(str(source.config.model.path), _published(source.config, asked))
    if source.adapter is not None:
        return ModelSource(str(source.folder), source.folder)
    raise ConfigError(asked, f"{source.name} is not a run's folder: its base model is unknown", "name the run's folder")


def _published(config: Config, asked: str) -> Path:
    if config.model.path is None:
        found = f"the run started from random weights of the shape {config.model.shape}"
        raise ConfigError(f"the base model of {asked}", found, "remove --base")
    return _located(config.model.path)


def _located(path: str) -> Path:
    """Return the folder of a configuration's model."""
    folder, _ = locate(Config(model=Model(path=path), objective="pretrain", data=Data(random=1), output="."))
    assert folder is not None, "no shape was asked for"
    return folder


# --- a model that answers


@dataclass(frozen=True)
class Answer:
    """A model's output for one prompt."""

    text: str
    tokens: int
    finish: str  # stop: end of answer; length: truncated; interrupted

    def facts(self, name: str = "answer") -> dict[str, Any]:
        """Return a mapping with the text under a name, and the other fields (prefixed unless the name is `answer`)."""
        prefix = "" if name == "answer" else f"{name}_"
        return {name: self.text, f"{prefix}tokens": self.tokens, f"{prefix}finish": self.finish}


class PromptTokens(list[int]):
    """The tokens of a prompt, and its images."""

    images: tuple[SeenImage, ...] = ()


def _joined(values: Sequence[Tensor], name: str) -> Tensor:
    """Return the images' model inputs as batched tensors, padded to the largest; positions with -1."""
    sizes = [max(ends) for ends in zip(*(t.shape for t in values), strict=True)]
    wanted = [[(0, most - n) for n, most in zip(t.shape[1:], sizes[1:], strict=True)][::-1] for t in values]
    fill = -1 if name == "image_position_ids" else 0
    return torch.cat([pad(t, sum(each, ()), value=fill) for t, each in zip(values, wanted, strict=True)])


class GenerationModel:
    """A model on a device, with its tokenizer, its chat template and the tokens that end its answers."""

    def __init__(self, source: ModelSource, template: str | None = None, *, streams: bool = True) -> None:
        """Load a model.

        Args:
            template: the chat template for a model without one, such as the base of a trained model.
            streams: also for chat; else only `answers` works.
        """
        self.name = source.name
        self.room: int | None
        self.tokenizer = open_tokenizer(_tokenizer_folder(source))
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = template
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokens = Tokens(self.tokenizer)
        sizes = {} if source.config is None else source.config.data.model_dump(include={"min_pixels", "max_pixels"})
        config = Config(model=Model(path=self.name), objective="sft", data=Data(random=1, **sizes), output=".")
        self.images = image_reader(config, source.folder, self.tokenizer)  # with the pixel limits of training
        self.tokens.images = self.images
        self.decoder: Decoder | None
        self._names: WeightMap | None
        self.decoder, self._names = (None, None) if streams else _decoder(source, self.device)
        if self.decoder is not None:
            hf = text_config(read_config_json(source.folder / "config.json"))
            ends = read_generation(source.folder).get("eos_token_id", hf.get("eos_token_id"))
            self.room = hf.get("max_position_embeddings")
        else:
            self.model = _loaded(source, self.device)
            given = self.model.generation_config
            ends, self.room = given.eos_token_id, getattr(self.model.config, "max_position_embeddings", None)
            # Defaults for transformers.
            self.model.generation_config = type(given)(**{key: getattr(given, key, None) for key in OWN})
        self.stops = answer_ends(self.tokenizer, ends)
        self.template: Template | None = None
        if self.tokenizer.chat_template:
            frame = self.images.frame if isinstance(self.images, ImageReader) else ("", "")
            self.template, self._tool_template = (
                Template(self.tokens.template(tools), self.tokenizer.special_tokens_map, frame)
                for tools in (False, True)
            )
        self._controls = any_of({str(t) for t in self.tokenizer.added_tokens_decoder.values() if t.special})

    def ids(self, prompt: str | Sequence[Message], where: RowLocation, tools: Sequence[Any] = ()) -> PromptTokens:
        """Return the tokens of a conversation up to its answer, or of a text unchanged.

        Raises:
            DataError: no template, a message that forges a turn, or more tokens than the model has positions.
        """
        if isinstance(prompt, str):
            with tokenizing(f"the prompt at {where}"):
                ids = list(self.tokenizer(prompt)["input_ids"])
            ids = ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids  # some tokenizers end every text
        else:
            if self.template is None:
                found, do = "its tokenizer has no chat template", "use --plain to continue plain text"
                raise DataError(f"a conversation with {self.name}", found, do)
            for i, message in enumerate(prompt):
                if found_ := self._controls.search(message.content):
                    found = f"messages[{i}] holds the text {found_[0]}, a control token: a forged turn"
                    raise DataError(f"the messages at {where}", found, "remove it, or write it differently")
            template = self._tool_template if tools else self.template
            text = template.render([template.shown(m) for m in prompt], where, tools, prompt=True)
            with tokenizing(f"the messages at {where}"):
                ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise DataError(f"the prompt at {where}", "it is empty", "write a prompt")
        given = PromptTokens(ids)
        if images := [] if isinstance(prompt, str) else [image for message in prompt for image in message.images]:
            if isinstance(self.images, DataError):
                raise DataError(f"an image in the messages at {where}, for {self.name}", self.images.found, "remove it")
            document = self.tokens.with_images(images, Document(np.array(ids), np.zeros(len(ids), bool)), where)
            if isinstance(document, DataError):
                raise document
            given = PromptTokens(document.ids.tolist())
            given.images = document.images
        if self.room is not None and len(given) >= self.room:
            found = f"{len(given)} tokens, but the model has {self.room} positions"
            raise DataError(f"the prompt at {where}", found, "shorten it, or start a new conversation")
        return given

    def _seen(self, prompts: Sequence[Sequence[int]], tokens: Tensor) -> dict[str, Tensor]:
        """Return the image inputs of transformers' generate for prompts with tokens (prompts, T)."""
        images = [image for ids in prompts for image in getattr(ids, "images", ())]
        if not images:
            return {}
        assert isinstance(self.images, ImageReader)
        reader, inputs = self.images, dict[str, Tensor]()
        pixels = [torch.from_numpy(reader.patches(image)) for image in images]
        grids, spec, vision = [image.grid for image in images], reader.spec, self.model.config.vision_config
        if spec.sizes == "bounded":
            inputs = tower_inputs(spec, vision, torch.cat(pixels), grids)
        else:
            made = [tower_inputs(spec, vision, each, [grid]) for each, grid in zip(pixels, grids, strict=True)]
            inputs = {name: _joined([inputs_of[name] for inputs_of in made], name) for name in made[0]}
        kinds = "token_type_ids" if spec.frame == "text" else "mm_token_type_ids"
        if spec.axes != "one" or spec.mutual != "none":
            inputs[kinds] = (tokens == reader.token).int()
        return {name: t.to(self.device) for name, t in inputs.items()}

    def settings(self, sampling: Sampling, longest: int) -> Any:
        """Return transformers' generation config: the folder's fields of the model, and the sampling."""
        made = copy.deepcopy(self.model.generation_config)
        drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if not sampling.greedy:
            drawn = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")} | {"do_sample": True}
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else (self.stops or [0])[0]
        made.update(
            **drawn, max_new_tokens=self._most(longest, sampling), max_length=None, eos_token_id=self.stops or None,
            pad_token_id=pad,
        )  # fmt: skip
        return made

    def _most(self, n: int, sampling: Sampling) -> int:
        """Return the most tokens of an answer to a prompt of n tokens."""
        return sampling.max_tokens if self.room is None else min(sampling.max_tokens, self.room - n)

    def answers(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, first: int = 0, slots: int = 0
    ) -> list[Answer]:
        """Answer all prompts in one batch, except prompts with less room in the model's positions.

        Args:
            first: index of the first prompt; draws depend on it.
            slots: answers at once in our own decoder; 0: all.
        """
        alike: dict[int, list[int]] = {}
        for i, ids in enumerate(prompts):
            alike.setdefault(self._most(len(ids), sampling), []).append(i)
        by_number: dict[int, Answer] = {}
        for most, batch in alike.items():
            if self.decoder is not None:
                answers = self._sampled({first + i: prompts[i] for i in batch}, sampling, seed, most, slots)
            else:
                answers = self._batch([prompts[i] for i in batch], sampling, seed + first + batch[0])
            by_number |= zip(batch, answers, strict=True)
        return [by_number[i] for i in range(len(prompts))]

    def _sampled(
        self, prompts: Mapping[int, Sequence[int]], sampling: Sampling, seed: int, most: int, slots: int
    ) -> list[Answer]:
        """Answer prompts, keyed by index, with our own decoder."""
        assert self.decoder is not None
        given = [PromptIds(number, np.array(ids, np.int64)) for number, ids in prompts.items()]
        drawing = Drawing(
            most, 0.0 if sampling.greedy else sampling.temperature, tuple(self.stops), seed, slots or len(given),
            0 if sampling.greedy else sampling.top_k, 1.0 if sampling.greedy else sampling.top_p,
        )  # fmt: skip
        sampled = sample(self.decoder, given, 1, drawing)
        if any(math.isnan(p) for answer in sampled for p in answer.log_p):
            assert self._names is not None
            parameters, names = self.decoder.named_parameters(), self._names
            raise self._broken(piece for name, value in parameters for piece in names.split(name, value))
        return [self._answer(torch.tensor(answer.ids)) for answer in sampled]

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """Answer a batch, padded on the left, with transformers."""
        longest = max(map(len, prompts))
        settings = self.settings(sampling, longest)
        tokens = torch.full((len(prompts), longest), settings.pad_token_id)
        mask = torch.zeros_like(tokens)
        for i, ids in enumerate(prompts):
            tokens[i, longest - len(ids) :] = torch.tensor(list(ids))
            mask[i, longest - len(ids) :] = 1
        torch.manual_seed(seed)
        out = self.model.generate(
            tokens.to(self.device), attention_mask=mask.to(self.device), generation_config=settings,
            logits_processor=[self._check_scores], **self._seen(prompts, tokens),
        )  # fmt: skip
        return [self._answer(row) for row in out[:, longest:]]

    def _check_scores(self, _: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of the next token, (prompts, vocabulary); transformers calls it before drawing.

        Raises:
            RunError: NaN or +infinity among them; -infinity marks an impossible token.
        """
        if scores.amax(-1).isfinite().all():
            return scores
        raise self._broken(self.model.named_parameters())

    def _broken(self, weights: Iterable[tuple[str, Tensor]]) -> RunError:
        broken = next((name for name, value in weights if not value.isfinite().all()), None)
        note = "its weights are finite" if broken is None else f"{broken} has some"
        do = "compute in float32" if broken is None else "export an earlier checkpoint, or copy the weights again"
        return RunError(f"an answer of {self.name}", f"NaN or infinity among the scores of the next token; {note}", do)

    def _answer(self, row: Tensor, interrupted: bool = False) -> Answer:
        ids = row.tolist()
        end = next((i for i, token in enumerate(ids) if token in self.stops), None)
        kept = ids if end is None else ids[: end + 1]
        finish = "stop" if end is not None else "interrupted" if interrupted else "length"
        return Answer(self.tokenizer.decode(kept, skip_special_tokens=True), len(kept), finish)

    def stream(self, ids: Sequence[int], sampling: Sampling, seed: int, write: Callable[[str], None]) -> Answer:
        """Answer one prompt; call `write` with each piece of text. Ctrl-C stops the answer, not the program."""
        from transformers import TextIteratorStreamer

        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop, results = Event(), list[Any]()

        def work() -> None:
            try:
                prompt = torch.tensor([list(ids)], device=self.device)
                torch.manual_seed(seed)
                with torch.inference_mode():
                    out = self.model.generate(
                        prompt, attention_mask=torch.ones_like(prompt), streamer=streamer,
                        stopping_criteria=[_StopEvent(stop)], generation_config=self.settings(sampling, len(ids)),
                        logits_processor=[self._check_scores], **self._seen([ids], prompt),
                    )  # fmt: skip
                results.append(out[0, len(ids) :])
            except BaseException as error:  # re-raised in the waiting caller
                results.append(error)
                streamer.end()  # type: ignore[no-untyped-call]

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            while thread.is_alive() or not streamer.text_queue.empty():
                try:
                    for piece in streamer:
                        write(piece)
                    break
                except KeyboardInterrupt:
                    stop.set()
        except BaseException:  # the caller has failed
            stop.set()
            raise
        finally:
            thread.join()  # a running thread would abort the process at interpreter exit
        if isinstance(results[0], BaseException):
            raise results[0]
        return self._answer(results[0], stop.is_set())


class _StopEvent:
    def __init__(self, stop: Event) -> None:
        self.stop = stop

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((ids.shape[0],), self.stop.is_set(), device=ids.device)


def _decoder(source: ModelSource, device: torch.device) -> tuple[Decoder, WeightMap] | tuple[None, None]:
    """Load our own decoder, with the map of its published names.

    None: an adapter without its base, a model with its own penalty, an unsupported model, or a GPU without kernels on
    this machine.

    Raises:
        NeedsError: weights that do not fit the config.json.
    """
    hf, generation = read_config_json(source.folder / "config.json"), read_generation(source.folder)
    penalised = generation.get("repetition_penalty") not in (None, 1) or any(generation.get(key) for key in OWN[2:])
    if source.adapter is not None or penalised or native_obstacle(hf) or is_multimodal(hf):
        return None, None
    if "quantization_config" in hf or not any("ForCausalLM" in a for a in hf.get("architectures") or ("ForCausalLM",)):
        return None, None
    stored = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    gpu = first_device() if device.type == "cuda" else None
    if stored not in STORED or (gpu is not None and not all(r.met for r in compilers(gpu))):
        return None, None
    model, weights = load(source.folder, hf, None, getattr(torch, stored), 0)
    try:
        check_cacheable(model)
    except NeedsError:
        return None, None
    assert isinstance(model, Decoder)
    model.to_empty(device=device)
    model.tie()
    for name, parameter in model.named_parameters():
        weights.fill(name, parameter.data, (0,) * parameter.ndim)
    weights.release()
    model.restore_buffers(device)
    flash = gpu is not None and gpu.capability >= (8, 0) and stored != "float32"
    flash = flash and max(k.head_width for k in model.shape.kinds) <= FLASH
    if model.shape.score_cap is None:
        model.set_attention("varlen" if flash else "sdpa")
    return model.eval().requires_grad_(False), weights


def _loaded(source: ModelSource, device: torch.device) -> Any:
    """Load transformers' own model, with an adapter if the source has one; raise NeedsError if they do not match."""
    if source.adapter is None:
        return load_plain(source.folder, None, device)
    if library("peft") is None:
        asked = f"the adapter {source.adapter} without a merged model next to it"
        raise NeedsError(asked, "the package peft is not installed", "python -m pip install peft, or optrush export")
    from peft import PeftModel, get_peft_model_state_dict

    asked, do = f"the adapter {source.adapter}", "name an adapter of this base, as PEFT writes it"
    check_model_files(source.adapter, FILES)
    try:  # PEFT itself would load a pickle, or contact the hub
        with safe_open(regular(source.adapter / WEIGHTS), "pt") as file:
            names = set(file.keys())
    except (OSError, SafetensorError):
        raise NeedsError(asked, f"no {WEIGHTS} that can be read", do) from None
    base = load_plain(source.folder, None, device)
    tokens = len(open_tokenizer(_tokenizer_folder(source)))
    if tokens > base.get_input_embeddings().weight.shape[0]:  # tokens added by the run
        base.resize_token_embeddings(tokens, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing names, which PEFT warns of, are errors here
        try:
            model = PeftModel.from_pretrained(base, source.adapter, local_files_only=True)
        except (ValueError, TypeError, RuntimeError, KeyError, OSError, ImportError, AttributeError) as error:
            raise NeedsError(asked, first_line(error), do) from None
        wanted = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    strange, lacking = names - wanted - set(model.state_dict()), wanted - names
    if strange or lacking:
        found = f"{min(strange)}, which the model does not have" if strange else f"no values for {min(lacking)}"
        raise NeedsError(asked, found, do)
    return model.eval()


def template_of(source: ModelSource) -> str | None:
    """Return the chat template of a model, without loading its weights."""
    template: str | None = open_tokenizer(_tokenizer_folder(source)).chat_template
    return template


def _tokenizer_folder(source: ModelSource) -> Path:
    """Return the folder with the tokenizer: the adapter's, if it has one."""
    in_adapter = source.adapter is not None and (source.adapter / "tokenizer.json").is_file()
    return source.adapter if in_adapter and source.adapter is not None else source.folder


# --- Prompts: rows of any training format, with or without the answer.
#
# A row is parsed as in training (data/schema.py). A row without an answer gets a placeholder during parsing, so that
# there is one reader and one set of errors.


STAND_IN = "-"  # placeholder for a missing answer
ANSWERS = ("assistant", "gpt", "function_call")


@dataclass(frozen=True)
class Prompt:
    where: RowLocation
    asked: str | tuple[Message, ...]  # a text to continue, or a conversation
    tools: tuple[Any, ...] = ()
    reference: str | None = None  # the row's own answer

    def shown(self) -> str | list[dict[str, Any]]:
        return self.asked if isinstance(self.asked, str) else [row_of(m) for m in self.asked]


def row_of(message: Message) -> dict[str, Any]:
    """Return a turn in the form of a data row, with images among its texts."""
    shown, texts = message.shown(), message.content.split(MARK)
    if not message.images:
        return shown
    parts = [{"type": "text", "text": texts[0]}]
    for image, text in zip(message.images, texts[1:], strict=True):
        held = {"base64": base64.b64encode(image.data).decode()} if image.data else {"image": image.path}
        parts += [{"type": "image", **held}, {"type": "text", "text": text}]
    return shown | {"content": [part for part in parts if part.get("text") != ""]}


def prompts(path: Path, plain: bool = False, system: str | None = None) -> Iterator[Prompt]:
    """Read the prompts of a file of rows.

    A conversation is the prompt up to its last assistant turn, which is the reference. A lone `prompt` is a user's
    turn, or with `plain` a text; with a `completion` it is a text, as in training. A `text` is continued.

    Args:
        system: a system turn for conversations without one.

    Raises:
        DataError: no such file, or a row without a prompt, with its source.
    """
    for where, row in read_rows(path):
        prompt = read_prompt(where, row, plain)
        if system is not None and not isinstance(prompt.asked, str) and prompt.asked[0].role != "system":
            prompt = Prompt(where, (Message("system", system), *prompt.asked), prompt.tools, prompt.reference)
        yield prompt


def read_prompt(where: RowLocation, found: dict[str, Any], plain: bool) -> Prompt:
    """Return the prompt of a row; DataError if it has none."""
    found, answered = _completed(found, plain)
    return prompt_of(where, schema.parse_row(where, found), plain, answered)


def prompt_of(where: RowLocation, row: schema.Row, plain: bool = False, answered: bool = True) -> Prompt:
    """Return the prompt of a parsed row, with the row's own answer, if any, as the reference."""
    row = parts_of(row)[0]
    if isinstance(row, Text):
        return Prompt(where, row.text)
    if isinstance(row, Completion):
        return Prompt(where, row.prompt, (), row.completion if answered else None)
    last = len(row.messages) - 1
    if row.prompt and row.prompt < last:
        last = row.prompt  # in a pair, the answer starts here
    asked, answer = row.messages[:last], row.messages[last]
    if not asked or answer.role != "assistant":
        raise schema.bad_row(where, "no turn to answer")
    if plain:
        raise DataError(f"the messages at {where} with --plain", "a conversation, not a text", "remove --plain")
    return Prompt(where, asked, row.tools, answer.content if answered else None)


def _completed(row: dict[str, Any], plain: bool) -> tuple[dict[str, Any], bool]:
    """Return the row with an answer, and whether it is the row's own."""
    for key in ("messages", "conversations"):
        turns = row.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            said = "from" if "from" in turns[-1] else "role"
            if turns[-1].get(said) in ANSWERS:
                return row, True
            end = {"from": "gpt", "value": STAND_IN} if said == "from" else {"role": "assistant", "content": STAND_IN}
            return {**row, key: [*turns, end]}, False
    if row.get("instruction") is not None and row.get("output") is None:
        return {**row, "output": STAND_IN}, False
    prompt = row.get("prompt")
    if prompt is None or any(row.get(key) is not None for key in ("completion", "chosen", "rejected")):
        return row, True
    others = {key: value for key, value in row.items() if key != "prompt"}
    if isinstance(prompt, list):
        return _completed({**others, "messages": prompt}, plain)
    if plain:
        return {**row, "completion": STAND_IN}, False
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": STAND_IN}]
    return {**others, "messages": turns}, False


# --- many prompts with one model


def generate_answers(
    source: ModelSource, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, batch: int,
    template: str | None = None,
) -> Iterator[Answer]:  # fmt: skip
    """Load a model, yield its answers in the order of the prompts, and free it.

    Args:
        template: the chat template for a model without one.

    Raises:
        UserError: before anything is generated, if one of the prompts is invalid.
        RunError: out of memory.
    """
    model = GenerationModel(source, template, streams=False)
    ids = [model.ids(p.asked, p.where, p.tools) for p in prompts]
    try:
        many = batch if model.decoder is None else TURNS * batch  # a finished answer's slot goes to the next prompt
        for first in range(0, len(ids), many):
            yield from model.answers(ids[first : first + many], sampling, seed, first, batch)
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        smaller = f"use --batch {batch // 2}" if batch > 1 else "lower --max-tokens"
        raise RunError(f"out of memory with {batch} prompts at once; {smaller}") from error
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
