"""Choose a run's techniques by measuring: the plan's best settings, each proved against the plain baseline and timed.

CONFIG -> the search of `optrush plan`, with a fixed training result -> rungs: the plain baseline, the current
configuration, the settings -> `runner.run_rungs`, fresh processes and interleaved repeats within a budget -> the
fastest proved setting, or the current configuration.

A ladder has one rung per technique and measures all of them equally. Here rungs are whole settings: one that is wrong,
runs out of memory or is slow is not measured again, and the remaining time goes to those near the fastest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from optrush.benchmark import ladder, record, runner
from optrush.benchmark.ladder import Ladder, LadderEntry, Rung
from optrush.benchmark.record import RUNGS, Record
from optrush.benchmark.results import BenchState, faster
from optrush.benchmark.runner import ProgressBoard
from optrush.config import Config, dump_config, parse_config
from optrush.console import duration, say
from optrush.decide import changed, decide, refuse_sampled, spelled_out, with_rate, with_setting
from optrush.errors import ConfigError, RunError, UserError, one_line
from optrush.files import parse_json, read_file, read_text, refuse_links, write_whole
from optrush.planner import search
from optrush.report.page import Series, curves, png
from optrush.technique import Numerics, Part, instantiate
from optrush.techniques import ALL

BASELINE, AS_IT_IS = "plain baseline", "as it is"
BEST = 5  # settings from the plan
REPEATS, WARMUP, FEWEST, MOST = 3, 3, 4, 40  # processes per setting; warm-up steps, fewest and most timed steps in each
MEASURED_S = 60.0  # seconds of timed steps in all processes together
NEAR = 0.9  # share of the fastest speed so far below which a setting is not measured again
PROCESS_S, COMPILE_S = 12.0, 45.0  # seconds of a process besides its steps, and of compiling; assumed first estimates
LATE = "not measured: it would exceed the budget"
DROPOUT = "dropout"  # an option of techniques that choose the trained parameters
DRAWING = frozenset(c.name for c in ALL if c.draws)
PLAN = "tune.json"  # the rungs, kept for a resumed tuning
MARK = "# optrush tune: "  # first line of a tuning's file, which a tuning may overwrite

_Given = tuple[str, str | None, int, Config]  # name, reference rung, ranks, configuration


class TuneState(BenchState):
    """The rungs of a tuning with a shared budget in seconds, which includes an earlier tuning's results."""

    budget_s: float = 600.0
    leaves_out: ClassVar[bool] = False

    @property
    def asked(self) -> str:
        return f"the records in {self.out}"

    @property
    def again(self) -> str:
        return "run the same command to continue"

    def required(self, rung: Rung) -> bool:
        return False  # another setting can still run

    @property
    def spent_s(self) -> float:
        return sum(float(r.get("seconds", 0.0)) for results in self.results.values() for r in results)

    def missing(self) -> list[tuple[int, Rung]]:
        """Return the useful measurements within the budget; the configuration's first is always included."""
        left, spent, order = [], self.spent_s, super().missing()
        names = self._near() if any(n for n, _ in order) else set()
        for n, rung in order:
            if n and (rung.name == BASELINE or rung.name not in names):
                continue
            then = spent + self.expected_s(rung)
            if then <= self.budget_s or (n == 0 and rung.name in (BASELINE, AS_IT_IS)):
                left.append((n, rung))
                spent = then  # later ones may use the time of one that does not fit
        return left

    def _near(self) -> set[str]:
        """Return the rungs that can be the fastest, and the current configuration."""
        measured = {r.rung: r for r in self.records()}
        speeds = {name: r.tokens_per_s for name, r in measured.items() if r.tokens_per_s and not wrong_or_failed(r)}
        best = max((v for name, v in speeds.items() if name != BASELINE), default=0.0)
        untried = {rung.name for rung in self.rungs if rung.name not in measured}
        return {name for name, v in speeds.items() if v >= NEAR * best} | untried | {AS_IT_IS}

    def expected_s(self, rung: Rung) -> float:
        """Return the seconds of a rung's process, from earlier ones, else from the plan."""
        took = [float(r["seconds"]) for r in self.results.get(rung.name, []) if "seconds" in r]
        if took:
            return took[-1]
        steps = (rung.config.train.steps or 0) + self.ladder.proof.steps + 1
        rate = self.plan(rung)["predicted_tokens_per_s"]
        compiles = any(Part.COMPILED in c.claims for c in ALL if c.name in rung.config.with_)
        return PROCESS_S + COMPILE_S * compiles + (steps * rung.config.batch.tokens / rate if rate else 0.0)


@dataclass(frozen=True)
class Tried:
    """A setting with its plan, measurement and outcome."""

    name: str
    changes: str  # from the current configuration
    config: Config
    planned_tokens_per_s: float | None
    planned_peak_bytes: int | None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    ratio: float | None = None  # to the current configuration
    outcome: str = "not measured"


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning."""

    config: Config  # to train with
    winner: str
    ratio: float | None  # of the winner to the current configuration; None: that has no figure
    proof: Mapping[str, Any] | None  # of the winner, against the plain baseline
    spent_s: float
    tried: tuple[Tried, ...]
    out: Path
    planned_s: float  # of the remaining measurements
    notes: tuple[str, ...]

    @property
    def pays_back_s(self) -> float | None:
        """Return the seconds of training after which the winner has saved the tuning's time; None: never."""
        return None if self.ratio is None or self.ratio <= 1 else self.spent_s / (self.ratio - 1)

    def sentence(self) -> str:
        """Return the result in one line."""
        spent = f"{duration(self.spent_s)} spent"
        if late := sum(t.outcome == LATE for t in self.tried):
            spent += f", {late} setting{'s' * (late > 1)} not measured: out of time"
        if self.winner == AS_IT_IS:
            return f"the configuration stays unchanged: nothing measured is faster beyond the spread, {spent}"
        same = "the same losses"
        if self.proof is None:
            same = "nothing else to prove it against"
        elif self.proof.get("cosine") is not None:
            same = "the same gradients"
        if self.ratio is None or self.pays_back_s is None:
            return f"`{self.winner}` runs, the original configuration does not, {same}, {spent}"
        paid = f"pays back after {duration(self.pays_back_s)}"
        return f"{self.ratio:.2f}x of the original configuration, {same}, {spent}, {paid}"


def tune_config(
    config: Config, out: Path, board: ProgressBoard, *, budget_s: float = 600.0, ranks: int = 1, dry: bool = False,
    command: str = "optrush.tune",
) -> Tuned:  # fmt: skip
    """Measure the plan's best settings of a configuration and write the fastest proved one to `out`.

    Args:
        budget_s: seconds of all processes together, including those of a resumed tuning.
        dry: only plan; nothing is measured or written.

    Raises:
        UserError: the configuration, the budget or a file must be changed; nothing was measured.
        RunError: neither the configuration nor any setting ran.
    """
    folder = check_out(out)
    given, notes = _as_it_is(config, ranks)
    rungs = _stored(folder, given, ranks)
    resume = rungs is not None
    if rungs is None:
        rungs, dropped = plan_rungs(given, ranks)
        notes += dropped
    state = TuneState(
        _ladder(rungs), rungs, folder, REPEATS, max(60.0, budget_s / 3), command, record.source(), record.machine(),
        exact_limit=True, rehearses=True, predict=runner.predict_rung,
    )  # fmt: skip
    state.budget_s = budget_s
    if dry:
        return _result(state, given, out, notes)
    if not resume:
        _refuse_folder(folder)
        (folder / RUNGS).mkdir(parents=True, exist_ok=True)
        stored = [{"name": r.name, "since": r.since, "ranks": r.ranks, "config": dump_config(r.config)} for r in rungs]
        text = {"config": dump_config(given), "ranks": ranks, "rungs": stored}
        write_whole(folder / PLAN, json.dumps(text, indent=1))
    runner.run_rungs(state, board, resume=True)
    tuned = _result(state, given, out, notes)
    launch = f"optrush train {out}" + (f" --ranks {ranks}" if ranks > 1 else "")
    write_whole(out, f"{MARK}{tuned.sentence()}\n# {launch}\n{dump_config(with_rate(tuned.config))}")
    return tuned


def check_out(out: Path) -> Path:
    """Return the folder for the records of a tuning that writes `out`.

    Raises:
        ConfigError: `out` cannot be written, or is not a tuning's file.
    """
    asked = f"--out {out}"
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(asked, "not a configuration's name", "use a name that ends in .yaml")
    if out.exists() and not read_text(out, "utf-8", "replace").startswith(MARK):
        raise ConfigError(asked, "a file not written by optrush tune", "use another name")
    if not out.absolute().parent.is_dir():
        raise ConfigError(asked, f"no folder {out.parent}", "create it, or use another")
    return out.with_suffix("")


def _as_it_is(config: Config, ranks: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration of `optrush train`, with its method as techniques."""
    decided = decide(config, ranks=ranks)
    planned = spelled_out(decided.config)
    owners = {c.name for c in ALL if Part.MICRO_BATCH in c.claims}
    kept = {name: options for name, options in planned.with_.items() if name not in owners}
    return changed(planned, {"with": kept}), tuple(decided.lines())


def _refuse_folder(folder: Path) -> None:
    """Raise ConfigError for a folder with more files than an immediately killed tuning leaves."""
    begun = (folder / RUNGS, folder / f"{PLAN}.tmp")
    if folder.exists() and (not folder.is_dir() or any(path not in begun for path in folder.iterdir())):
        found = f"{folder} exists without tuning records"
        raise ConfigError("a folder for the records", found, "delete it, or use another --out")


def _stored(folder: Path, config: Config, ranks: int) -> list[Rung] | None:
    """Return the rungs of an earlier tuning of the same configuration; None: no earlier tuning.

    Raises:
        ConfigError: the earlier configuration differs, or its file is damaged.
    """
    if not (folder / PLAN).is_file():
        return None
    try:
        saved = parse_json(read_file(folder / PLAN))
        same = (saved["config"], saved["ranks"]) == (dump_config(config), ranks)
        rungs = [(r["name"], r["since"], r["ranks"], parse_config(r["config"], PLAN, own=True)) for r in saved["rungs"]]
    except (ValueError, KeyError, TypeError, UserError):
        raise _unfit(folder, f"{PLAN} is damaged") from None
    if not same:
        raise _unfit(folder, "they belong to another configuration")
    return _rungs(rungs)


def _unfit(folder: Path, found: str) -> ConfigError:
    return ConfigError(f"the records in {folder}", found, "delete that folder, or use another --out")


# --- the measured settings


def kept_techniques(config: Config) -> dict[str, dict[str, Any]]:
    """Return the techniques that change the training result: different maths, or different trained weights."""
    names = [t.name for t in instantiate(ALL, config.with_) if t.numerics is Numerics.DIFFERENT_MATHS]
    return {name: dict(config.with_[name]) for name in names}


def plan_rungs(config: Config, ranks: int = 1) -> tuple[list[Rung], tuple[str, ...]]:
    """Return the plain baseline, the configuration and the plan's best settings as rungs, and notes on omissions.

    The search can change the micro-batch and all techniques that keep the training result.
    """
    refuse_sampled(config, "`optrush tune`")
    kept = kept_techniques(config)
    searched = search.search(
        config, keep_maths=True, best=BEST, ranks=ranks, whole=False, here=True, rough=True, keep=kept
    )
    current = _setting(config)
    settings = [candidate for s in searched.settings if _setting(candidate := with_setting(config, s)) != current]
    slowest = max((s.prediction.step_s or 0.0 for s in searched.settings), default=0.0)
    share_s = MEASURED_S / (REPEATS * (len(settings) + 1))
    steps = min(MOST, max(FEWEST, round(share_s / slowest))) if slowest else FEWEST
    rungs: list[_Given] = [(f"setting {n}", AS_IT_IS, ranks, _timed(s, steps)) for n, s in enumerate(settings, 1)]
    plain = changed(config, {"with": kept, "batch.micro_tokens": config.batch.seq})
    if ranks == 1 and _setting(plain) == current:
        return _rungs([(AS_IT_IS, None, ranks, _timed(config, steps)), *rungs]), ()
    if (reason := _obstacle(plain)) is not None:
        note = f"without the plain baseline ({reason}): compared with the configuration itself"
        return _rungs([(AS_IT_IS, None, ranks, _timed(config, steps)), *rungs]), (note,)
    first: list[_Given] = [(BASELINE, None, 1, _timed(plain, 1)), (AS_IT_IS, BASELINE, ranks, _timed(config, steps))]
    return _rungs([*first, *rungs]), ()


def _setting(config: Config) -> tuple[Any, int | str]:
    """Return the differences of two settings: techniques and micro-batch."""
    return config.with_, config.batch.micro_tokens or config.batch.seq


def _obstacle(plain: Config) -> str | None:
    """Return why the plain baseline cannot be measured here."""
    try:
        decide(plain, ranks=1)
        return None if search.predict(plain, ranks=1).fits else "the plan says it does not fit"
    except UserError as error:
        return f"{error.asked}: {error.found}"


def _timed(config: Config, steps: int) -> Config:
    """Return the configuration of the timed steps, without random values, which differ between layouts of rows."""
    kept = {name: o for name, o in config.with_.items() if name not in DRAWING}
    with_ = {name: {k: 0.0 if k == DROPOUT else v for k, v in o.items()} for name, o in kept.items()}
    length = {"train.steps": WARMUP + steps, "train.epochs": 1.0, "train.log_every": 1}
    return changed(config, {**length, "with": with_})


def _rungs(given: Sequence[_Given]) -> list[Rung]:
    by_name = {name: config for name, _, _, config in given}
    rungs = []
    for name, since, ranks, config in given:
        changes = "the baseline" if since is None else ladder.differences(by_name[since], config)
        rungs.append(Rung(name, "cumulative", since, config, changes, ladder.case_of(config), ranks))
    return rungs


def _ladder(rungs: list[Rung]) -> Ladder:
    entries = [LadderEntry(name=r.name) for r in rungs]
    title = "The configuration and the plan's best settings"
    return Ladder(title=title, warmup=WARMUP, all_but_one=False, rungs=entries, name="tune", where="CONFIG")


# --- the choice


def wrong_or_failed(r: Record) -> str | None:
    """Return why a rung is rejected at any speed: it failed, or learns differently."""
    if r.error:
        return one_line(r.error)
    return next((reason for reason in r.red if reason.startswith("wrong")), None)


def _unproved(state: TuneState, rung: Rung) -> str | None:
    """Return why a finished rung is not proved; None: it is proved, or is the reference."""
    note = state.proofs(rung)[0].get("note")
    return None if state.baseline(rung) is rung else note


def _result(state: TuneState, given: Config, out: Path, notes: tuple[str, ...]) -> Tuned:
    """Return the choice, with the outcome of each setting."""
    records = {r.rung: r for r in state.records()}
    figures = {rung.name: state.figures(rung) for rung in state.rungs}
    current, usable, tried = figures[AS_IT_IS], dict[str, float](), []
    own_wrong = wrong_or_failed(records[AS_IT_IS]) if AS_IT_IS in records else None
    for rung in state.rungs:
        plan, r, f = state.plan(rung), records.get(rung.name), figures[rung.name]
        outcome, ratio = LATE if state.results else "planned", None
        if r is not None and (reason := wrong_or_failed(r)):
            outcome = f"refused: {reason}"
        elif r is not None and f is not None:
            ratio = None if current is None else f.tokens_per_s / current.tokens_per_s
            outcome = "measured"
            if rung.name not in (BASELINE, AS_IT_IS):
                if reason := _unproved(state, rung):
                    outcome = f"refused: {reason}"
                elif current is None or own_wrong or faster(f, current):
                    usable[rung.name], outcome = f.tokens_per_s, "faster"
                else:
                    outcome = f"refused: slower, {ratio:.2f}x" if faster(current, f) else "within the spread"
        planned = plan["predicted_tokens_per_s"], plan["predicted_peak_bytes"]
        measured = (None, None) if r is None else (r.tokens_per_s, r.peak_bytes)
        tried.append(Tried(rung.name, rung.changes, with_rung(given, rung), *planned, *measured, ratio, outcome))
    winner = max(usable, key=lambda name: usable[name], default=AS_IT_IS)
    if records and winner == AS_IT_IS and (current is None or own_wrong):
        found = "; ".join(f"{t.name}: {t.outcome}" for t in tried)
        raise RunError("optrush tune", found, "fix the configuration first: optrush train CONFIG --dry-run")
    proof = records[winner].proof if winner in records else None
    ratio = next(t.ratio for t in tried if t.name == winner)
    config = next(t.config for t in tried if t.name == winner)
    ratio = None if own_wrong else ratio
    left_s = sum(state.expected_s(rung) for _, rung in state.missing())
    return Tuned(config, winner, ratio, proof, state.spent_s, tuple(tried), out, left_s, notes)


def with_rung(given: Config, rung: Rung) -> Config:
    """Return the configuration with only a rung's techniques and micro-batch changed."""
    with_ = {name: dict(options) for name, options in rung.config.with_.items()}
    for name, options in given.with_.items():
        if name in DRAWING:
            with_[name] = dict(options)
        elif DROPOUT in options:
            with_[name][DROPOUT] = options[DROPOUT]
    return changed(given, {"with": with_, "batch.micro_tokens": rung.config.batch.micro_tokens})


# --- the batch by the gradient noise scale, and the learning rate by a race

RATES = tuple(2.0**k for k in range(-4, 4))  # multiples of `optim.lr`; their number is a power of two
DRAWN = 8  # micro-batches per step for the noise measurement
ALONE = (Part.UPDATE, Part.CAPTURE, Part.DATA)  # their owners leave no gradients of single micro-batches on one rank


def tune_number(config: Config, out: Path, kind: Literal["batch", "lr"], budget_s: float) -> tuple[str, dict[str, Any]]:
    """Measure the batch or the learning rate of a configuration, and write the changed configuration to `out`.

    Args:
        budget_s: seconds.

    Returns:
        The result as a sentence, and as values. Its curves are in the folder named like `out`.

    Raises:
        UserError: the configuration or a file must be changed.
        RunError: the process failed, or the steps are too few for a result.
    """
    folder = check_out(out)
    if kind == "lr" and config.data.eval is None:
        raise ConfigError("--lr", "no `data.eval`: rates compete for the lowest held-out loss", "add data.eval: 0.1")
    given, _ = _as_it_is(config, 1)
    given = decide(given).config  # with its method's rate
    states, written = folder / "states", (f"{kind}.json", f"{kind}.png")
    ours = {*written, states.name, runner.LOCK}
    request = trial_request(given, kind) | {"states": str(states.absolute()), "budget_s": budget_s}
    what = "the gradient noise scale"
    if kind == "lr":
        what = f"{len(RATES)} learning rates, {request['rates'][0]:.3g} to {request['rates'][-1]:.3g}"
    refuse_links(folder, f"the records in {folder}", ours)
    if folder.exists() and (
        not folder.is_dir() or {p.name for p in folder.iterdir()} - {*written, states.name, runner.LOCK}
    ):
        found = f"{folder} exists and has other files"
        raise ConfigError("a folder for the records", found, "delete it, or use another --out")
    folder.mkdir(exist_ok=True)
    with runner.lock_folder(folder, f"the records in {folder}"):
        shutil.rmtree(states, ignore_errors=True)  # left by a killed process
        say(f"measuring {what}: at most {duration(budget_s)} plus loading")
        try:
            result = _run_trial(request, kind, budget_s)
        finally:
            shutil.rmtree(states, ignore_errors=True)
        sentence, changes, series, unit = (_batch if kind == "batch" else _rate)(given, result)
        write_whole(folder / written[0], json.dumps(result, indent=1))
        write_whole(folder / written[1], png(curves(series, title=out.stem, axis="step", unit=unit, height=300)))
        write_whole(out, f"{MARK}{sentence}\n# optrush train {out}\n{dump_config(changed(given, changes))}")
    return sentence, {**result, "sentence": sentence, "out": str(out)}


def trial_request(given: Config, kind: Literal["batch", "lr"]) -> dict[str, Any]:
    """Return the request of a process: a run on one rank without evaluations and checkpoints, and the rates."""
    alone = {t.name for t in instantiate(ALL, given.with_) if t.claims & set(ALONE)}
    quiet = {"eval_every": 1e9, "save_every": None, "stop_after": None, "log_every": 100}
    kept = {name: options for name, options in given.with_.items() if name not in alone}
    run = changed(given, {"with": kept, **{f"train.{key}": value for key, value in quiet.items()}})
    if kind == "batch":
        rows = max(1, given.batch.tokens // given.batch.seq // DRAWN)
        tokens = rows * given.batch.seq
        run = changed(run, {"batch.micro_tokens": tokens, "batch.tokens": DRAWN * tokens})
    return {"kind": kind, "run": dump_config(run), "rates": [given.optim.lr * factor for factor in RATES]}


def _run_trial(request: dict[str, Any], kind: str, budget_s: float) -> dict[str, Any]:
    with runner.stop_on_signals():
        result = runner.run_worker(request, 2 * budget_s + 120, module="optrush.benchmark.trial")
    if "refused" in result:
        raise ConfigError(*result["refused"])
    if "error" in result:
        raise RunError(f"optrush tune --{kind}", one_line(result["error"]), "optrush train CONFIG --dry-run")
    return result


Chosen = tuple[str, dict[str, Any], list[Series], str]  # a sentence, changes of the configuration, curves, their unit


def _batch(config: Config, result: Mapping[str, Any]) -> Chosen:
    if result["squared"] <= 0 or result["noise"] <= 0:
        found = f"after {len(result['running'])} steps the gradient cannot be separated from its noise"
        raise RunError("the gradient noise scale", found, "raise --budget")
    slots = result["noise"] / result["squared"] * result["slots_per_term"]
    micro = config.batch.micro_tokens
    least = micro if isinstance(micro, int) else config.batch.seq
    tokens = max(1, round(slots / least)) * least
    sentence = (
        f"the gradient noise scale is {slots:,.0f} tokens: batch.tokens: {tokens} (it was {config.batch.tokens}); "
        "then race the learning rate for it: optrush tune --lr"
    )
    return sentence, {"batch.tokens": tokens}, [Series("noise scale", result["running"])], "tokens"


SURE = 8  # steps to the first stop of a race; with 4, one of four races chose a rate with 4 % more loss (docs/tune.md)


def _rate(config: Config, result: Mapping[str, Any]) -> Chosen:
    """Return the best learning rate of a race; raise RunError if no rate has a finite held-out loss."""
    legs, steps = result["legs"], result["steps"]
    best, rates = legs[-1], sorted({leg["rate"] for leg in legs})
    if best["loss"] is None:
        raise RunError("a race of learning rates", "no rate has a finite held-out loss", "lower optim.lr")
    sentence = (
        f"optim.lr: {best['rate']:.3g} (it was {config.optim.lr:.3g}), held-out loss {best['loss']:.4f} after "
        f"{best['step']} steps of {steps}"
    )
    if best["rate"] in (rates[0], rates[-1]):
        sentence += "; the best is at the edge of the range: run it again from there"
    if (first := min(leg["step"] for leg in legs)) < SURE:
        sentence += f"; the first rates were dropped after {first} steps: a larger --budget is more reliable"
    points = {rate: [(leg["step"], leg["loss"]) for leg in legs if leg["rate"] == rate] for rate in rates}
    series = [Series(f"{rate:.3g}", sorted(points[rate])) for rate in rates]
    return sentence, {"optim.lr": best["rate"]}, series, "held-out loss"
