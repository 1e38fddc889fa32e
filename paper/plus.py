"""IRNet's second wind (`--irnet plus`): what its successors know, put into the plug-in. In three lines:

    refine = Plus(candidates, tau=0.004, epochs=epochs)             # in place of irnet.IRNet
    refine.begin_epoch(lambda function: function(network, x))       # before each epoch: x all plain training images
    loss = loss + refine.mixed(network, x, weights, index)          # in each step

votes: the neighbours' votes on the sets as they were given (PALS) are one more f in Eqs. 10 to 12. A sample's own
    set has no vote, so that they are not fitted to it, as f(x) is by then; with --tau auto it is heard besides
    (paper/votes.py). now: with the sets as they are by now.
back: a set whose label moved in is no longer their winner is again as it was given.
mix: cross entropy on pairs of images mixed with their label weights (PiCO+, ALIM), ramped up after e0.
Give features(network, x) [N, D] for a network not of models.py; f(network, x), Eq. 4's, for --tau auto's guard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import irnet
import models
from losses import weighted_ce
from paper import tau, votes
from paper.baselines import mixup

PARTS = ("votes", "mix")  # of plus; the others were measured and lost
RAMP = 10  # epochs


class Plus(irnet.IRNet):
    def __init__(self, candidates: Tensor, *args, parts=PARTS, generator=None, f=None, features=None, **more):
        super().__init__(candidates, *args, **more)
        self.parts, self.generator, self.f, self.features = parts, generator, f, features or models.features
        self.before, self.notes = candidates.clone(), {}  # notes: of the epoch, for its row
        self.voices = None  # of the epoch
        self.missing = None  # --tau auto's: the share of missing truths; None: own sets are not heard
        self.expected = None  # and the accuracy that the network expected of itself at e0

    def begin_epoch(self, look, weights: Tensor | None = None) -> None:
        """Before an epoch; look(function) -> function(network, x) of all plain training images x."""
        self.voices = None  # those of the epoch before need not lie beside the new ones
        self.notes, asks = {}, {"votes", "now", "back"} if self.tau < irnet.INF else {"back"}
        if self.started and asks & set(self.parts):
            sets = self.candidates.clone() if "now" in self.parts else self.before
            self.voices = votes.Voices(look(self.features), sets, self.generator)
            if self.f is not None and len(self.epoch.curve) == self.e0 and self.tau < irnet.INF:
                self.notes = tau.guarded(self, self.voices.winners(), look(self.f))
            if "back" in self.parts:
                self.take_back(self.voices.winners(self.missing), weights)

    @torch.no_grad()
    def take_back(self, winner: Tensor, weights: Tensor | None = None) -> None:
        """Undoes the corrections whose label is not the winner [N]: S as given, its weights sum to 1 again."""
        undone = (self.corrected_at > 0) & (self.corrected_to != winner)
        gone = undone[:, None] & self.candidates & ~self.before
        self.candidates &= ~gone
        self.corrected_at.masked_fill_(undone, 0)
        self.corrected_to.masked_fill_(undone, -1)
        if weights is not None:
            weights.masked_fill_(gone, 0.0)
            total = (weights * self.candidates).sum(1, keepdim=True).clamp_min(1e-12)
            weights[:] = torch.where(undone[:, None] & self.candidates, weights / total, weights)

    @torch.no_grad()
    def correct(self, index, views, weights=None):
        """As IRNet's, and the neighbours must agree: their winner as a one-hot f passes Eq. 11 for every tau."""
        if {"votes", "now"} & set(self.parts) and self.tau < irnet.INF:
            if self.voices is None:
                raise ValueError("begin_epoch comes before the first correction")
            winner = self.voices.winners(self.missing, index)  # of those alone that have their turn
            views = [*views, F.one_hot(winner, self.candidates.shape[1]).float()]
        return super().correct(index, views, weights)

    def mixed(self, network, x: Tensor, weights: Tensor | None, index: Tensor) -> Tensor | float:
        """The further loss of a batch: view x of the samples index, label weights [N, C]; 0 until e0."""
        if not self.started or "mix" not in self.parts or weights is None:
            return 0.0
        target = weights[index] * self.candidates[index]  # LWC's weights sum to 1 only once they were updated
        x, target = mixup(x, target / target.sum(1, keepdim=True).clamp_min(1e-12), self.generator)
        return min(1.0, (len(self.epoch.curve) + 1 - self.e0) / RAMP) * weighted_ce(network(x), target)

    def state_dict(self) -> dict:
        return super().state_dict() | {"missing": self.missing, "expected": self.expected}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.missing, self.expected = state.get("missing"), state.get("expected")


def make(parts: str, base, guarded: bool, generator: Generator, *args, **more) -> Plus:
    """By --irnet's value; guarded: by the base's own f."""
    parts = PARTS if parts == "plus" else tuple(parts.split("+"))
    parts = parts if base.weights is not None else tuple(p for p in parts if p != "mix")
    base.mixes = base.mixes or "mix" in parts  # every rank needs the whole batch then
    return Plus(*args, parts=parts, generator=generator, f=base.probabilities if guarded else None, **more)
