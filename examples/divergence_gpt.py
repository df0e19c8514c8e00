#!/usr/bin/env python3
"""A GPT that diverges through its attention kernel alone, and what stops that.

A GPT of 6 layers x 384 with heads of 64, learned positions and no weight decay reads text at a
learning rate of 2e-3 in bf16.  With PyTorch's flash kernels W_Q of one layer starts to drift along
the mean key after some thousand steps.  First its scores' common part outgrows their spread (the
drift ratio), then sigma(W_Q) explodes, thousands of steps later the loss leaves.  An unbiased
delta, or centred keys, keep the same run healthy, and rescue it in flight.

    # It fails: 8,000 steps, about 3 minutes of an H200.  Seeds differ in when, some never fail.
    python examples/divergence_gpt.py --attention sdpa-flash --seed 4

    # The same seed and data with the stabilized attention; or PyTorch's, with centred keys.
    python examples/divergence_gpt.py --attention bellwether-hp --seed 4
    python examples/divergence_gpt.py --attention sdpa-flash --center --seed 4

    # Rescued in flight.
    python examples/divergence_gpt.py --attention bellwether-fa --switch-at 4000 \\
        --switch-to bellwether-hp --seed 4

    # In pieces of 9 minutes: the same command goes on where the last one stopped.
    python examples/divergence_gpt.py --steps 30000 --minutes 9 --checkpoint run.pt

    # With Bellwether watching: the recording tells what a server would have seen.
    python examples/divergence_gpt.py --attention sdpa-flash --seed 4 --record run.bwrun
    bellwether replay run.bwrun

    # Watched live by a server, and from outside by its checkpoints.
    python examples/divergence_gpt.py --server 127.0.0.1:7070 --checkpoints ckpt &
    python -m bellwether scan ckpt --follow --heads 6 --server 127.0.0.1:7070 --run by-checkpoints

    # Repaired by the server, once it was told to: bellwether policy set repaired policy.yml
    python examples/divergence_gpt.py --server 127.0.0.1:7070 --name repaired \\
        --allow attention.center_k,attention.mode,qk.clip

    # Several finished runs in one picture.
    python examples/divergence_gpt.py --compare divergence/*.json --out divergence

Any text does: --text takes files and folders.  Word-level tokens of program sources fail soonest.
Every run writes NAME.json and NAME.png to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import multiprocessing
import os
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_lib" / "python"))
import bellwether
import bellwether._attention.dispatch

SDPA = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
OURS = tuple(f"bellwether-{mode}" for mode in ("fa", "paper", "hp", "hpm"))
WARM_UP_STEPS = 300
# To have them all: W_Q of other heads explodes within so many steps of the first.
STEPS_AFTER_SIGMA = 500
SUFFIXES = {".c", ".h", ".cc", ".cpp", ".cu", ".cuh", ".hpp", ".py", ".pyi", ".rst", ".txt", ".md"}
FILE_BYTES_MAX = 200_000  # Longer ones are tables more often than text.
WATCHED_SEQUENCES = 2
CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "sigma_wq": "sigma(W_Q), worst head",
    "drift_ratio": "drift ratio, worst head",
}


# ---- text to tokens ----

WORD = re.compile(rb"[ \t]*(?:[A-Za-z]+|\d+|_+)|\n[ \t]*|[ \t]+|.", re.DOTALL)
_vocabulary: dict[bytes, int] = {}  # Of the process that encodes.


def read_texts(paths: Sequence[Path], megabytes: float) -> list[bytes]:
    """The files, and those in the folders that look like text, in an order of their own."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise SystemExit(f"--text: there is no {path}")
        if path.is_dir():
            files += (p for p in sorted(path.rglob("*")) if p.suffix in SUFFIXES and p.is_file())
        else:
            files.append(path)
    random.Random(1).shuffle(files)
    texts, left = [], int(megabytes * 1e6)
    for file in files:
        if file not in paths and file.stat().st_size > FILE_BYTES_MAX:
            continue
        raw = file.read_bytes()
        texts.append((lzma.decompress(raw) if file.suffix == ".xz" else raw)[:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def _count(text: bytes) -> Counter[bytes]:
    return Counter(WORD.findall(text))


def _set_vocabulary(vocabulary: dict[bytes, int]) -> None:
    _vocabulary.update(vocabulary)


def _encode(text: bytes) -> np.ndarray:
    ids: list[int] = []
    for word in WORD.findall(text):
        known = _vocabulary.get(word)
        if known is None:
            ids.extend(word)  # Byte by byte: the first 256 tokens.
        else:
            ids.append(known)
    return np.array(ids, dtype=np.uint16)


def tokenize(texts: Sequence[bytes], size: int) -> np.ndarray:
    """Words and signs; the `size` - 256 most frequent have tokens of their own."""
    lines = b"\n".join(texts).splitlines(keepends=True)
    pieces = [b"".join(lines[i : i + 30_000]) for i in range(0, len(lines), 30_000)]
    processes = min(16, os.cpu_count() or 1, len(pieces))
    context = multiprocessing.get_context("fork")
    counts: Counter[bytes] = Counter()
    with context.Pool(processes) as pool:
        for count in pool.imap_unordered(_count, pieces):
            counts.update(count)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    vocabulary = {word: 256 + i for i, word in enumerate(ranked[: size - 256])}
    with context.Pool(processes, _set_vocabulary, (vocabulary,)) as pool:
        return np.concatenate(pool.map(_encode, pieces))


def load_tokens(args: argparse.Namespace) -> Tensor:
    if args.tokens is not None and args.tokens.exists():
        tokens = np.load(args.tokens)
    else:
        tokens = tokenize(read_texts(args.text, args.megabytes), args.vocab)
        if args.tokens is not None:
            np.save(args.tokens, tokens)
    if len(tokens) <= args.context + 1:
        raise SystemExit(f"--text: {len(tokens)} tokens, but must be more than {args.context + 1}")
    return torch.from_numpy(tokens.astype(np.int32))


# ---- the model ----


@dataclasses.dataclass
class How:
    """How attention is computed: one object that all layers look at in every step."""

    attention: str
    center: bool
    watching: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.center:
            k = bellwether.center_keys(k)
        if self.attention in OURS:
            mode = self.attention.removeprefix("bellwether-")
            return bellwether.attention(q, k, v, causal=True, mode=mode)
        with sdpa_kernel(SDPA[self.attention]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, width: int, head_dim: int, how: How) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.head_dim, self.how = head_dim, how
        self.seen: Optional[tuple[Tensor, Tensor]] = None  # q and the keys before any centring.

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(dim=2))
        if self.how.watching:
            self.seen = (q[:WATCHED_SEQUENCES].detach(), k[:WATCHED_SEQUENCES].detach())
        return self.out(self.how.attend(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, head_dim: int, how: How) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, head_dim, how)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace, how: How) -> None:
        super().__init__()
        self.token = nn.Embedding(args.vocab, args.width)
        self.position = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(
            Block(args.width, args.head_dim, how) for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.width, bias=False)
        # In pieces it writes the fp32 logits several times over: a third of a step.
        self.loss = torch.compile(F.cross_entropy) if args.compile_loss else F.cross_entropy
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                scale = math.sqrt(2 * args.layers) if residual else 1
                nn.init.normal_(parameter, 0, 0.02 / scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return self.loss(logits.flatten(0, 1), targets.flatten())


# ---- what is watched ----


@torch.no_grad()
def sigma_of_queries(model: GPT) -> list[float]:
    """Layer by layer the largest singular value of a head's W_Q, over the heads."""
    attentions = [block.attention for block in model.blocks]
    weights = torch.stack(
        [a.qkv.weight.chunk(3)[0].unflatten(0, (-1, a.head_dim)) for a in attentions]
    ).float()
    squares = torch.linalg.eigvalsh(weights @ weights.mT)[..., -1]
    return [float(x) for x in squares.amax(dim=1).sqrt()]


@torch.no_grad()
def drift_ratio(q: Tensor, k: Tensor) -> Tensor:
    """The worst head's size of the scores' mean over a row, in units of their spread around it."""
    q, k = q.float(), k.float()
    n = q.shape[2]
    allowed = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    keys = torch.arange(1, n + 1, device=q.device)
    scores = (q @ k.mT) * q.shape[3] ** -0.5
    mean = scores.masked_fill(~allowed, 0).sum(-1) / keys
    off = (scores - mean[..., None]).masked_fill(~allowed, 0)
    spread = (off.square().sum(-1) / keys).sqrt()
    rows = slice(min(64, n // 2), None)  # The first rows have too few keys to tell.
    ratio = mean[..., rows].abs().mean(dim=(0, 2)) / spread[..., rows].mean(dim=(0, 2))
    return ratio.amax()


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """All curves of one run, or of several the worst layer's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(CURVES), sharex=True, figsize=(10, 12), dpi=110)
    for (name, run), color in zip(runs.items(), (f"C{i % 10}" for i in range(len(runs)))):
        for axis, curve in zip(axes, CURVES):
            values = np.array(run[curve], dtype=float)  # None becomes NaN.
            alone = len(runs) == 1 and values.ndim == 2
            if values.ndim == 2 and not alone:
                values = np.fmax.reduce(values, axis=1)
            labels = [f"layer {i}" for i in range(values.shape[1])] if alone else [name]
            axis.plot(run["steps"], values, label=labels, color=None if alone else color, lw=1)
            for step, how in run["attention"][1:]:
                axis.axvline(step, color=color, ls=":", label=f"{how} from {step}")
            axis.set_ylabel(CURVES[curve])
            if curve != "loss":
                axis.set_yscale("log")
    for axis in axes:
        axis.grid(alpha=0.3)
    for axis in axes[:: len(axes) - 2]:  # The loss's and, with its layers, sigma's.
        axis.legend(fontsize=7)
    axes[-1].set_xlabel("step")
    figure.suptitle(next(iter(runs)) if len(runs) == 1 else f"{len(runs)} runs, worst layer")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def show_progress(state: dict[str, Any], args: argparse.Namespace, how: str, rate: float) -> None:
    run, step = state["run"], state["step"]
    done = 20 * step // args.steps
    left = (args.steps - step) / rate
    line = (
        f"[{'#' * done}{'.' * (20 - done)}] {step}/{args.steps}  {rate:.1f} steps/s  "
        f"{int(left // 60)}:{int(left % 60):02d} left  loss {run['loss'][-1] or math.nan:.3f}  "
        f"sigma(W_Q) {max(run['sigma_wq'][-1]):.1f}  "
        f"drift {max(x or math.nan for x in run['drift_ratio'][-1]):.1f}  {how}"
    )
    print(f"\r{line}\x1b[K" if sys.stdout.isatty() else line, flush=True,
          end="" if sys.stdout.isatty() else "\n")  # fmt: skip


# ---- training ----


def label(attention: str, center: bool) -> str:
    return attention + (" centred" if center else "")


def finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None  # JSON has no NaN.


class Training:
    """One run: its state is what a checkpoint holds, the batches follow from seed and step."""

    # What a checkpoint must share with the run that goes on from it.
    FIXED = ("seed", "layers", "width", "head_dim", "context", "batch", "vocab", "lr")

    def __init__(self, args: argparse.Namespace, tokens: Tensor, device: torch.device) -> None:
        self.args, self.device = args, device
        self.tokens = tokens.to(device)
        self.how = How(args.attention, args.center)
        torch.manual_seed(args.seed)
        self.model = GPT(args, self.how).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.state: dict[str, Any] = {
            "step": 0,
            "run": {"settings": {}, "attention": [], "steps": [], **{c: [] for c in CURVES}},
        }
        self.fixed = {name: getattr(args, name) for name in self.FIXED} | {"tokens": len(tokens)}
        self.exploded: Optional[int] = None  # The step at which --stop-sigma was passed.
        self.monitor = None
        if args.record is not None or args.server is not None:
            # A small model's steps are short: what a sample costs there must not thin it out.
            self.monitor = bellwether.attach(
                self.model, record=str(args.record) if args.record else None, server=args.server,
                run=args.name, every=args.every, overhead_budget=1.0, allow=args.allow,
            )  # fmt: skip

    def load(self, path: Path) -> None:
        saved = torch.load(path, map_location=self.device, weights_only=True)
        for name, value in self.fixed.items():
            if saved["fixed"][name] != value:
                raise SystemExit(
                    f"{path}: {name} is {saved['fixed'][name]} there, but {value} in this command"
                )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state = saved["state"]

    def save(self, path: Path) -> None:
        saved = {
            "fixed": self.fixed, "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(), "state": self.state,
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(saved, partial)
        os.replace(partial, path)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.args.seed * 10**7 + step)
        last = len(self.tokens) - self.args.context - 1
        start = torch.randint(0, last, (self.args.batch, 1), generator=generator)
        offset = torch.arange(self.args.context + 1, device=self.device)
        window = self.tokens[start.to(self.device) + offset].long()
        return window[:, :-1], window[:, 1:]

    def switch(self, step: int) -> None:
        """Computes attention as the options say for this step."""
        args, run = self.args, self.state["run"]
        switched = args.switch_at is not None and step >= args.switch_at
        self.how.attention = args.switch_to if switched else args.attention
        self.how.center = args.center or (switched and args.switch_center)
        now = label(self.how.attention, self.how.center)
        if not run["attention"] or run["attention"][-1][1] != now:
            run["attention"].append([step, now])

    def step(self) -> tuple[Tensor, Tensor]:
        step = self.state["step"]
        self.switch(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * min(1.0, (step + 1) / WARM_UP_STEPS)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(*self.batch(step))
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.monitor is not None:
            self.monitor.step(step, loss=loss, grad_norm=grad_norm)
        self.state["step"] = step + 1
        return loss.detach(), grad_norm

    def watch(self, losses: list[Tensor], grad_norm: Tensor) -> bool:
        """Adds a point to the curves; whether the loss is still finite."""
        run = self.state["run"]
        loss = float(torch.stack(losses).mean())
        run["steps"].append(self.state["step"] - 1)
        run["loss"].append(finite(loss))  # The mean since the last point.
        run["grad_norm"].append(finite(float(grad_norm)))
        run["sigma_wq"].append(sigma_of_queries(self.model))
        ratios = torch.stack([drift_ratio(*block.attention.seen) for block in self.model.blocks])
        run["drift_ratio"].append([finite(x) for x in ratios.tolist()])
        return math.isfinite(loss)

    def train(self) -> str:
        """Until all steps are done, the time is up or the loss is lost; which of them."""
        args, state = self.args, self.state
        began, first, said = time.monotonic(), state["step"], -math.inf
        losses: list[Tensor] = []
        while state["step"] < args.steps:
            if args.checkpoints is not None and state["step"] % args.checkpoint_every == 0:
                self.save(args.checkpoints / f"step-{state['step']}.pt")
            self.how.watching = state["step"] % args.every == 0 or state["step"] == args.steps - 1
            loss, grad_norm = self.step()
            losses.append(loss)
            if not self.how.watching:
                continue
            if not self.watch(losses, grad_norm):
                return "the loss is not finite any more"
            losses = []
            now = time.monotonic()
            if sys.stdout.isatty() or now - said > 10 or state["step"] == args.steps:
                said = now
                how = label(self.how.attention, self.how.center)
                show_progress(state, args, how, (state["step"] - first) / (now - began))
            if self.exploded is None and max(state["run"]["sigma_wq"][-1]) > args.stop_sigma:
                self.exploded = state["step"]
            if self.exploded is not None and state["step"] >= self.exploded + STEPS_AFTER_SIGMA:
                return f"sigma(W_Q) has passed {args.stop_sigma:g} at step {self.exploded}"
            if args.minutes is not None and now - began > 60 * args.minutes:
                return f"stopped after {args.minutes:g} minutes"
        return "done"


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    attentions = (*SDPA, *OURS)
    add("--attention", choices=attentions, default="sdpa-flash", help="what computes it")
    add("--center", action="store_true", help="subtract the mean key of each sequence first")
    add("--switch-at", type=int, metavar="STEP", help="from here on as the next two say")
    add("--switch-to", choices=attentions, help="default: as --attention")
    add("--switch-center", action="store_true", help="centre the keys from the switch on")
    add("--seed", type=int, default=1, help="of weights and data")
    add("--steps", type=int, default=8000)
    add(
        "--text",
        type=Path,
        nargs="+",
        default=[Path(sysconfig.get_paths()["stdlib"])],
        help="files (also .xz) or folders with sources; default: Python's standard library",
    )
    add("--megabytes", type=float, default=330, help="of text at most")
    add("--tokens", type=Path, help="file that keeps the tokens for the next run (.npy)")
    add("--out", type=Path, default=Path("divergence"), help="folder of the JSON and the PNG")
    add("--name", help="of the run and its files; default: attention and seed")
    add("--every", type=int, default=20, help="steps between two points of the curves")
    add("--record", type=Path, metavar="FILE", help="watch PyTorch's attention into this .bwrun")
    add("--server", metavar="HOST:PORT", help="watch it, and tell this bellwetherd")
    add("--allow", default="", metavar="KINDS", help="what that server may do, for example "
        "attention.center_k,attention.mode,qk.clip")  # fmt: skip
    add("--compile-loss", action="store_true", help="fuse the loss: half a minute, then faster")
    add("--minutes", type=float, help="stop after so long")
    add(
        "--stop-sigma",
        type=float,
        default=math.inf,
        help=f"stop {STEPS_AFTER_SIGMA} steps after sigma(W_Q) of a head has passed this",
    )
    add("--checkpoints", type=Path, metavar="DIR", help="also save a checkpoint every so often")
    add("--checkpoint-every", type=int, default=100, help="steps between two of them")
    add("--checkpoint", type=Path, help="written at the end; if it exists, the run goes on there")
    add("--start-from", type=Path, help="another run's checkpoint to branch off from")
    add("--compare", type=Path, nargs="+", metavar="JSON", help="only draw these runs together")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    size = parser.add_argument_group("the model: the defaults are the set-up that fails")
    for name, value in (
        ("layers", 6),
        ("width", 384),
        ("head-dim", 64),
        ("context", 1024),
        ("batch", 16),
        ("vocab", 50304),
    ):
        size.add_argument(f"--{name}", type=int, default=value)
    size.add_argument("--lr", type=float, default=2e-3, help=f"after {WARM_UP_STEPS} steps")
    args = parser.parse_args(argv)
    args.switch_to = args.switch_to or args.attention
    if args.width % args.head_dim:
        parser.error(f"--width is {args.width}, but must be a multiple of --head-dim")
    if not 256 <= args.vocab <= 65536:
        parser.error(f"--vocab is {args.vocab}, but must be 256..65536")
    if args.name is None:
        changed = label(args.switch_to, args.switch_center)
        then = f" then {changed}" if args.switch_at is not None else ""
        args.name = f"{label(args.attention, args.center)}{then} seed {args.seed}".replace(" ", "-")
    return args


def refuse_what_would_be_replaced(args: argparse.Namespace, device: torch.device) -> None:
    """An experiment on a kernel must not run with another one because this one is missing."""
    q = torch.zeros(1, 1, 16, args.head_dim, dtype=torch.bfloat16, device=device)
    for attention in {args.attention, args.switch_to}:
        if attention in OURS:
            reason = bellwether._attention.dispatch.unsupported(q, q, q)
        else:
            reason = None
            try:
                How(attention, center=False).attend(q, q, q)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
        if reason is not None:
            raise SystemExit(f"{attention} does not run here: {reason}")


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compare:
        runs = {path.stem: json.loads(path.read_text()) for path in args.compare}
        draw(runs, args.out / "compared.png")
        print(f"{args.out / 'compared.png'}: {', '.join(runs)}")
        return 0
    device = torch.device(args.device)
    refuse_what_would_be_replaced(args, device)
    training = Training(args, load_tokens(args), device)
    for path in (args.checkpoint, args.start_from):
        if path is not None and path.exists():
            training.load(path)
            print(f"going on at step {training.state['step']} of {path}")
            break
    run = training.state["run"]
    ended = training.train()
    if training.monitor is not None:
        training.monitor.detach()
    if sys.stdout.isatty():
        print()
    run["settings"] = {name: str(value) for name, value in vars(args).items()}
    run["ended"] = ended
    if args.checkpoint is not None:
        training.save(args.checkpoint)
    (args.out / f"{args.name}.json").write_text(json.dumps(run) + "\n")
    draw({args.name: run}, args.out / f"{args.name}.png")
    sigma = run["sigma_wq"][-1]
    print(
        f"{args.name}: {ended} at step {training.state['step']}; sigma(W_Q) {max(sigma):.1f} in "
        f"layer {sigma.index(max(sigma))}, loss {run['loss'][-1]}; see {args.out / args.name}.png"
    )
    if training.state["step"] < args.steps and args.checkpoint is not None:
        print("the same command goes on from here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
