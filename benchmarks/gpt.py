"""Small language models on real text: OCNOpt as it comes, without warm-up, against AdamW tuned with warm-up.

    python benchmarks/gpt.py --sizes 1m,5m,25m --optimizers ocnopt,adamw --jobs 4 --out gpt.jsonl
    python benchmarks/gpt.py --optimizers adamw --variant "adamw95:optimizer=adamw,betas=(0.9,0.95)" --out gpt.jsonl
    python benchmarks/gpt.py --variant "beta3:gauss_newton=3,lr=0.01" --optimizers "" --out gpt.jsonl
    python benchmarks/gpt.py --report gpt.jsonl

The text is the Python standard library's own source, byte by byte, or any file given with --text. Where a
default of OCNOpt was chosen on this benchmark, AdamW's counterpart must be tuned on it too (its betas, for the
decay), and the numbers to publish come from seeds that the choice did not see.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _report import Metric, report
from _runs import (
    Family,
    Record,
    Run,
    add_optimizer_arguments,
    add_run_arguments,
    execute,
    load,
    parse_names,
    parse_numbers,
    plan,
    wanted,
)
from _training import (
    StepClock,
    build_optimizer,
    curve,
    environment,
    lr_factor,
    ocnopt_defaults,
    ocnopt_learning_rates,
    peak_memory_mb,
    set_lr,
)
from torch import Tensor, nn

VOCABULARY = 256  # bytes
CORPUS_BYTES = 12_000_000
VALIDATION_SHARE = 0.08
VALIDATION_BATCHES = 32
VAL_LOSS = Metric("val_loss", "validation loss, nats per byte")
ADAMW_LRS = (3e-4, 1e-3, 3e-3, 1e-2)


class Size(NamedTuple):
    layers: int
    width: int
    heads: int


SIZES = {
    "tiny": Size(1, 16, 2),  # for trying the script
    "1m": Size(5, 128, 4),
    "5m": Size(6, 256, 8),
    "25m": Size(8, 512, 8),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Pre-norm transformer, learned positions, untied head: bytes in, logits of the next byte out."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self._initialise(size.layers)

    def _initialise(self, layers: int) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # two branches a block add to the residual stream: keep its variance at one
            for branch in (block.attention.out, block.mlp[2]):
                nn.init.normal_(branch.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(place))))


def corpus(text: str | None = None, limit: int = CORPUS_BYTES) -> bytes:
    """The text to learn: a file, or the standard library's source in an order that only file names decide."""
    if text is not None:
        return Path(text).read_bytes()[:limit]
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not skipped & set(name.parts)]
    # By hash, not by alphabet: so the validation tail holds the same kinds of files as the rest.
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    data = b"".join((root / name).read_bytes() for name in names)
    if len(data) < 1_000_000:
        raise SystemExit(f"too little source of the standard library in {root}: give a text with --text")
    return data[:limit]


class Text(NamedTuple):
    train: Tensor
    validation: Tensor
    digest: str


@lru_cache(maxsize=1)
def text_on(device: str, text: str | None) -> Text:
    """The corpus as bytes on the device, once for each worker."""
    data = corpus(text)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    cut = int(len(data) * (1 - VALIDATION_SHARE))
    return Text(tokens[:cut], tokens[cut:], hashlib.sha256(data).hexdigest()[:12])


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (the next bytes) of the windows that begin at `starts`."""
    span = starts[:, None] + torch.arange(context + 1, device=starts.device)
    piece = tokens[span].long()
    return piece[:, :-1], piece[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, settings: dict[str, Any]) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=settings["precision"] == "bf16"):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor, settings: dict[str, Any]) -> float:
    """Mean loss over windows spread evenly over the validation text: the same ones for every run."""
    context, batch = settings["context"], settings["batch"]
    starts = torch.linspace(0, len(tokens) - context - 1, VALIDATION_BATCHES * batch, dtype=torch.float64)
    batches = starts.long().to(tokens.device).chunk(VALIDATION_BATCHES)
    model.eval()
    losses = [loss_of(model, *windows(tokens, part, context), settings) for part in batches]
    return torch.stack(losses).mean().item()


def train(run: Run) -> Record:
    """Train one model. Seed for seed, every optimizer sees the same initial weights and the same batches."""
    s = run.settings
    device = torch.device(s["device"])
    text = text_on(s["device"], s["text"])
    torch.manual_seed(run.seed)
    model = GPT(SIZES[run.task], s["context"]).to(device)
    optimizer = build_optimizer(run.optimizer, model, run.lr, run.options)
    network = torch.compile(model) if s["compile"] else model
    batches = torch.Generator(device).manual_seed(run.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses, clock = [], StepClock(device)
    for step in range(s["steps"]):
        set_lr(optimizer, run.lr * lr_factor(step, s["steps"], s["warmup"], s["cosine"]))
        last = len(text.train) - s["context"]
        starts = torch.randint(last, (s["batch"],), generator=batches, device=device)
        loss = loss_of(network, *windows(text.train, starts, s["context"]), s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # stays on the device: reading it here would make the host wait
        clock.tick()
    return {
        "val_loss": validation_loss(network, text.validation, s),
        "ms_per_step": clock.median_ms(),
        "train_curve": curve(losses),
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak_mb": peak_memory_mb(device),
        "text": text.digest,
        **environment(device),
    }


def families(arguments: argparse.Namespace) -> dict[str, Family]:
    adamw = {"betas": arguments.betas, "weight_decay": arguments.weight_decay}
    known = {"adamw": Family(ADAMW_LRS, adamw, {"warmup": arguments.warmup})}
    if "ocnopt" in wanted(arguments):
        known["ocnopt"] = Family(ocnopt_learning_rates(), ocnopt_defaults(), {"warmup": 0})
    return known


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=parse_names, default=("1m", "5m", "25m"), help=f"of {', '.join(SIZES)}")
    add_optimizer_arguments(parser, "ocnopt,adamw")
    add_run_arguments(parser, "0,1,2", "gpt.jsonl")
    parser.add_argument("--text", help="a text file to learn, in place of the standard library's source")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=100, help="warm-up steps of AdamW; OCNOpt has none")
    parser.add_argument("--cosine", action="store_true", help="decay the learning rate to a tenth, all optimizers")
    parser.add_argument("--betas", type=parse_numbers, default=(0.9, 0.99), help="of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="of AdamW")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16 is autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.sizes) - set(SIZES):
        parser.error(f"--sizes knows {', '.join(SIZES)}, not {', '.join(sorted(unknown))}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    unfinished = 0
    if not arguments.report:
        shared = ("text", "steps", "batch", "context", "cosine", "precision", "compile", "device")
        settings = {name: getattr(arguments, name) for name in shared}
        runs = plan(arguments, arguments.sizes, families(arguments), settings)
        unfinished = execute(runs, train, arguments.out, arguments.jobs, arguments.budget)
    print(report(load(arguments.report or arguments.out), [VAL_LOSS], VAL_LOSS))
    return int(unfinished > 0)


if __name__ == "__main__":
    sys.exit(main())
