#!/usr/bin/env python
"""Trains nano, a small DeepSeek-V4, on text that nano_text.py makes, and writes a checkpoint.

The model is transformers' (nano_model.py), in float32 with TF32 products. See --help.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import nano_card
import nano_eval
import nano_model
import nano_text
import torch
from nano_chat import BEGIN, END
from nano_trainer import LONG_FROM, LONG_ROW, SELECT_FROM, SHORT_ROW, WHOLE, Batches, Plan, Trainer
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import DeepseekV4ForCausalLM
from transformers.utils import logging

_DESCRIPTION = """\
Trains nano and writes a Hugging Face checkpoint: config.json, model.safetensors (BF16; float32
where transformers keeps it), tokenizer, generation_config.json, README.md and training.json. Where
matplotlib is installed, --plot adds training.png; `scripts/nano_card.py OUT` draws it afterwards.

The run ends by itself within --minutes, final evaluation included. Its state is kept in
--checkpoint; --resume goes on from there.
"""
_EXAMPLES = """\
examples:
  scripts/train_nano.py --out /tmp/nano --minutes 9.5         on a GPU
  scripts/train_nano.py --out /tmp/nano --profile-steps 5     measure, and say how many steps fit
  scripts/train_nano.py --out /tmp/nano --smoke               a minute on a CPU: nothing is learnt
"""

LOG_EVERY = 20

# A step: its row length, the text's loss, the indexers' loss, the gradient's norm.
Done = tuple[int, Tensor, Tensor, Tensor]


@dataclass
class Log:
    """What training.json holds."""

    plan: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    seconds_trained: float = 0.0
    tokens_trained: int = 0


def main() -> int:
    started = time.monotonic()
    arguments = _arguments()
    logging.set_verbosity_error()  # It warns of a YaRN factor that the release has, too.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    tokenizer = nano_text.train_tokenizer()
    counts = nano_eval.Counts()
    if arguments.smoke:
        counts = nano_eval.Counts(facts=4, needles=1, chats=1, recitations=1, recited_tokens=12)
    run = Run(arguments, started, device, tokenizer, counts)
    if arguments.profile_steps:
        run.profile(arguments.profile_steps)
        return 0
    run.train()
    run.finish()
    return 0


class Run:
    """One call of the script: its clock, its log and its files."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        started: float,
        device: torch.device,
        tokenizer: Tokenizer,
        counts: nano_eval.Counts,
    ) -> None:
        self.arguments, self.started, self.device = arguments, started, device
        self.tokenizer, self.counts = tokenizer, counts
        self.sets = nano_eval.question_sets(counts)
        self.log = Log(machine=_machine(device))
        self.first_step = 0
        saved: dict[str, Any] | None = None
        if arguments.resume:
            saved = torch.load(arguments.checkpoint, map_location="cpu", weights_only=True)
        steps = saved["plan"]["steps"] if saved else arguments.steps or 1_000_000
        plan = Plan(
            arguments.seed,
            steps,
            arguments.tokens_per_step,
            arguments.rate,
            muon=not arguments.adamw,
        )
        captures = device.type == "cuda" and not arguments.eager
        self.trainer = Trainer(plan, tokenizer.get_vocab_size(), device, captures)
        if saved:
            self._restore(saved)
        elif not arguments.steps and not arguments.profile_steps:
            seconds = self.mean_seconds(3)
            fits = int(self.seconds_left() / seconds)
            _say(f"{seconds * 1e3:.0f} ms a step: planning {fits} steps")
            self.trainer.plan = replace(plan, steps=fits)
        self.log.plan = asdict(self.plan)

    @property
    def plan(self) -> Plan:
        return self.trainer.plan

    def seconds_left(self) -> float:
        """For training: what the final evaluation and the files need is taken off."""
        elapsed = time.monotonic() - self.started
        return 60 * self.arguments.minutes - self.arguments.reserve - elapsed

    # ---- measuring ----

    def _batch(self, step: int, length: int) -> tuple[Tensor, Tensor]:
        rows = self.plan.rows(length)
        ids, weights = nano_text.batch(self.plan.seed, step, self.tokenizer, length, rows)
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(weights).to(self.device)

    def _seconds(self, length: int, entries: int, count: int) -> float:
        """Of a step at this length, at rate 0. The first one, which compiles, does not count."""
        nano_model.select(self.trainer.model, entries)
        ids, weights = self._batch(0, length)
        begun = 0.0
        for i in range(count + 2):
            if i == 2:
                _synchronize(self.device)
                begun = time.monotonic()
            self.trainer.step(ids, weights, 0.0)
        _synchronize(self.device)
        return (time.monotonic() - begun) / count

    def mean_seconds(self, count: int) -> float:
        """Of a step in the whole run."""
        first = self._seconds(SHORT_ROW, nano_model.ALL_ENTRIES, count)
        long = self._seconds(LONG_ROW, nano_model.ALL_ENTRIES, count)
        selecting = [
            self._seconds(length, nano_model.INDEX_TOPK, count) for length in (SHORT_ROW, LONG_ROW)
        ]
        self.trainer.forget()
        mean = LONG_FROM * first + (SELECT_FROM - LONG_FROM) * (first + long) / 2
        return 1.03 * (mean + (1 - SELECT_FROM) * sum(selecting) / 2)

    def profile(self, count: int) -> None:
        for entries, name in ((nano_model.ALL_ENTRIES, "all"), (nano_model.INDEX_TOPK, "top-k")):
            for length in (SHORT_ROW, LONG_ROW):
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                begun = time.monotonic()
                seconds = self._seconds(length, entries, count)
                rest = time.monotonic() - begun - count * seconds
                tokens = self.plan.rows(length) * length
                peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
                _say(
                    f"{name:>6} entries, {self.plan.rows(length):4} rows of {length:4}:"
                    f" {seconds * 1e3:8.1f} ms, {tokens / seconds:10,.0f} tokens/s,"
                    f" {peak / 2**30:5.1f} GiB, compiled in {rest:.0f} s"
                )
        begun = time.monotonic()
        for step in range(4):
            self._batch(step, LONG_ROW if step % 2 else SHORT_ROW)
        making = (time.monotonic() - begun) / 4
        _say(f"making a batch of text: {making * 1e3:.0f} ms in one process")
        fits = (60 * self.arguments.minutes - self.arguments.reserve) / self.mean_seconds(count)
        _say(f"in {self.arguments.minutes} minutes about {fits:.0f} steps fit")

    # ---- training ----

    def train(self) -> None:
        _say(f"{self.plan.steps} steps of {self.plan.tokens} tokens on {self.device}")
        loader = DataLoader(
            Batches(self.plan, self.tokenizer),
            batch_size=None,
            sampler=range(self.first_step, self.plan.steps),
            num_workers=self.arguments.workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=8 if self.arguments.workers else None,
        )
        whole, begun = self.seconds_left(), time.monotonic()
        evaluated = saved = begun
        waiting: list[Done] = []
        bar = tqdm(self._within_time(loader), initial=self.first_step, total=self.plan.steps)
        step = self.first_step
        for ids, weights in bar:
            clock = self.first_step / self.plan.steps
            clock += (1 - clock) * (time.monotonic() - begun) / whole
            progress = min(1.0, max(step / self.plan.steps, clock))
            ids = ids.to(self.device, non_blocking=True)
            weights = weights.to(self.device, non_blocking=True)
            selects = progress >= SELECT_FROM
            entries = nano_model.INDEX_TOPK if selects else nano_model.ALL_ENTRIES
            nano_model.select(self.trainer.model, entries)
            nano_model.narrow(self.trainer.model, self.plan.window(step))
            done = self.trainer.step(ids, weights, self.plan.rate(progress))
            waiting.append((ids.shape[1], *done))
            step += 1
            self.log.tokens_trained += ids.numel()
            if step % LOG_EVERY == 0 or step == self.plan.steps:
                bar.set_postfix_str(self._note(step, progress, waiting, begun))
                waiting = []
            if time.monotonic() - evaluated > self.arguments.evaluate_every:
                self._evaluate(step)
                evaluated = time.monotonic()
            if time.monotonic() - saved > self.arguments.save_every:
                self._save_state(step)
                saved = time.monotonic()
        self.log.seconds_trained += time.monotonic() - begun
        self._save_state(step)

    def _within_time(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in loader:
            if self.seconds_left() < 0:
                return
            yield batch

    def _note(self, step: int, progress: float, waiting: list[Done], begun: float) -> str:
        """Logs the last steps, one loss for each length. Waits for the device."""
        entry: dict[str, float] = {"step": step, "progress": round(progress, 4)}
        for length in sorted({item[0] for item in waiting}):
            losses = [float(item[1]) for item in waiting if item[0] == length]
            entry[f"loss_{length}"] = round(sum(losses) / len(losses), 5)
        entry["index_loss"] = round(float(torch.stack([item[2] for item in waiting]).mean()), 5)
        entry["gradient_norm"] = round(float(torch.stack([item[3] for item in waiting]).mean()), 4)
        entry["busiest_expert"] = round(self.trainer.balance.worst(), 3)
        seconds = time.monotonic() - begun
        entry["seconds"] = round(self.log.seconds_trained + seconds, 2)
        entry["tokens_per_second"] = round((step - self.first_step) * self.plan.tokens / seconds)
        self.log.steps.append(entry)
        if not math.isfinite(sum(entry.values())):
            raise RuntimeError(f"training diverged at step {step}: {entry}. Lower --rate.")
        shown = ("loss_512", "loss_2048", "index_loss", "tokens_per_second")
        return ", ".join(f"{name} {entry[name]:.4g}" for name in shown if name in entry)

    def _evaluate(self, step: int) -> None:
        nano_model.select(self.trainer.model, nano_model.INDEX_TOPK)
        nano_model.narrow(self.trainer.model, WHOLE)
        found = nano_eval.scored(self.trainer.model, self.tokenizer, self.sets)
        shown = ", ".join(f"{name} {share:.3f}" for name, share in found.items())
        tqdm.write(f"step {step}: {shown}", file=sys.stderr)
        self.log.evaluations.append({"step": step, **found})

    # ---- files ----

    def _save_state(self, step: int) -> None:
        path: Path = self.arguments.checkpoint
        state = {
            "plan": asdict(self.plan),
            "step": step,
            "model": self.trainer.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "log": asdict(self.log),
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def _restore(self, saved: dict[str, Any]) -> None:
        if saved["plan"] != asdict(self.plan):
            raise ValueError(
                f"{self.arguments.checkpoint} was made with {saved['plan']}, and this run has"
                f" {asdict(self.plan)}: use the same options, or leave --resume out"
            )
        self.trainer.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.trainer.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.log = Log(**(saved["log"] | {"machine": self.log.machine}))
        self.first_step = saved["step"]

    def finish(self) -> None:
        """Writes the checkpoint, and evaluates what was written, not what was trained."""
        out: Path = self.arguments.out
        self._evaluate(len(self.log.steps) and int(self.log.steps[-1]["step"]))
        write_checkpoint(self.trainer.model, self.tokenizer, out)
        self.trainer.optimizers.clear()
        torch.set_float32_matmul_precision("highest")
        shipped = DeepseekV4ForCausalLM.from_pretrained(out, dtype=torch.float32).to(self.device)
        nano_model.score_on_fp4_grid(shipped)
        nano_model.use_exact_parts(shipped)
        self.log.final = nano_eval.generated(shipped, self.tokenizer, self.sets, self.counts)
        self.log.final["seconds_in_all"] = round(time.monotonic() - self.started, 1)
        (out / "training.json").write_text(json.dumps(asdict(self.log), indent=1) + "\n")
        nano_card.write(out, asdict(self.log), shipped, self.tokenizer)
        if self.arguments.plot and not nano_card.plot(out / "training.png", asdict(self.log)):
            _say("matplotlib is not installed: no training.png")
        _say(json.dumps(self.log.final, indent=1))


def write_checkpoint(model: DeepseekV4ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """BF16 weights as transformers saves them; what it keeps in float32 stays so."""
    plain = DeepseekV4ForCausalLM(nano_model.config(tokenizer.get_vocab_size()))
    plain.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    with tempfile.TemporaryDirectory() as whole:
        plain.save_pretrained(whole)
        DeepseekV4ForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # It comes out readable by its owner alone.
    tokenizer.save(str(out / "tokenizer.json"))
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0}
    files: dict[str, dict[str, Any]] = {
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1} | sampling,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": END,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": plain.config.max_position_embeddings,
        },
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (out / name).write_text(text + "\n", encoding="utf-8")


def _machine(device: torch.device) -> dict[str, Any]:
    import transformers

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _say(text: str) -> None:
    print(text, flush=True)


def _refuse_early(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """What would else be found out at the end of a run."""
    if arguments.resume and not arguments.checkpoint.is_file():
        parser.error(f"--resume: {arguments.checkpoint} is not there: leave it out, or name one")
    for folder in (arguments.out, arguments.checkpoint.parent):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{folder} cannot be made: {error}")
        if not os.access(folder, os.W_OK):
            parser.error(f"{folder} cannot be written to")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (default: 10)")
    parser.add_argument("--steps", type=int, help="(default: as many as --minutes allows)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--tokens-per-step", type=int, default=32768, metavar="N", help="(default: 32768)"
    )
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (0.002)")
    parser.add_argument("--workers", type=int, default=12, help="that make text (default: 12)")
    parser.add_argument(
        "--eager", action="store_true", help="no CUDA graphs: launch kernels one by one"
    )
    parser.add_argument(
        "--adamw", action="store_true", help="no Muon: AdamW for all (default: Muon for matrices)"
    )
    parser.add_argument(
        "--reserve", type=float, default=60.0, help="seconds for the end (default: 60)"
    )
    parser.add_argument("--evaluate-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("build/nano/state.pt"),
        help="state to resume from, 80 MB (default: build/nano/state.pt)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--profile-steps", type=int, default=0, metavar="N", help="measure only")
    parser.add_argument("--plot", action="store_true", help="write training.png, too")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps, for a CPU")
    arguments = parser.parse_args()
    _refuse_early(parser, arguments)
    if arguments.smoke:
        arguments.steps, arguments.tokens_per_step, arguments.workers = 2, 256, 0
        arguments.evaluate_every = arguments.save_every = math.inf
    return arguments


if __name__ == "__main__":
    sys.exit(main())
