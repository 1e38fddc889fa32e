"""A run's state after an epoch, and its bytes: those of torch.save with a digest of them all at the end, so that a
damaged file is known; `torch.load` reads them as they are.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle

import torch

from harness import InputError
from harness.ranks import say

DIGEST = 32  # bytes at the end of a checkpoint
PARTS = ("network", "optimizer", "base", "refine", "precision")


class Damaged(Exception):
    """Not a checkpoint, or not as it was written."""


def pack(state: dict) -> bytearray:
    """torch.save's bytes and their digest."""
    buffer = io.BytesIO()  # not straight to the disk: where that is full, torch's own writer aborts the process
    torch.save(state, buffer)
    buffer.write(_digest(buffer.getbuffer()))
    return buffer.getbuffer()


def copied(state):
    """The same with tensors of its own, on the host."""
    if torch.is_tensor(state):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def unpack(content: bytes) -> dict:
    """The state on the CPU. Nothing is read from bytes whose digest is wrong, and code never."""
    if len(content) <= DIGEST:
        raise Damaged("it is empty" if not content else "it is cut off")
    if _digest(memoryview(content)[:-DIGEST]) != content[-DIGEST:]:
        raise Damaged("it is damaged, or no checkpoint of this program")
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise Damaged(str(error).splitlines()[0]) from None


def _digest(content) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST, person=b"irnet").digest()


# ------------------------------------------------------------------ what is in it


def state_of(learner, samples, fingerprint: str) -> dict:
    """All that the next epoch depends on."""
    parts = {name: getattr(learner, name).state_dict() for name in PARTS}
    randomness = {name: views.generator.get_state() for name, views in _drawing(learner).items()}
    randomness |= dict(torch_generator=torch.get_rng_state())
    split = dict(before=samples.before, held_out=samples.held_out, pool=samples.pool)
    split |= {} if samples.p_outside is None else dict(p_outside=samples.p_outside)
    return parts | randomness | dict(data=fingerprint, said=samples.dataset.said) | split


def _drawing(learner) -> dict:
    """What draws on the device, by the name of its state."""
    return dict(generator=learner.views, irnet_generator=learner.augmented)


def restore(state: dict, learner, samples, fingerprint: str) -> tuple[list[dict], list[dict]]:
    """Puts a state back -> the rows and the histograms so far."""
    if state["data"] != fingerprint or not torch.equal(state["before"], samples.before):
        raise InputError("--resume: the data are not those that the run began with")
    if state.get("said", samples.dataset.said) != samples.dataset.said:
        raise InputError("--resume: the votes or decisions are not those that the run began with")
    samples.held_out, samples.pool = (state[name].to(learner.device) for name in ("held_out", "pool"))
    samples.p_outside = state["p_outside"].to(learner.device) if "p_outside" in state else None
    for name in PARTS:
        getattr(learner, name).load_state_dict(state.get(name, {}))
    for name, views in _drawing(learner).items():
        if name in state:
            views.generator.set_state(state[name].cpu())
        elif learner.refine.started:
            say(f"note: an older version's checkpoint, without {name}: the run goes on, but not to the bit")
    torch.set_rng_state(state["torch_generator"].cpu())
    return json.loads(state["rows"]), json.loads(state.get("histograms", "[]"))
