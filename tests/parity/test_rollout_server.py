"""`rollout: {server: URL}`: a small server that speaks as vLLM or SGLang do.

It answers with transformers and PEFT from the folders that a run hands over.
"""
# ruff: noqa: F811 - a fixture of another file

import copy
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_grpo import folder, grpo_run  # noqa: F401
from transformers import AutoModelForCausalLM

from meshes import further
from optrush.config import parse_config
from optrush.decide import decide
from optrush.errors import ConfigError, NeedsError, UserError
from optrush.planner.search import predict
from optrush.trainer import rollout_server, run_dir
from optrush.trainer import run as fit
from optrush.trainer.dry_run import dry_run

from trials import metrics

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own


class Half(str):
    """An answer that breaks off."""


class Server:
    """`answer` and `status` change what it answers: a fault."""

    def __init__(self, base: Path, kind: str = "vllm") -> None:
        self.kind, self.base = kind, AutoModelForCausalLM.from_pretrained(base).eval()
        self.models: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []
        self.answer: Callable[[str, Any], Any] = lambda path, found: found
        self.status: Callable[[str], int | None] = lambda path: None
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: Any) -> None:
                with outer.lock:
                    outer.asked.append((self.path, body))
                    status = outer.status(self.path) or 200
                    found = outer.reply(self.path, body) if status == 200 else {"error": {"message": "a reason"}}
                    status, found = (404, "Not Found") if found is None else (status, found)
                    found = outer.answer(self.path, found) if status == 200 else found
                raw = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "http://elsewhere/")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw[: len(raw) // 2] if isinstance(found, Half) else raw)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False  # a close waits for them
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def reply(self, path: str, body: Any) -> Any:
        vllm = self.kind == "vllm"
        if path in ("/load_lora_adapter", "/v1/load_lora_adapter") and path.startswith("/v1") == vllm:
            assert body["lora_name"] not in self.models
            self.models[body["lora_name"]] = PeftModel.from_pretrained(
                copy.deepcopy(self.base), body["lora_path"]
            ).eval()
            return "Success" if vllm else {"success": True}
        if path in ("/unload_lora_adapter", "/v1/unload_lora_adapter") and path.startswith("/v1") == vllm:
            del self.models[body["lora_name"]]
            return "Success" if vllm else {"success": True}
        if vllm and path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.base = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"]).eval()
            return {"results": [None]}
        if not vllm and path == "/update_weights_from_disk":
            self.base = AutoModelForCausalLM.from_pretrained(body["model_path"]).eval()
            return {"success": True, "message": "Succeeded"}
        if vllm and path == "/reset_prefix_cache":
            return ""
        if vllm and path == "/v1/models":
            return {"data": [{"id": "an-adapter", "parent": "base"}, {"id": "base", "parent": None}]}
        if not vllm and path == "/get_model_info":
            return {"model_path": "base"}
        if vllm and path == "/v1/completions":
            model = self.base if body["model"] == "base" else self.models[body["model"]]
            ids, log_p, ended = self.sampled(
                model, body["prompt"], body["max_tokens"], body["temperature"], body["stop_token_ids"], body["seed"]
            )
            choice = {
                "token_ids": ids, "logprobs": {"token_logprobs": log_p}, "finish_reason": "stop" if ended else "length",
                "prompt_token_ids": body["prompt"],
            }  # fmt: skip
            return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}
        if not vllm and path == "/generate":
            s, given = body["sampling_params"], body["input_ids"]
            model = self.models[body["lora_path"]] if "lora_path" in body else self.base
            ids, log_p, ended = self.sampled(
                model, given, s["max_new_tokens"], s["temperature"], s["stop_token_ids"], s["sampling_seed"]
            )
            meta = {
                "output_token_logprobs": [[p, t, None] for p, t in zip(log_p, ids, strict=True)],
                "finish_reason": {"type": "stop" if ended else "length"}, "prompt_tokens": len(given),
            }  # fmt: skip
            return {"output_ids": ids, "meta_info": meta}
        return None

    @torch.no_grad()
    def sampled(self, model, prompt, most, temperature, ends, seed):
        generator, ids, log_p = torch.Generator().manual_seed(seed), list(prompt), []
        while len(log_p) < most and (not log_p or ids[-1] not in ends):
            p = (model(input_ids=torch.tensor([ids])).logits[0, -1] / (temperature or 1)).log_softmax(-1)
            ids.append(int(torch.multinomial(p.exp(), 1, generator=generator)) if temperature else int(p.argmax()))
            log_p.append(float(p[ids[-1]]))
        return ids[len(prompt) :], log_p, ids[-1] in ends

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
def served(folder, monkeypatch):
    started = []
    monkeypatch.setattr(rollout_server, "WAIT_s", 0.01)

    def start(kind: str = "vllm") -> Server:
        started.append(Server(folder / "untied", kind))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def run_with(box: Path, server: Server, *sets: str, **with_: Any) -> Any:
    sets = (
        f"rollout={{server: '{server.url}'}}", "grpo.max_new=6", "grpo.group=2", "train.steps=3",
        "train.eval_every=null", *sets,
    )  # fmt: skip
    return grpo_run(box, packing={}, sets=["data.eval=null", "optim.lr=0.02", *sets], **with_)


@pytest.mark.parametrize(("kind", "with_"), further(
    [(kind, with_) for with_ in ({"lora": {"rank": 4}}, {}, {"lora": {"rank": 4, "dora": True}})
     for kind in ("vllm", "sglang")], 4), ids=str)  # fmt: skip
def test_a_server_samples_from_what_was_trained_last(folder, served, kind, with_):
    """In float32, its log-probabilities of each step are those of training: a step late, they differ by more."""
    server = served(kind)
    lines = [
        l for l in metrics(run_with(folder, server, "grpo.temperature=0.8", "train.steps=2", **with_)) if "loss" in l
    ]
    assert len(lines) == 2 and all(0 <= l["logp_difference_max"] < 1e-4 for l in lines)
    assert all(l["ratio"] == 1 for l in lines if l["target_tokens"]) and any(l["target_tokens"] for l in lines)
    paths = server.paths()
    seeds = [b.get("seed", b.get("sampling_params", {}).get("sampling_seed")) for _, b in server.asked]
    drawn = [seed for seed in seeds if seed is not None]
    assert len(drawn) == 2 * 8 and len(set(drawn)) == len(drawn)
    v1 = "/v1" * (kind == "vllm")
    if with_ == {"lora": {"rank": 4}}:
        assert paths.count(f"{v1}/load_lora_adapter") == 2 and paths.count(f"{v1}/unload_lora_adapter") == 1
        assert len(server.models) == 1
    else:
        assert paths.count("/collective_rpc" if v1 else "/update_weights_from_disk") == 2 and not server.models
        assert paths.count("/reset_prefix_cache") == (2 if v1 else 0)


@pytest.mark.parametrize("shared", [False, True])
def test_the_last_weights_stay_where_they_were_handed_over(folder, served, tmp_path, shared):
    output, server = tmp_path / "run", served()
    place = tmp_path / "shared" if shared else output / "rollout"
    sets = [f"rollout.folder={place}"] * shared
    config = run_with(
        folder, server, f"output={output}", "train.steps=2", "train.save_every=1", *sets, lora={"rank": 4}
    )
    assert fit.run(fit.RunRequest(decide(config))).code == 0
    assert [p.name for p in place.iterdir()] == list(server.models) and next(iter(server.models)).endswith("-2")
    shutil.rmtree(output / "checkpoints" / "step-000002")
    (place / "mine").mkdir()  # as where the folder is a link to another disk
    assert fit.run(fit.RunRequest(decide(config), resume="auto")).code == 0
    assert (place / "mine").exists() and len([*place.iterdir()]) == (3 if shared else 2)  # others' stay
    run_dir._check_clean(output, {p.name for p in output.iterdir()} - {run_dir.LOCK})  # it may be replaced


def test_a_shared_folder_is_the_same_from_anywhere(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = grpo_run(folder, sets=["rollout={server: 'http://host:1', folder: shared}"])
    assert fit.absolute(config).rollout.folder == str(tmp_path / "shared")


@pytest.mark.slow
def test_two_ranks_ask_for_what_one_asks(folder, served, pair):
    server = served()
    alone = metrics(run_with(folder, server, "train.steps=2", rows=2, lora={"rank": 4}))
    seeds = sorted(b["seed"] for _, b in server.asked if "seed" in b)
    del server.asked[:]
    both = pair(metrics, run_with(folder, server, "train.steps=2", rows=2, lora={"rank": 4}, ddp={}))[0]
    assert sorted(b["seed"] for _, b in server.asked if "seed" in b) == seeds
    assert [l["loss"] for l in both if "loss" in l] == pytest.approx(
        [l["loss"] for l in alone if "loss" in l], abs=1e-5
    )


# --- importance weights
def engine(correction: float = 2.0) -> rollout_server.ServerEngine:
    made = object.__new__(rollout_server.ServerEngine)
    made.settings = rollout_server.RolloutServer(server="http://host:1", correction=correction)
    made.told_apart = False
    return made


def test_weights_are_truncated_ratios():
    trained = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    sampled = trained + torch.tensor([0.1, -0.05, 0.0, -0.2])
    found = engine(1.1).weigh(sampled, trained, None)
    assert found.tolist() == pytest.approx([2.718281828**-0.1, 1.0512711, 1.0, 1.1])


def moved(n: int, by: float, seed: int = 0) -> torch.Tensor:
    return by * torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("server", "adapter", "found"),
    [
        (0.01, 0.0, ""), (0.01, 0.002, ""), (0.01, 0.05, ""),  # as of the base at first, then told apart
        (0.3, 0.0, "per token on average"), (0.01, 0.5, ""),
        ("base", 0.05, "the base model without the adapter"), ("base", 0.5, "the base model without the adapter"),
        ("base", 0.002, ""),  # not to be told apart yet
    ],
)  # fmt: skip
def test_a_server_that_samples_another_model_is_found(server, adapter, found):
    base = -1 - torch.rand(400, generator=torch.Generator().manual_seed(3))
    trained = base + moved(400, adapter, 1)
    sampled = (base + moved(400, 0.01, 2)) if server == "base" else trained + moved(400, server, 2)
    of = engine()
    if found:
        with pytest.raises(NeedsError) as error:
            of.weigh(sampled, trained, lambda: base)
        assert found in error.value.found and error.value.everywhere
    else:
        assert of.weigh(sampled, trained, lambda: base).shape == (400,)
        assert of.told_apart == (adapter >= 0.05)


def test_weights_of_tokens_reach_the_loss(folder, served, monkeypatch):
    """Answers that the server thinks less likely by 0.05 nats a token have all weights, and gradients, times e^0.05."""
    norms = []
    for less in (0.0, 0.05):
        server = served()

        def shifted(path: str, found: Any, less: float = less) -> Any:
            if path == "/v1/completions":
                kept = found["choices"][0]["logprobs"]
                kept["token_logprobs"] = [p - less for p in kept["token_logprobs"]]
            return found

        server.answer = shifted
        lines = metrics(run_with(folder, server, "train.steps=1", "optim.clip=null"))
        norms.append(next(l["grad_norm"] for l in lines if "loss" in l))
    assert norms[1] / norms[0] == pytest.approx(1.0512711, rel=1e-4)


# --- faults
def choice(**changes: Any) -> Callable[[str, Any], Any]:
    def answer(path: str, found: Any) -> Any:
        if path == "/v1/completions":
            found["choices"][0] |= changes
        return found

    return answer


def emptied(path: str, found: Any) -> Any:
    return {} if path == "/v1/completions" else found


def counted(path: str, found: Any) -> Any:
    return {**found, "usage": {"prompt_tokens": 99}} if path == "/v1/completions" else found


def longer(path: str, found: Any) -> Any:
    if path == "/v1/completions":
        found["choices"][0]["token_ids"].append(5)
    return found


def slept(path: str, found: Any) -> Any:
    time.sleep(0.6 if path == "/v1/completions" else 0)
    return found


@pytest.mark.parametrize(("answer", "found", "do"), [
    (choice(logprobs=None), "no log-probabilities", "--max-logprobs"),
    (choice(logprobs={"token_logprobs": []}), "no log-probabilities", "--max-logprobs"),
    (choice(token_ids=[1], logprobs={"token_logprobs": [float("nan")]}), "not finite", "log"),
    (choice(token_ids=[1], logprobs={"token_logprobs": [None]}), "not finite", "log"),
    (choice(token_ids=[1], logprobs={"token_logprobs": [-(10**400)]}), "in another form: OverflowError", "update"),
    (lambda path, found: "[" * 200000 if path == "/v1/completions" else found, "another form: TypeError", "update"),
    (choice(token_ids=[99999], logprobs={"token_logprobs": [-1.0]}), "the token 99999", "another tokenizer"),
    (choice(token_ids=None), "without `token_ids`", "update vLLM"),
    (choice(prompt_token_ids=[1, 2]), "a prompt of", "add no tokens"),
    (choice(finish_reason="abort"), "ended by 'abort'", "--max-model-len"),
    (counted, "which the server counted as 99", "add no tokens"), (longer, "log-probabilities", "update the server"),
    (emptied, "in another form: KeyError", "update the server"),
    (lambda path, found: [] if path == "/v1/completions" else found, "in another form: TypeError", "update"),
    (slept, "no answer within rollout.timeout: 0.5 s", "rollout.timeout: 1"),
])  # fmt: skip
def test_answers_that_cannot_be_learnt_from(folder, served, answer, found, do):
    server = served()
    server.answer = answer
    sets = [f"rollout.timeout={0.5 if answer is slept else 60}", "grpo.prompts=1"]
    with pytest.raises(UserError) as error:
        metrics(run_with(folder, server, *sets, rows=2, lora={"rank": 4}))
    assert found in error.value.found and do in error.value.do and server.url in error.value.asked


@pytest.mark.parametrize(("path", "status", "with_", "found", "do"), [
    ("/v1/completions", 302, {}, "a redirect to http://elsewhere/", "own address"),
    ("/v1/completions", 500, {}, "HTTP 500: a reason", "server's log"),
    ("/v1/completions", 400, {}, "HTTP 400: a reason", "server's log"),
    ("/v1/load_lora_adapter", 404, {"lora": {}}, "HTTP 404", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ("/collective_rpc", 404, {}, "HTTP 404", "VLLM_SERVER_DEV_MODE=1"),
    ("/v1/models", 401, {}, "HTTP 401: a reason", "server's log"),
    ("/v1/models", 404, {}, "without a model", "without /v1"),
])  # fmt: skip
def test_refusals_of_a_server(folder, served, path, status, with_, found, do):
    server = served()
    server.status = lambda asked: status if asked == path else None
    with pytest.raises(UserError) as error:
        metrics(run_with(folder, server, **with_))
    assert found in error.value.found and do in error.value.do


def test_an_adapter_that_sglang_refuses_ends_the_run(folder, served):
    server = served("sglang")
    server.answer = lambda path, found: {"success": False, "error_message": "x"} if "load_lora" in path else found
    with pytest.raises(NeedsError, match=r"(?s)load_lora_adapter.*--enable-lora"):
        metrics(run_with(folder, server, lora={"rank": 4}))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_may_start_again_between_two_steps(folder, served, kind):
    """It has lost the adapter, and refuses to unload it."""
    server = served(kind)
    server.status = lambda path: 400 if "unload" in path else None
    lines = metrics(run_with(folder, server, "train.steps=2", lora={"rank": 4}))
    assert len([l for l in lines if "loss" in l]) == 2 and any("unload" in path for path in server.paths())


def test_an_adapter_that_is_loaded_and_not_applied_ends_the_run(folder, served):
    server = served()
    server.reply = lambda path, body, plain=server.reply: plain(
        path, {**body, "model": "base"} if "model" in body else body
    )  # type: ignore[method-assign,misc]
    with pytest.raises(NeedsError, match="the base model without the adapter"):
        metrics(run_with(folder, server, lora={"rank": 4}))


def test_a_server_that_is_away_is_named_before_anything_is_written(folder, served, tmp_path):
    server = served()
    server.http.shutdown()
    server.http.server_close()
    config = run_with(folder, server, f"output={tmp_path / 'run'}")
    for work in (lambda: metrics(config), lambda: dry_run(decide(config), None, "optrush train")):
        with pytest.raises(NeedsError, match=r"(?s)rollout.server.*no connection.*start the server"):
            work()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("half", [False, True])
def test_a_connection_that_breaks_off_is_tried_again(folder, served, half):
    """Before the answer begins, or within it."""
    server, left = served(), [2]

    def breaking(path: str, found: Any) -> Any:
        if path == "/v1/completions" and left[0]:
            left[0] -= 1
            if not half:
                raise ConnectionResetError
            return Half(json.dumps(found))
        return found

    server.answer = breaking
    server.http.handle_error = lambda *_: None  # type: ignore[method-assign]
    assert metrics(run_with(folder, server, "train.steps=1", lora={"rank": 4}))
    assert not left[0]


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(("begin", "again", "found"), [
    (OK, b"X", "within rollout.timeout: 0.3 s"),
    (OK + b"Content-Length: 99\r\n\r\n", b"X", "within rollout.timeout: 0.3 s"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0", "within rollout.timeout: 0.3 s"),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "within rollout.timeout: 0.3 s"),
    (OK + b"\r\n", b"X" * 1000, "an answer of more than 5,000 bytes"),
])  # fmt: skip
def test_an_answer_without_end_ends(monkeypatch, begin, again, found):
    monkeypatch.setattr(rollout_server, "MOST_bytes", 5000)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(begin)
                for _ in range(100):
                    connection.sendall(again)
                    time.sleep(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(NeedsError, match=found):
            rollout_server.Client(f"http://127.0.0.1:{listening.getsockname()[1]}", 0.3).call("/x")
        assert time.monotonic() - begun < 1
        thread.join()


@pytest.mark.parametrize("url", [
    "host:8000", "ftp://host", "http://", "http://me:key@host", "http://host:8000/?a=1", "http://host:x",
    "http://host:99999", "http://[1.2]", "http://..:80", "http://host/ü", "http://host/\1", "http://host:8000 /v1",
    "http://[::1",
])  # fmt: skip
def test_what_is_no_address(folder, url):
    with pytest.raises(ConfigError, match=r"(?s)rollout.server.*http://host:8000"):
        grpo_run(folder, sets=[f"rollout.server={url}"])


@pytest.mark.parametrize("key", ["rollout.timeout", "grpo.reward_timeout"])
def test_seconds_that_no_clock_counts_are_refused(folder, key):
    with pytest.raises(ConfigError, match=key):
        grpo_run(folder, sets=["rollout={server: 'http://host:1'}", f"{key}=1e300"])


def test_a_server_where_nothing_is_sampled_is_refused(folder):
    text = f"{{model: {folder / 'untied'}, objective: sft, data: {{path: {folder / 'sums.jsonl'}}}, output: x}}"
    with pytest.raises(ConfigError, match="no answers are sampled there"):
        decide(parse_config(text, "x", ("rollout.server=http://host:1",)))


def test_a_plan_has_no_cache_of_what_another_program_samples(folder):
    config = grpo_run(folder, packing={}, sets=["rollout.server=http://host:1"])
    assert not any(line.name.startswith("rollout") for line in predict(config, "h200").lines)
