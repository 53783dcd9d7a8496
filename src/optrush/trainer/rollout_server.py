"""Sample answers from the trained weights with a running vLLM or SGLang server over HTTP.

Before each rollout the trained adapters, or the full model if a server cannot load adapters, are written to a folder
that both programs read, and the server loads them. Adapters get a new name each time, to avoid old caches; old adapters
are unloaded. Each answer is one request, with a seed from (seed, prompt, member).

The server rounds differently from training. `weigh` compares the log-probabilities of both, stops a run that samples
from another model, and returns importance weights: min(cap, p trained / p sampled) per token. Sources: Ionides,
https://doi.org/10.1198/106186008X320456 (truncated importance weights); Yao et al.,
https://fengyao.notion.site/off-policy-rl (for tokens sampled by another engine).
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from optrush.config import RolloutServer
from optrush.errors import NeedsError, UserError, first_line, one_line
from optrush.models.sampling import Drawing, PromptIds, SampledAnswer, uniform
from optrush.trainer import distributed

if TYPE_CHECKING:
    from optrush.trainer.trainer import Trainer

FOREIGN = 0.1  # mean nats per token that indicate another model; engines differ by about 0.01
APART = 2.0  # base and adapter must differ by this many times the server's distance from either
TRIES, WAIT_s = 3, 1.0  # for a refused or broken connection
MOST_bytes, MOST_REQUESTS = 1 << 28, 256  # maximum size of an answer; maximum requests at a time
LOADED = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank RANK"
RELOADED = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"


@dataclass(frozen=True)
class Client:
    """A server's HTTP client, without redirects and proxies."""

    url: str
    timeout: float  # seconds per request

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Return the status and value of a response, its text if it is not JSON; GET without a body.

        Raises:
            NeedsError: no server, no answer in time, a redirect, or a server error.
        """
        for n in range(TRIES):
            try:
                status, headers, raw = self._sent(path, body)
                break
            except TimeoutError:
                do = f"set rollout.timeout: {2 * self.timeout:g}, or a smaller grpo.slots"
                raise self.error(path, f"no answer within rollout.timeout: {self.timeout:g} s", do) from None
            except (OSError, HTTPException) as error:
                if n == TRIES - 1:
                    do = "start the server, or fix rollout.server"
                    raise self.error(path, f"no connection: {first_line(error)}", do) from None
                time.sleep(WAIT_s)
        if len(raw) > MOST_bytes:
            do = "set rollout.server to the address of a vLLM or SGLang server"
            raise self.error(path, f"an answer of more than {MOST_bytes:,} bytes", do)
        if 300 <= status < 400:
            place = headers.get("Location", "nowhere")
            raise self.error(
                path, f"a redirect to {one_line(place)}", "set rollout.server: to the server's own address"
            )
        try:
            values: Any = json.loads(raw)
        except (ValueError, RecursionError):
            values = raw.decode(errors="replace")
        if status in (401, 403) or status >= 500:
            raise self.error(path, f"HTTP {status}: {error_text(values)}", "read the server's log")
        return status, values

    def _sent(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any, bytes]:
        """Send one request, GET without a body; return (status, headers, content), read until just above MOST_bytes."""
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            text = None if body is None else json.dumps(body)
            headers = {} if text is None else {"Content-Type": "application/json"}
            connection.connect()
            with closed_after(connection.sock, self.timeout):
                connection.request("GET" if text is None else "POST", parts.path.rstrip("/") + path, text, headers)
                answer, raw = connection.getresponse(), bytearray()
                while len(raw) <= MOST_bytes and (piece := answer.read1(1 << 16)):
                    raw += piece
                if answer.length and len(raw) <= MOST_bytes:
                    raise IncompleteRead(b"", answer.length)
            return answer.status, answer.headers, bytes(raw)
        finally:
            connection.close()

    def error(self, path: str, found: str, do: str) -> NeedsError:
        """Return the error of a request."""
        return NeedsError(f"`rollout.server: {self.url}`, {path}", found, do)


@contextmanager
def closed_after(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Close a connection after some seconds and raise TimeoutError: a socket's own timeout restarts with each byte."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):  # the server has closed it
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    except (OSError, HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def error_text(found: Any) -> str:
    """Return the text of a server's error, in one line."""
    for key in ("error", "message", "detail"):
        found = found.get(key, found) if isinstance(found, Mapping) else found
    return one_line(str(found)) or "no text"


class Dialect(Protocol):
    """The interface to one kind of server."""

    def answer(self, prompt: Sequence[int], drawing: Drawing, seed: int, adapter: str | None) -> Reply: ...
    def load(self, name: str, folder: Path) -> None: ...
    def unload(self, name: str) -> None: ...
    def reload(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Reply:
    """A server's answer to a prompt: ids, their log-probabilities, how it ended, and the prompt's tokens as read."""

    ids: list[Any]
    log_p: list[Any] | None
    finish: str
    prompt_tokens: int
    prompt: list[int] | None = None


@dataclass(frozen=True)
class Vllm:
    """vLLM's server with OpenAI's interface. Log-probabilities include the temperature if it runs with
    --logprobs-mode processed_logprobs.
    """

    client: Client
    model: str

    def answer(self, prompt: Sequence[int], drawing: Drawing, seed: int, adapter: str | None) -> Reply:
        """Return the reply to a prompt."""
        path = "/v1/completions"
        body = {
            "model": adapter or self.model, "prompt": list(prompt), "max_tokens": drawing.most, "seed": seed, "n": 1,
            "temperature": drawing.temperature, "top_p": drawing.top_p, "top_k": drawing.top_k, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop_token_ids": list(drawing.ends), "logprobs": 0, "return_token_ids": True,
            "skip_special_tokens": False, "add_special_tokens": False,
        }  # fmt: skip
        reply = checked_call(self.client, path, body)
        choice = reply["choices"][0]
        if choice.get("token_ids") is None:
            raise self.client.error(path, "an answer without `token_ids`", "update vLLM: it has `return_token_ids`")
        log_p = (choice.get("logprobs") or {}).get("token_logprobs")
        used = reply["usage"]["prompt_tokens"]
        return Reply(choice["token_ids"], log_p, choice["finish_reason"], used, choice.get("prompt_token_ids"))

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter."""
        body = {"lora_name": name, "lora_path": str(folder)}
        checked_call(self.client, "/v1/load_lora_adapter", body, f"start it as `{LOADED}`")

    def unload(self, name: str) -> None:
        """Unload an adapter, if the server still has it: it may have restarted."""
        self.client.call("/v1/unload_lora_adapter", {"lora_name": name})

    def reload(self, folder: Path) -> None:
        """Reload all weights, and drop caches of the old ones."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        checked_call(self.client, "/collective_rpc", body, f"start it as `{RELOADED}`")
        checked_call(self.client, "/reset_prefix_cache", {}, f"start it as `{RELOADED}`")


@dataclass(frozen=True)
class Sglang:
    """SGLang's own interface. Draws depend only on the seed if it runs with --enable-deterministic-inference."""

    client: Client

    def answer(self, prompt: Sequence[int], drawing: Drawing, seed: int, adapter: str | None) -> Reply:
        """Return the reply to a prompt."""
        sampling = {
            "max_new_tokens": drawing.most, "temperature": drawing.temperature, "top_p": drawing.top_p,
            "top_k": drawing.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "stop_token_ids": list(drawing.ends), "sampling_seed": seed,
            "skip_special_tokens": False, "no_stop_trim": True,
        }  # fmt: skip
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
        reply = checked_call(self.client, "/generate", {**body, "lora_path": adapter} if adapter else body)
        reply = reply[0] if isinstance(reply, list) else reply
        meta = reply["meta_info"]
        pairs = meta.get("output_token_logprobs")
        ids = reply["output_ids"] if "output_ids" in reply or not pairs else [pair[1] for pair in pairs]
        log_p = None if pairs is None else [pair[0] for pair in pairs]
        return Reply(ids, log_p, meta["finish_reason"]["type"], meta["prompt_tokens"])

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter."""
        do = "start it with --enable-lora --max-lora-rank RANK --lora-target-modules all"
        checked_call(self.client, "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, do)

    def unload(self, name: str) -> None:
        """Unload an adapter, if the server still has it: it may have restarted."""
        self.client.call("/unload_lora_adapter", {"lora_name": name})

    def reload(self, folder: Path) -> None:
        """Reload all weights, and drop caches of the old ones."""
        checked_call(self.client, "/update_weights_from_disk", {"model_path": str(folder)})


def checked_call(client: Client, path: str, body: Mapping[str, Any], do: str = "read the server's log") -> Any:
    """Return a server's response; raise NeedsError if it is an error."""
    status, found = client.call(path, body)
    if status != 200 or (isinstance(found, Mapping) and found.get("success") is False):
        raise client.error(path, f"HTTP {status}: {error_text(found)}", do)
    return found


def connect(settings: RolloutServer) -> Dialect:
    """Return the interface of a server. Raises NeedsError if it does not answer, or is neither vLLM nor SGLang."""
    client = Client(settings.server, settings.timeout)
    for path in ("/model_info", "/get_model_info"):
        status, found = client.call(path)
        if status == 200 and isinstance(found, Mapping) and "model_path" in found:
            return Sglang(client)
    status, found = client.call("/v1/models")
    models = found.get("data") if status == 200 and isinstance(found, Mapping) else None
    bases = [m["id"] for m in models or () if isinstance(m, Mapping) and "id" in m and not m.get("parent")]
    if not bases:
        do = "set rollout.server to a vLLM or SGLang server such as http://host:8000 (without /v1)"
        raise client.error("/v1/models", f"HTTP {status} without a model: {error_text(found)}", do)
    return Vllm(client, str(bases[0]))


@dataclass
class ServerEngine:
    """A server that samples from the trained weights; one per run, on every rank.

    note: for `AnswerEngine`.
    """

    settings: RolloutServer
    trainer: Trainer
    note: str | None = None
    loaded: str | None = None  # the adapter loaded in the server
    told_apart: bool = False  # the adapter's effect was seen in the server's answers
    count: int = 0
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        """Contact the server. Raises NeedsError."""
        self.client = Client(self.settings.server, self.settings.timeout)
        self.name = distributed.from_first(f"optrush-{secrets.token_hex(4)}")
        self.dialect = distributed.agreed(lambda: connect(self.settings))

    @property
    def folder(self) -> Path:
        """Return the folder for the trained weights."""
        default = Path(self.trainer.config.output) / "rollout"
        return (Path(self.settings.folder) if self.settings.folder else default).resolve()

    def sample(
        self, prompts: Sequence[PromptIds], members: int, drawing: Drawing,
        precision: AbstractContextManager[object] | None = None,
    ) -> list[SampledAnswer]:  # fmt: skip
        """Return `members` answers to each prompt, prompt by prompt, from the current weights; every rank calls it.

        Raises:
            NeedsError: see `Client.call`, or an unusable answer.
        """
        self.hand_over()
        requests = [(p, m) for p in range(len(prompts)) for m in range(members)]
        return distributed.agreed(lambda: self._answered(prompts, requests, drawing))

    def hand_over(self) -> None:
        """Send the trained weights to the server; every rank calls it."""
        self.count += 1
        name, old = f"{self.name}-{self.count}", self.loaded
        first = self.trainer.world.rank == 0
        if first and self.count == 1 and self.settings.folder is None:
            for left in self.folder.glob("optrush-*"):  # left by a killed run
                shutil.rmtree(left, ignore_errors=True)
        assert self.trainer.publish is not None
        adapters = self.trainer.publish(self.folder / name)
        distributed.agreed(lambda: self._loaded(name, adapters, old) if first else None)
        self.loaded = name if adapters else None

    def _loaded(self, name: str, adapters: bool, old: str | None) -> None:
        if adapters:
            self.dialect.load(name, self.folder / name)
        else:
            self.dialect.reload(self.folder / name)
        if old is not None:
            self.dialect.unload(old)
        shutil.rmtree(self.folder / f"{self.name}-{self.count - 1}", ignore_errors=True)

    def _answered(
        self, prompts: Sequence[PromptIds], requests: Sequence[tuple[int, int]], drawing: Drawing
    ) -> list[SampledAnswer]:
        pool = ThreadPoolExecutor(min(drawing.slots, MOST_REQUESTS))
        try:
            return list(pool.map(lambda request: self._answer(prompts[request[0]], request, drawing), requests))
        finally:
            pool.shutdown(cancel_futures=True)

    def _answer(self, prompt: PromptIds, place: tuple[int, int], drawing: Drawing) -> SampledAnswer:
        ids, keys = prompt.ids.tolist(), (torch.tensor([prompt.number]), torch.tensor([place[1]]))
        seed = int(uniform(drawing.seed, *keys).item() * 2**31)
        try:
            reply = self.dialect.answer(ids, drawing, seed, self.loaded)
            wrong = self._wrong(reply, ids, drawing)
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            wrong = f"an answer in another form: {type(error).__name__}: {first_line(error)}", "update the server"
        if wrong:
            raise self.client.error("an answer", *wrong)
        log_p = [float(x) for x in reply.log_p or ()]
        return SampledAnswer(*place, reply.ids, log_p, reply.finish == "stop", -sum(log_p) / len(log_p))

    def _wrong(self, reply: Reply, prompt: list[int], drawing: Drawing) -> tuple[str, str] | None:
        """Return why an answer is unusable, and a remedy; None if it is usable."""
        if not reply.log_p:
            return "no log-probabilities", "allow them: vLLM --max-logprobs 1, a generative model"
        if len(reply.ids) != len(reply.log_p):
            found = f"{len(reply.ids)} tokens with {len(reply.log_p)} log-probabilities"
            return found, "update the server: it must return one log-probability per token"
        if reply.prompt_tokens != len(prompt) or reply.prompt not in (None, prompt):
            found = f"a prompt of {len(prompt)} tokens, which the server counted as {reply.prompt_tokens}"
            return found, "configure the server to add no tokens, and serve the trained model"
        if not all(isinstance(x, float | int) and math.isfinite(x) and x <= 1e-3 for x in reply.log_p):
            return "log-probabilities that are not finite, or above 0", "read the server's log"
        if others := [x for x in reply.ids if not isinstance(x, int) or not 0 <= x < self.trainer.vocab]:
            found = f"the token {others[0]}, but the model's vocabulary has {self.trainer.vocab:,}"
            return found, "serve the trained model: the server's has another tokenizer"
        if reply.finish not in ("stop", "length") or len(reply.ids) > drawing.most:
            found = f"an answer of {len(reply.ids)} tokens that ended by {reply.finish!r}"
            return found, f"give the server {len(prompt) + drawing.most} tokens of context (--max-model-len)"
        return None

    def weigh(self, sampled: Tensor, trained: Tensor, untrained: Callable[[], Tensor] | None) -> Tensor:
        """Return importance weights; see `AnswerEngine.weigh`.

        Raises:
            NeedsError: the server samples another model, or the base without its adapter.
        """
        others = trained if untrained is None or self.told_apart else untrained()
        pairs = (sampled, trained), (sampled, others), (trained, others)
        mine = [len(sampled), *((a - b).abs().sum().item() for a, b in pairs)]
        n, gap, base, moved = (sum(x) for x in zip(*map(json.loads, distributed.gather(json.dumps(mine))), strict=True))
        asked = f"answers sampled by `rollout.server: {self.settings.server}`"
        found = f"log-probabilities differ from training's by {gap / max(n, 1):.3g} per token on average"
        error: UserError | None = None
        if moved > APART * min(gap, base):
            if base < gap:
                do = "enable LoRA in the server for every trained module, or set lora.targets to its modules"
                error = NeedsError(asked, f"the server samples the base model without the adapter: {found}", do)
            self.told_apart = True
        if error is None and gap > FOREIGN * n:
            do = "serve the trained model; with grpo.temperature vLLM needs --logprobs-mode processed_logprobs"
            error = NeedsError(asked, found, do)
        if error is not None:
            error.everywhere = True
            raise error
        return (trained - sampled).exp().clamp_max(self.settings.correction)
