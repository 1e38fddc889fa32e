"""Caution with one's own data: the noise report at e0, and whether labels are moved in at all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from crowd import noise
from crowd.annotators import Votes, heard
from data import Dataset, Samples
from harness.folder import plain

BEYOND = 1.35  # log-likelihood: half of chi-square's 95 % at one degree of freedom, at one end
SLIGHT = 0.02  # a rate that a misfit can feign
WRITTEN = "eta low high temperature model fits classes together".split()


def votes_of(d: Dataset) -> Votes | None:
    return heard(d.votes, d.annotators, d.annotator_names, d.num_classes)


def guard(found: noise.Report, tau: float) -> float:
    """tau, or inf: nothing is moved. To move a label in is to say that the truth is outside the set. The sets of
    the held-out samples judge that: they must be more probable if it may be there than if it never is, by more than
    chance; and where no model fits the labels, not by a rate so slight that the misfit itself may be it. So the
    less is known, the less is permitted. That half of the moves be right is not asked: a true label that was inside
    stays there."""
    return tau if found.gain > BEYOND and (found.fits or found.eta >= SLIGHT) else math.inf


@torch.no_grad()
def look(samples: Samples, p: Tensor, features: Tensor | None, tau: float | None) -> dict:
    """What a run on one's own data writes at e0: its noise_estimate and, with tau, the tau that the guard permits.
    p [N, C], features [N, D]: the classifier's probabilities of all training samples, and its features."""
    held, sets = samples.held_out.cpu(), samples.before
    if samples.out is not None:  # of every sample a network says something that has not seen it
        p, held, features = samples.out, torch.arange(len(sets)), None
    found = noise.report(p, sets, held, votes_of(samples.dataset), features)
    estimate = plain({name: getattr(found, name) for name in WRITTEN})
    return dict(noise_estimate=estimate) | ({} if tau is None else dict(tau=guard(found, tau)))
