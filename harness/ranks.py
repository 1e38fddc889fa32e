"""Many cards and machines: `torchrun --nproc-per-node 4 train.py ...`; one process without it.

Every rank holds all labels and draws the same random numbers. Of every global batch it runs its own part through
the networks; the outputs (B x C logits, B x d embeddings) are then gathered, and losses, label weights, PiCO's
queue and prototypes and IRNet's corrections follow from the whole batch on every rank alike. So the label state is
the same everywhere without ever being sent, and the run is the one-process run, rounding aside. Gradients are
averaged by torch's DistributedDataParallel; batch normalisation has the statistics of the global batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import InputError


def rank() -> int:
    return int(os.environ.get("RANK", 0)) if size() > 1 else 0  # torchrun sets these


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def first() -> bool:
    """Whether this process writes and speaks."""
    return rank() == 0


def say(line: str, stream=None) -> None:
    """On the terminal, once."""
    if first():
        print(line, file=stream)


def find_device(wanted: str) -> str:
    """auto: a card if there is one. Apple's MPS only when asked for: nobody has run it there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return "cuda" if there["cuda"] else "cpu"
    if not there[wanted]:
        raise InputError(f"--device {wanted}: torch finds no such device here; use --device auto")
    return wanted


def processor_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself (AVX512-BF16, AMX); where it does not, it is many times slower. The
    newest torch tells, older ones by other names, the oldest not at all: then Linux does. Nobody: no."""
    with contextlib.suppress(AttributeError, RuntimeError):
        found = torch.cpu.get_capabilities()
        return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    with contextlib.suppress(AttributeError, RuntimeError):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
        return "avx512_bf16" in flags or "amx_bf16" in flags
    return False


class Precision:
    """What the networks compute in: fp32, or half of it, where probabilities, margins and losses stay fp32. auto:
    on a card bf16 if it has it, else fp16, whose gradients need scaling; on a CPU bf16 if it has it and the images
    are of some size, else off: steps on digits and features are mostly not multiplication."""

    def __init__(self, wanted: str, device: torch.device, size: int = 32):
        if wanted == "auto" and device.type == "cuda":
            wanted = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        elif wanted == "auto":
            wanted = "bf16" if device.type == "cpu" and size >= 28 and processor_has_bf16() else "off"
        self.name, self.device = wanted, device.type
        self.type = dict(bf16=torch.bfloat16, fp16=torch.float16, off=None)[wanted]
        self.scaler = torch.amp.GradScaler(device.type) if wanted == "fp16" else None
        # the fused one skips a step whose gradients are not finite without asking the host
        self.optimizer_options = dict(fused=True) if self.scaler else dict(foreach=True)

    def autocast(self):
        """Weights are cast for every pass: a copy kept from one without gradients would get none in the next."""
        return torch.autocast(self.device, self.type, enabled=self.type is not None, cache_enabled=False)

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.scaler:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    def state_dict(self) -> dict:
        return dict(name=self.name, scaler=self.scaler.state_dict() if self.scaler else {})

    def load_state_dict(self, state: dict) -> None:
        """A run goes on in the precision that it began with, whatever this machine would choose."""
        if state:
            self.__init__(state["name"], torch.device(self.device))
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])


def stream(seed: int, number: int) -> int:
    """Another seed for each of a run's generators, so that no two draw the same numbers."""
    return (seed + number * 0x9E3779B97F4A7C15) % 2**63


def start(device: str, batch_size: int) -> None:
    if size() == 1 or dist.is_initialized():
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE is set, but {', '.join(missing)} is not: start several ranks with torchrun")
    if batch_size % size():
        raise InputError(f"--batch-size {batch_size}: must be a multiple of the {size()} ranks")
    if device == "cuda":
        here = int(os.environ["LOCAL_RANK"])
        if here >= torch.cuda.device_count():
            raise InputError(f"--nproc-per-node: there are only {torch.cuda.device_count()} cards on this machine")
        torch.cuda.set_device(here)
    dist.init_process_group({"cuda": "nccl"}.get(device, "gloo"))


def leave(code: int) -> None:
    """Ends the process. A rank skips the interpreter's own teardown, in which threads of its group may abort."""
    if size() > 1:
        if code == 0 and dist.is_initialized():  # after an error another rank may be gone: wait for none
            with contextlib.suppress(RuntimeError):
                dist.barrier()
                dist.destroy_process_group()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def lost(error: BaseException | None) -> bool:
    """Whether the error is that another rank has gone."""
    return (
        size() > 1
        and isinstance(error, RuntimeError)
        and (isinstance(error, dist.DistError) or "gloo" in str(error))
    )


def from_first(function: Callable):
    """What `function` returns on rank 0, or the input error that it raises there, on every rank."""
    box = [None]
    if first():
        try:
            box = [function()]
        except InputError as error:
            box = [error]
    if size() > 1:
        dist.broadcast_object_list(box)
    if isinstance(box[0], InputError):
        raise box[0]
    return box[0]


def one_first(function: Callable):
    """The first process of each machine alone, then the others: a download happens once."""
    waits = size() > 1 and int(os.environ["LOCAL_RANK"]) > 0
    if waits:
        dist.barrier()
    try:
        return function()
    finally:
        if size() > 1 and not waits:
            dist.barrier()


def same_everywhere(candidates: Tensor) -> bool:
    """Whether all ranks hold these very candidate sets, by a number that depends on every entry."""
    if size() == 1:
        return True
    g = torch.Generator().manual_seed(0)
    code = torch.randint(2**61, (candidates.shape[1],), generator=g).to(candidates.device)
    total = torch.zeros((), dtype=torch.long, device=candidates.device)
    for part in candidates.split(1 << 16):
        rows = (part * code).sum(1)  # a number a set; sums wrap around, alike everywhere
        total = total * 31 + (rows * (2 * torch.arange(len(rows), device=rows.device) + 1)).sum()
    totals = [torch.zeros_like(total) for _ in range(size())]
    dist.all_gather(totals, total)
    return all(bool(other == total) for other in totals)


# ------------------------------------------------------------------ the network, over all ranks


def spread(network: nn.Module, parts: bool):
    """The network over all ranks; as it is where there is one."""
    if size() == 1:
        return network
    if hasattr(network, "two"):
        raise InputError("--base dividemix: its two networks train in one process only")
    return Spread(network, parts)


def part(rows: int) -> slice:
    """This rank's rows of a batch."""
    share = -(-rows // size())
    return slice(rank() * share, (rank() + 1) * share) if size() > 1 else slice(None)


class Spread:
    """A network that returns what the whole batch gives; each rank runs its part. In training it is given this
    rank's part alone (`parts`) or the whole batch, in evaluation the whole batch."""

    def __init__(self, network: nn.Module, parts: bool):
        synchronise(network)
        self._network, self._parts = network, parts
        encoder = _Passes(getattr(network, "query", network))
        # the option has a new name from torch 2.14 on
        named = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in named else "broadcast_buffers"
        self._trained = DistributedDataParallel(encoder, **{buffers: False})  # the same everywhere already

    def __getattr__(self, name: str):
        return getattr(self._network, name)

    def _run(self, function: Callable, images: Tensor, *more):
        """function(this rank's part), gathered."""
        ready = self._parts and self._network.training
        rows, mine = (len(images) * size(), images) if ready else (len(images), own(images))
        out = function(mine, *more)
        return tuple(gather(o, rows) for o in out) if isinstance(out, tuple) else gather(out, rows)

    def __call__(self, images: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._run(self._trained, images, "forward")
        return self._run(self._network, images)

    def embed(self, images: Tensor) -> tuple[Tensor, ...]:
        return self._run(self._trained, images, "embed")

    def peek(self, images: Tensor, recorded: bool = False) -> Tensor:
        return self._run(self._network.peek, images, recorded)

    def peek_embedding(self, images: Tensor, recorded: bool = False) -> tuple[Tensor, ...]:
        return self._run(self._network.peek_embedding, images, recorded)

    def keys(self, images: Tensor) -> Tensor:
        return self._run(self._network.keys, images)


class _Passes(nn.Module):
    """DistributedDataParallel watches `forward` only."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor, method: str):
        return getattr(self.encoder, method)(images)


def own(batch: Tensor) -> Tensor:
    """This rank's part; in evaluation the last ones are filled up, so that all are of one size."""
    mine = batch[part(len(batch))]
    missing = -(-len(batch) // size()) - len(mine)
    return torch.cat([mine, batch[:1].expand(missing, *batch.shape[1:])]) if missing else mine


def gather(mine: Tensor, rows: int) -> Tensor:
    return _Gather.apply(mine)[:rows]


class _Gather(torch.autograd.Function):
    """All parts in the order of the ranks. Every rank has the gradient of the whole loss, and takes that of its own
    part, times the number of ranks: DistributedDataParallel divides by it."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        part = part.contiguous()
        ctx.rows, parts = len(part), [torch.empty_like(part) for _ in range(size())]
        dist.all_gather(parts, part)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient[rank() * ctx.rows : (rank() + 1) * ctx.rows] * size()


# ------------------------------------------------------------------ batch normalisation over all ranks


def synchronise(network: nn.Module) -> None:
    """The statistics of the global batch: torch's SyncBatchNorm on cards; it has none for CPUs."""
    for name, child in network.named_children():
        if not isinstance(child, nn.modules.batchnorm._BatchNorm):
            synchronise(child)
        elif next(child.parameters()).is_cuda:
            setattr(network, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
        else:
            child.forward = functools.partial(batch_norm, child)


def batch_norm(norm: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    if not norm.training:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
    dims, shape = (0, *range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)
    kind, x = x.dtype, x.float()  # statistics stay fp32, as in torch's own
    n = x.numel() // x.shape[1] * size()
    mean = _Sum.apply(x.sum(dims)) / n
    centred = x - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(dims)) / n
    if norm.track_running_stats:
        with torch.no_grad():
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (n / (n - 1)), norm.momentum)
    return (centred * ((variance + norm.eps).rsqrt() * norm.weight).view(shape) + norm.bias.view(shape)).to(kind)


class _Sum(torch.autograd.Function):
    """The sum over the ranks; so is its gradient's."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient
