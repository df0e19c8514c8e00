#!/usr/bin/env python3
"""Sound trainings with all laws asked at every step: which of them does the server call broken?

    law_sweep.py                     all set-ups on the CPU
    law_sweep.py --device cuda       on a GPU; laws of modules, too (`ON_GPUS` is off there,
                                     _step/tapped_modules.py)
    law_sweep.py --only "gpt2 eager" set-ups that have these words
    law_sweep.py --of attention      set-ups for attention's laws; modules: sound_trainings.py's
    law_sweep.py --shard 0/4         each fourth, from the first on
    law_sweep.py --seconds 100       after that time none is begun
    law_sweep.py --seed 3            other sizes, weights and data
    law_sweep.py --list              says which set-ups it would train

A set-up trains a small model of random weights for a few steps.  All laws are asked at all places
in each: attention's, and those of linear layers, lm_head, norms and weights at rest.  Its recording
is judged by `bellwether replay`, that is by the server's own judge.  Each line begins with the
outcome:

    right    nothing is called broken
    known    broken, by a kernel that known_kernels.json says is wrong there
    BROKEN   broken, and nothing is known of it
    unasked  no law was asked; the line says why.  A GradScaler skips steps whose gradients
             overflow, and what is skipped is no step: "samples 1 of 2 steps" of a training of five
    FAILED   the training itself

`margin` is how far the worst question came to its limit; beyond 1 it is broken.

Exit code: 0 none is broken or failed, 1 some are, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(ROOT / "tests" / "python"), str(HERE)]

import numpy as np  # noqa: E402
import sound_trainings  # noqa: E402
import torch  # noqa: E402
from sound_trainings import Whole  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

STEPS = 5
VOCABULARY = 512
FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "gemma3")
# fp16 and autocast16 with a loss scale of 1024, fp16raw without one.
PRECISIONS = ("bf16", "autocast", "fp16", "autocast16", "fp16raw", "fp32")
FORCED = {
    "MATH": SDPBackend.MATH, "FLASH": SDPBackend.FLASH_ATTENTION,
    "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION, "CUDNN": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
MODES = ("fa", "hp", "hpm")
SMALLEST = 4096 * float(np.finfo(np.float32).tiny)  # As law_watch.cc.


class Setup(NamedTuple):
    model: str
    implementation: str
    precision: str
    batch: str  # plain, padded
    special: str = ""  # A backend that is forced, or "stabilize-MODE".

    def __str__(self) -> str:
        return " ".join(filter(None, self))

    def possible(self, device: str) -> bool:
        """Whether it is one that can be trained, with tensors of one type."""
        if self.model == "gemma2" and self.implementation == "sdpa":
            return False  # Refused by transformers: the softcap.
        if self.implementation == "flex_attention" and (device == "cpu" or self.model == "gpt2"):
            return False
        if device == "cpu" and self.special in ("EFFICIENT", "CUDNN"):
            return False
        # With rotary positions fp32 queries meet 16-bit values.
        return not (
            self.implementation in ("eager", "bellwether")
            and self.precision.startswith("autocast")
            and self.model != "gpt2"
        )


def _wanted() -> Iterator[Setup]:
    for precision in ("bf16", "fp16", "autocast"):
        for backend in FORCED:  # The efficient one takes no grouped heads.
            model = "gpt2" if backend == "EFFICIENT" else "llama"
            yield Setup(model, "sdpa", precision, "plain", backend)
    # Those that were once called broken though they were right, and their like.
    for model in FAMILIES:
        yield Setup(model, "eager", "fp16raw", "padded")
        yield Setup(model, "eager", "fp32", "padded")
    for batch in ("plain", "padded"):
        yield Setup("gpt2", "eager", "fp16", batch)
    for precision in PRECISIONS:
        for kind in ("fast", "weights"):
            yield Setup("mha", kind, precision, "plain")
    for model in FAMILIES:
        for implementation in ("sdpa", "eager"):
            yield Setup(model, implementation, "bf16", "plain")
            yield Setup(model, implementation, "fp16raw", "plain")
            yield Setup(model, implementation, "autocast", "padded")
    for mode in MODES:
        for precision in ("bf16", "fp16", "autocast"):
            batch = "padded" if precision == "autocast" else "plain"
            yield Setup("llama", "sdpa", precision, batch, "stabilize-" + mode)
    for model in FAMILIES:
        yield Setup(model, "bellwether", "bf16", "plain")
        yield Setup(model, "bellwether", "fp16raw", "padded")
    for precision in PRECISIONS:
        for model in FAMILIES:
            for implementation in ("sdpa", "eager", "bellwether"):
                for batch in ("plain", "padded"):
                    yield Setup(model, implementation, precision, batch)
    for backend in ("MATH", "EFFICIENT", "CUDNN"):
        for precision in ("bf16", "fp16", "fp16raw"):
            model = "gpt2" if backend == "EFFICIENT" else "qwen3"
            yield Setup(model, "sdpa", precision, "padded", backend)
    for precision in ("bf16", "fp16", "fp32"):  # Compiled, and so the slowest.
        for model in FAMILIES:
            for batch in ("plain", "padded"):
                yield Setup(model, "flex_attention", precision, batch)


def setups(device: str) -> list[Union[Setup, Whole]]:
    """In the order in which they are trained: what tells most first."""
    of_attention = [setup for setup in dict.fromkeys(_wanted()) if setup.possible(device)]
    return [*of_attention, *sound_trainings.setups(device)]


class MultiHead(nn.Module):
    """Two layers of nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int, with_weights: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(2)
        )
        self.with_weights = with_weights

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, tokens = self.embed(input_ids), input_ids.shape[1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        how = dict(need_weights=self.with_weights, is_causal=not self.with_weights)
        for norm, layer in zip(self.norms, self.layers):
            y = norm(x)
            x = x + layer(y, y, y, attn_mask=mask, **how)[0]
        logits = self.head(x)[:, :-1].flatten(0, 1).float()
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 1:].flatten())}


@dataclasses.dataclass(frozen=True)
class Sizes:
    dim: int
    heads: int
    tokens: int
    batch: int

    @staticmethod
    def of(number: int, device: str) -> Sizes:
        """They take turns."""
        dim = 128 if number % 2 else 64
        if device == "cpu":
            return Sizes(dim, 2, 128, 2)
        heads = 4 if dim == 128 or number % 4 else 8
        return Sizes(dim, heads, 512 if number % 3 else 256, 4)


def _of_transformers(setup: Setup, sizes: Sizes) -> nn.Module:
    import transformers

    name, width = setup.model, sizes.heads * sizes.dim
    options: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads // 2,
        head_dim=sizes.dim, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, use_cache=False,
    )  # fmt: skip
    if name == "gpt2":
        options = dict(
            vocab_size=VOCABULARY, n_embd=width, n_head=sizes.heads, n_layer=2, n_positions=1024,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            use_cache=False,
        )  # fmt: skip
    if name in ("gemma2", "gemma3"):
        options |= dict(
            query_pre_attn_scalar=sizes.dim, sliding_window=sizes.tokens // 4,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
    if name == "gemma2":
        options["attn_logit_softcapping"] = 20.0
    stem = {"gpt2": "GPT2"}.get(name, name.capitalize())
    config = stem + ("TextConfig" if name == "gemma3" else "Config")
    cls = stem + ("LMHeadModel" if name == "gpt2" else "ForCausalLM")
    model: nn.Module = getattr(transformers, cls)._from_config(
        getattr(transformers, config)(**options), attn_implementation=setup.implementation
    )
    return model


def _build(setup: Setup, sizes: Sizes, number: int, device: str) -> nn.Module:
    if setup.model == "mha":
        width = sizes.heads * sizes.dim
        model: nn.Module = MultiHead(width, sizes.heads, setup.implementation == "weights")
    else:
        model = _of_transformers(setup, sizes)
    if number % 5:  # Scores differ, as after some training; else as initialised.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 2 and not any(x in name for x in ("embed", "wte", "wpe")):
                    weight.normal_(0.0, 1.2 / math.sqrt(sizes.heads * sizes.dim))
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16raw": torch.float16}
    return model.to(device, narrow.get(setup.precision, torch.float32)).train()


def _batch(setup: Setup, sizes: Sizes) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (sizes.batch, sizes.tokens))
    ids[:, 1::2] = ids[:, ::2]  # Something to learn.
    labels, mask = ids.clone(), torch.ones_like(ids)
    if setup.batch == "plain":
        return {"input_ids": ids, "labels": labels}
    mask[0, : sizes.tokens // 3] = 0
    mask[1, -(sizes.tokens // 5) :] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _steps(setup: Setup, model: nn.Module, sizes: Sizes, device: str) -> None:
    half = setup.precision in ("fp16", "fp16raw")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4 if half else 1e-8)
    auto = {"autocast": torch.bfloat16, "autocast16": torch.float16}.get(setup.precision)
    scale = 1024.0 if setup.precision in ("fp16", "autocast16") else 1.0
    forced = FORCED.get(setup.special)
    for _ in range(STEPS):
        batch = {name: x.to(device) for name, x in _batch(setup, sizes).items()}
        with sdpa_kernel([forced]) if forced is not None else contextlib.nullcontext():
            with torch.autocast(device, auto or torch.bfloat16, enabled=auto is not None):
                loss = model(**batch)["loss"]
            (loss.float() * scale).backward()
        for weight in model.parameters():
            if scale != 1 and weight.grad is not None:
                weight.grad.div_(scale / (8 if half else 1))
        optimizer.step()
        optimizer.zero_grad()


def _training(
    setup: Union[Setup, Whole], number: int, device: str
) -> tuple[nn.Module, Callable[[], None], dict[str, Any]]:
    """The model, what trains it, and its sizes."""
    import bellwether

    if isinstance(setup, Whole):
        training = sound_trainings.build(setup, device)

        def steps() -> None:
            for step in range(STEPS):
                training.step(step)

        return training.model, steps, {}
    sizes = Sizes.of(number, device)
    model = _build(setup, sizes, number, device)
    if setup.special.startswith("stabilize-"):
        bellwether.stabilize(model, mode=setup.special.removeprefix("stabilize-"))
    return model, lambda: _steps(setup, model, sizes, device), dataclasses.asdict(sizes)


def _train(
    setup: Union[Setup, Whole], number: int, seed: int, device: str, path: Path
) -> dict[str, Any]:
    import bellwether

    torch.manual_seed(1000 * seed + number)
    model, train, sizes = _training(setup, number + seed, device)
    monitor = bellwether.attach(
        model, record=str(path), run="sweep", every=1, overhead_budget=1e9, byte_budget=0
    )
    try:
        train()
        assert monitor.flush(60), "the sender did not take all"
        status = monitor.status()
    finally:
        monitor.detach()
    layers, linear = status["layers"], status["linear"]
    return {
        "sizes": sizes, "errors": status["errors"],
        "without": sorted({str(x["without_laws"]) for x in layers if x.get("without_laws")}),
        "known": sorted({str(f) for x in layers for f in x.get("known_faults") or ()}),
        "left_out": linear["left_out"], "not_measured": linear["not_measured"],
        "faults": linear["faults"], "flips": status["rest"]["flips"],
        "compared": status["rest"]["compared"], "rest": status["rest"]["not_measured"],
        "law_rows": status["law_rows"],
        "modules": {name: type(m).__name__ for name, m in model.named_modules()
                    if any(p is not None for p in m._parameters.values())},
    }  # fmt: skip


# ---- how near the limits


def _z_of_laws(got: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """(law, z beyond what roundings explain [layers, key heads], projections)"""
    for law, count in (("a1", 8), ("a2", 8), ("a3", 1), ("a4", 1)):
        names = [f"law_{law}_{i}" for i in range(count)] if count > 1 else [f"law_{law}"]
        if not {*names, f"law_{law}_variance", f"law_{law}_alike"} <= got.keys():
            continue
        largest = np.abs(np.stack([got[name].astype(float) for name in names])).max(0)
        variance = got[f"law_{law}_variance"].astype(float)
        alike = got[f"law_{law}_alike"].astype(float)
        rest = np.maximum(largest - np.maximum(alike, 0), 0)
        if law == "a1":  # Alone it is broken only beyond twice that.
            rest = np.where(largest > 2 * alike, rest, 0 * rest)
        yield law, rest / np.sqrt(np.maximum(variance, SMALLEST)), count


def _z_of_factors(got: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """As of the laws: of each tensor beside its reference."""
    for tensor in ("o", "dq", "dk", "dv"):
        parts = [got.get(f"shadow_{tensor}_factor{x}") for x in ("", "_variance", "_alike")]
        if any(part is None for part in parts):
            continue
        factor, variance, alike = (part.astype(float) for part in parts)
        distance = got[f"shadow_{tensor}_variance"].astype(float)
        asked = np.isfinite(factor) & (variance > 0) & (distance > SMALLEST)
        rest = np.maximum(np.abs(factor[asked]) - alike[asked], 0)
        yield f"{tensor}_factor", rest / np.sqrt(variance[asked])


def margins(steps: dict[int, dict[str, Any]]) -> tuple[dict[str, float], int]:
    """Of each law and tensor the largest part of its limit, as law_watch.h has them; and how many
    samples were asked."""
    most: dict[str, float] = {}
    samples = 0
    for _, got in sorted(steps.items()):
        laws = [(law, z[np.isfinite(z)], n) for law, z, n in _z_of_laws(got)]
        shadows = {}
        laws += [(name, z, 1) for name, z in _z_of_factors(got)]
        for tensor in ("o", "dq", "dk", "dv"):
            rest, variance, square = (
                got.get(f"shadow_{tensor}_{x}") for x in ("rest", "variance", "variance_sq")
            )
            if rest is None or variance is None or square is None:
                continue
            rest, variance, square = (x.astype(float) for x in (rest, variance, square))
            asked = np.isfinite(rest) & (variance > SMALLEST)
            degrees = np.maximum(variance[asked] ** 2 / np.maximum(square[asked], SMALLEST), 1)
            shadows[tensor] = rest[asked] / variance[asked], degrees
        questions = sum(n * z.size for _, z, n in laws) + sum(e.size for e, _ in shadows.values())
        if questions == 0:
            continue
        samples += 1
        chance = 1e-3 * 6 / (math.pi**2 * samples**2 * questions)
        limit, x = math.sqrt(2 * math.log(2 / chance)), math.log(1 / chance)
        parts = {law: z / limit for law, z, _ in laws}
        for tensor, (excess, degrees) in shadows.items():
            parts[tensor] = excess / (1 + 2 * np.sqrt(x / degrees) + 2 * x / np.sqrt(degrees))
        for name, part in parts.items():
            if part.size:
                most[name] = max(most.get(name, 0.0), round(float(part.max()), 4))
    return most, samples


def of_modules(
    steps: dict[int, dict[str, Any]], names: Sequence[str]
) -> tuple[dict[str, float], dict[str, int], set[str]]:
    """Of each law outside attention the largest part of its limit, as arithmetic_watch.h has it,
    and the questions; and which places were asked."""
    most: dict[str, float] = {}
    asked: dict[str, int] = {}
    places: set[str] = set()
    samples = 0
    for _, got in sorted(steps.items()):
        if "law_difference" not in got:
            continue
        columns = [got[f"law_{x}"].astype(float)[:, 0] for x in ("difference", "variance", "alike")]
        difference, variance, alike = columns
        there = np.isfinite(difference) & np.isfinite(variance)
        if not there.any():
            continue
        samples += 1
        chance = 1e-3 * 6 / (math.pi**2 * samples**2 * there.sum())
        limit = max(6.0, math.sqrt(2 * math.log(2 / chance)))
        beyond = np.maximum(np.abs(difference) - np.maximum(alike, 0), 0)
        parts = beyond / np.sqrt(np.maximum(variance, SMALLEST)) / limit
        for row in np.flatnonzero(there):
            place, law = names[row].rsplit(" ", 1)
            places.add(place)
            asked[law] = asked.get(law, 0) + 1
            most[law] = max(most.get(law, 0.0), round(float(parts[row]), 4))
    return most, asked, places


def _judged(path: Path) -> dict[str, Any]:
    from recording import Recording, replayed_alerts

    alerts = [a for a in replayed_alerts(path) if a["rule"] in ("kernel", "arithmetic")]
    recording = Recording(path, ended=True)
    steps = recording.steps()
    most, samples = margins(steps)
    names = [
        n for m in recording.messages if m.WhichOneof("body") == "names" for n in m.names.names
    ]
    also, questions, places = of_modules(steps, names)
    return {
        "kernel": recording.hello.run.attention.kernel, "samples": samples, "steps": len(steps),
        "margins": most | also, "questions": questions, "places": sorted(places),
        "alerts": [json.dumps(a) for a in alerts[:4]],
    }  # fmt: skip


def outcome(one: dict[str, Any]) -> str:
    if "failed" in one:
        return "FAILED"
    if one["alerts"]:
        of_attention = all(json.loads(alert)["rule"] == "kernel" for alert in one["alerts"])
        return "known" if one["known"] and of_attention else "BROKEN"
    return "right" if one["samples"] or one["questions"] else "unasked"


def describe(one: dict[str, Any]) -> str:
    begin = f"{one['outcome']:8}{one['setup']}"
    if "failed" in one:
        return f"{begin}: {one['failed'].splitlines()[-1][:200]}"
    text = (
        f"{begin} [{one['kernel']}] {one['sizes'] or ''}"
        f" margin {one['margins']} samples {one['samples']}"
        f" of {one['steps']} steps questions {sum(one['questions'].values())} {one['seconds']} s"
    )
    if one["without"] and one["outcome"] == "unasked":
        text += f" without {one['without'][0][:120]}"
    elif one["outcome"] == "unasked" and one["steps"] < 2:
        text += " without a step behind the first: a GradScaler skips those that overflow"
    if one["known"] and one["outcome"] != "right":
        text += f" known {one['known'][0][:120]}"
    if one["alerts"]:
        text += f"\n        {one['alerts'][0][:700]}"
    return text + (f" ERRORS {one['errors']}" if one["errors"] else "")


def run(
    setup: Union[Setup, Whole], number: int, seed: int, device: str, folder: Path
) -> dict[str, Any]:
    """Trains and judges one."""
    began, path = time.monotonic(), folder / f"{number}-{seed}.bwrun"
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:  # Where code is compiled these laws are not asked.
        compiler.counters.clear()
    one: dict[str, Any] = {"number": number, "setup": str(setup)}
    try:
        one |= _train(setup, number, seed, device, path)
        one |= _judged(path)
    except Exception:
        one["failed"] = traceback.format_exc()[-1500:]
    path.unlink(missing_ok=True)
    one["seconds"] = round(time.monotonic() - began, 1)
    one["outcome"] = outcome(one)
    return one


def prepare(device: str, folder: Path, setenv: Callable[[str, str], None] = os.putenv) -> None:
    """Before the first set-up."""
    for name, value in (
        ("BELLWETHER_STATS", "drift,laws,linear,rest"), ("BELLWETHER_LAW_LAYERS", "1000"),
        ("BELLWETHER_LOG_PATH", os.devnull),
        ("XDG_STATE_HOME", str(folder / "state")), ("HF_HUB_OFFLINE", "1"),
    ):  # fmt: skip
        setenv(name, value)
    warnings.simplefilter("ignore")
    import bellwether.hf
    from bellwether._step import at_rest, tapped_modules

    import protos

    protos.generate(folder)
    bellwether.hf.register()
    tapped_modules.TURNS_MAX = at_rest.TURNS_MAX = 1
    if device == "cuda":
        tapped_modules.ON_GPUS = True


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Sound trainings, judged by their laws.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--of", choices=("attention", "modules"))
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the results as JSON")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    words = set(given.only.split())
    wanted = [
        (number, setup)
        for number, setup in enumerate(setups(given.device))
        if words <= set(str(setup).split())
        and given.of in (None, "modules" if isinstance(setup, Whole) else "attention")
    ]
    if not wanted:
        parser.error(f"--only is {given.only!r}, which no set-up has")
    shard, of = map(int, given.shard.split("/"))
    wanted = wanted[shard::of]
    if given.list:
        print("\n".join(f"{number} {setup}" for number, setup in wanted))
        return 0
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(given.device, Path(folder), os.environ.__setitem__)
        for number, setup in wanted:
            spare = 15 if "flex_attention" in setup else 3
            if time.monotonic() - began > given.seconds - spare:
                print(f"not begun: {setup}", flush=True)
                continue
            results.append(run(setup, number, given.seed, given.device, Path(folder)))
            print(describe(results[-1]), flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps(results))
    counts = {x: sum(r["outcome"] == x for r in results) for x in
              ("right", "known", "BROKEN", "unasked", "FAILED")}  # fmt: skip
    largest: dict[str, float] = {}
    for one in results:
        for name, part in one.get("margins", {}).items() if one["outcome"] == "right" else ():
            largest[name] = max(largest.get(name, 0.0), part)
    asked: dict[str, int] = {}
    for one in results:
        for law, count in one.get("questions", {}).items():
            asked[law] = asked.get(law, 0) + count
    print(f"questions outside attention: {asked}")
    print(f"{len(results)} of {len(wanted)} set-ups: {counts}; largest margins of the right "
          f"{largest}; {time.monotonic() - began:.0f} s")  # fmt: skip
    return 1 if counts["BROKEN"] or counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
