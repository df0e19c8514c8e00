#!/usr/bin/env python3
"""A transformer that breaks by rounding alone, on one CPU core, in under a minute.

Two attention-only layers with one head each read the bytes of Python's standard library and
predict, at every position, how often eight classes of characters have occurred so far.  Layer 0
can do that with uniform attention, so nothing in the loss holds the scores of layer 1 in place.
All is fp32 except the attention, which PyTorch's flash kernel computes in bf16.  The rounded output
biases the backward pass, W_Q of layer 1 is pushed along the mean key, step after step, and its norm
explodes.  In fp32 the same model stays healthy.

    python examples/tiny_transformer.py                     # watched; W_Q of layer 1 explodes
    python examples/tiny_transformer.py --attention fp32    # the healthy twin
    python examples/tiny_transformer.py --center            # bf16 with the keys centred
    python examples/tiny_transformer.py --attention bellwether-hp   # bf16, without the bias

The loss hardly moves in any of them: that is why the failure needs a witness.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_lib" / "python"))
import bellwether

LAYERS = 2
WIDTH = 64  # One head of 64.
TOKENS = 64
BATCH = 4
LEARNING_RATE = 4e-3
WARM_UP_STEPS = 100
# Without it a single gradient of 900 now and then throws even the fp32 twin off its course for
# 1,000 steps.
GRADIENT_NORM_MAX = 10.0
SCORED_FROM = TOKENS // 8  # The first positions know too little to be asked.
LOSS_SCALE = 10.0
CLASSES = 8
ATTENTIONS = ("bf16", "fp32", "bellwether-fa", "bellwether-hp", "bellwether-hpm")


class Attention(nn.Module):
    """Causal self-attention with one head, in the type that `attention` names."""

    def __init__(self, attention: str, center: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dtype = torch.float32 if attention == "fp32" else torch.bfloat16
        self.center = center

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        q, k, v = (
            part.view(batch, TOKENS, 1, WIDTH).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=2)
        )
        if self.center:
            k = k - k.mean(dim=2, keepdim=True)
        q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, TOKENS, WIDTH).float())


class Block(nn.Module):
    def __init__(self, attention: str, center: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.attention = Attention(attention, center)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class TinyTransformer(nn.Module):
    def __init__(self, attention: str = "bf16", center: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, center) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith("out.weight")
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * LAYERS) if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_corpus() -> Tensor:
    """All modules at the top of the standard library, as bytes, [length] int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def class_of_byte() -> Tensor:
    """[256, CLASSES] one-hot: lower, upper, digit, space, newline, _., brackets, the rest."""
    tests = (str.islower, str.isupper, str.isdigit, " ".__eq__, "\n".__eq__,
             "_.,".__contains__, "()[]{}".__contains__)  # fmt: skip
    classes = [
        next((i for i, test in enumerate(tests) if test(chr(byte))), len(tests))
        for byte in range(256)
    ]
    return F.one_hot(torch.tensor(classes), CLASSES).float()


class Data:
    """Random windows of the corpus and their running class frequencies."""

    def __init__(self, seed: int) -> None:
        self.corpus = read_corpus()
        self.classes = class_of_byte()
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = torch.arange(1, TOKENS + 1)[:, None]

    def batch(self) -> tuple[Tensor, Tensor]:
        """([BATCH, TOKENS] tokens, [BATCH, TOKENS, CLASSES] targets)."""
        last = len(self.corpus) - TOKENS
        start = torch.randint(0, last, (BATCH, 1), generator=self.generator)
        tokens = self.corpus[start + torch.arange(TOKENS)]
        return tokens, self.classes[tokens].cumsum(dim=1) / self.seen


def sigma_of_queries(model: TinyTransformer) -> list[float]:
    """The largest singular value of W_Q, layer by layer."""
    with torch.no_grad():
        return [
            float(torch.linalg.matrix_norm(block.attention.qkv.weight[:WIDTH], ord=2))
            for block in model.blocks
        ]


def progress(step: int, steps: int, loss: float, sigma: list[float], began: float) -> None:
    sigmas = " ".join(f"{value:7.2f}" for value in sigma)
    seconds = time.time() - began
    line = f"step {step:6d}/{steps}  {seconds:5.1f} s  loss {loss:.4f}  sigma(W_Q) {sigmas}"
    if sys.stdout.isatty():
        print(f"\r{line}\x1b[K", end="", flush=True)
    else:
        print(line, flush=True)


def save(model: TinyTransformer, step: int, folder: Path) -> None:
    """What `python -m bellwether scan` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model": model.state_dict(), "config": {"n_head": 1}}
    torch.save(content, folder / f"step_{step}.pt")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", choices=ATTENTIONS, default="bf16")
    parser.add_argument("--center", action="store_true", help="subtract the mean key")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--watch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--server", help="host:port or unix:/path; default: a private server")
    parser.add_argument("--record", help="write a .bwrun file instead")
    parser.add_argument("--run", help="the run's name")
    parser.add_argument("--allow", help="what the server may do, as attach(allow=...)")
    parser.add_argument("--every", type=int, default=20, help="steps between two samples")
    parser.add_argument("--checkpoints", type=Path, help="save the weights in this folder")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two")
    parser.add_argument("--losses", type=Path, help="write the loss of every step, one a line")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = Data(args.seed)
    model = TinyTransformer(args.attention, args.center)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    if args.attention.startswith("bellwether-"):
        bellwether.stabilize(model, mode=args.attention.removeprefix("bellwether-"))

    monitor = None
    if args.watch:
        # A model this small takes 4 ms a step: a sample costs a good part of one, so the budget
        # is far above the 0.5 % that is right for real models.
        monitor = bellwether.attach(
            model, server=args.server, run=args.run, every=args.every, record=args.record,
            rows=0, sequences=0, overhead_budget=0.5, allow=args.allow,
        )  # fmt: skip
        if args.center:
            monitor.event("centring_on")

    losses: list[float] = []
    began = time.time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        tokens, target = data.batch()
        error = LOSS_SCALE * (model(tokens) - target)
        loss = (error**2)[:, SCORED_FROM:].mean()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if monitor is not None:
            monitor.step(loss=loss, grad_norm=grad_norm, tokens=tokens.numel())
        losses.append(loss.item())
        if args.checkpoints and step % args.checkpoint_every == 0:
            save(model, step, args.checkpoints)
        if step % 200 == 0 or step == args.steps - 1:
            progress(step, args.steps, losses[-1], sigma_of_queries(model), began)
        if not math.isfinite(losses[-1]):
            break

    if sys.stdout.isatty():
        print()
    sigma = sigma_of_queries(model)
    print(
        f"{args.attention}{' centred' if args.center else ''} seed {args.seed}: sigma(W_Q) "
        + ", ".join(f"layer {i} {value:.1f}" for i, value in enumerate(sigma))
        + f"; loss {sum(losses[-500:]) / len(losses[-500:]):.4f}; "
        f"{1e3 * (time.time() - began) / len(losses):.1f} ms a step"
    )
    if monitor is not None:
        print(f"watching took {100 * monitor.overhead():.1f} % of the step time")
        monitor.flush()
        monitor.detach()
    if args.losses:
        args.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
    return 0


if __name__ == "__main__":
    # The flash kernel or an error: a silent change to another kernel would not fail.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        sys.exit(main())
