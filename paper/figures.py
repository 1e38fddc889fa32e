"""The paper's figures from metrics.jsonl and snapshots, drawn with matplotlib (t-SNE by scikit-learn).

Each function asks a Grid for its runs and returns a function that draws them into a matplotlib figure.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import numpy as np

from paper.tables import summaries, title

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#718096"


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folders: list[Path], key: str, scale: float = 100) -> np.ndarray:
    """The mean over the seeds, an entry an epoch."""
    found = [[np.nan if row[key] is None else scale * row[key] for row in rows_of(folder)] for folder in folders]
    return np.mean(found, 0)


def middle(grid) -> tuple[str, float]:
    """The first dataset and its middle q: the setting of Figs. 2, 3, 5, 7 and 8."""
    dataset, qs = next(iter(grid.datasets.items()))
    return dataset, qs[1]


FIG3_EPOCHS, FIG6_EPOCHS = (100, 149, 200, 300, 400, 500, 600, 700), (1, 100, 200, 300, 400, 500)  # of 1,000


def scaled(grid, published: tuple[int, ...]) -> list[int]:
    """The paper's epochs, as shares of the run."""
    return sorted({max(1, round(grid.epochs * epoch / 1000)) for epoch in published})


def where(grid) -> str:
    dataset, q = middle(grid)
    return f"{dataset}, q = {q:g}, eta = 0.3"


# ------------------------------------------------------------------ Figs. 2 to 6


def fig2(grid):
    """Bayes error rate, hit accuracy and validation score over the epochs, without correction."""
    dataset, q = middle(grid)
    folders = grid.ask(dataset, "pico", False, q, 0.3, seeds=grid.seeds[:1])

    def draw(figure):
        axes = figure.subplots(1, 3)
        epochs = np.arange(1, 1 + len(rows_of(folders[0])))
        bayes, phi_c, phi_n, val = (curve(folders, key) for key in ("bayes_error", "phi_c", "phi_n", "val"))
        low, high_c, high_n = int(np.nanargmin(bayes)), int(np.nanargmax(phi_c)), int(np.nanargmax(phi_n))
        e0 = rows_of(folders[0])[-1]["e0"]
        axes[0].plot(epochs, bayes, color=BLUE)
        axes[1].plot(epochs, phi_c, color=BLUE, label="phi_c (Eq. 7), clean")
        axes[1].plot(epochs, phi_n, color=ORANGE, label="phi_n (Eq. 8), noisy")
        axes[1].legend()
        axes[2].plot(epochs[:e0], val[:e0], color=BLUE)
        if e0 and not np.isnan(val[e0:]).all():  # then it is trained on: no longer what the paper draws
            axes[2].plot(epochs[e0 - 1 :], val[e0 - 1 :], ":", color=BLUE, label="trained on")
            axes[2].legend()
        marked = [(0, bayes, low), (1, phi_c, high_c), (1, phi_n, high_n), *([(2, val, e0 - 1)] if e0 else [])]
        for panel, values, k in marked:
            axes[panel].plot([epochs[k]], [values[k]], "o", color=RED, zorder=5)
        for axis, name in zip(
            axes,
            (
                f"(a) Bayes error rate\nminimum {bayes[low]:.1f} at epoch {epochs[low]}",
                f"(b) hit accuracy\nmaxima {phi_c[high_c]:.1f} and {phi_n[high_n]:.1f}",
                f"(c) validation score\ne0 = {e0 or 'not found'}",
            ),
            strict=True,
        ):
            axis.set(title=name, xlabel="epoch", ylabel="per cent")
        figure.suptitle(f"Fig. 2: PiCO without correction; {where(grid)}")

    draw.size = (13, 4)
    return draw


def fig3(grid):
    """Margins tau of clean and noisy samples with a mixture of two Gaussians, as training goes on."""
    dataset, q = middle(grid)
    epochs = scaled(grid, FIG3_EPOCHS)
    folder = grid.ask(dataset, "pico", False, q, 0.3, seeds=grid.seeds[:1], snapshots=tuple(epochs))[0]

    def draw(figure):
        import torch

        import irnet
        from paper.baselines import two_gaussians

        axes = figure.subplots(2, 4).flatten()
        for axis, epoch in zip(axes, epochs, strict=False):
            with np.load(folder / f"snapshot-{epoch:04d}.npz") as file:
                tau, noisy = file["tau"], file["noisy"]
            tau, noisy = tau[np.isfinite(tau)], noisy[np.isfinite(tau)]
            bins = np.linspace(tau.min(), tau.max(), 41)
            width = bins[1] - bins[0]
            for part, colour, name in ((~noisy, BLUE, "clean"), (noisy, ORANGE, "noisy")):
                share = part.mean()
                axis.hist(tau[part], bins, weights=np.full(part.sum(), share / part.sum() / width), color=colour,
                          alpha=0.5, label=name)  # fmt: skip
            shares, means, variances, low = (t.numpy() for t in two_gaussians(torch.tensor(tau), 200, 1e-8, 1e-6))
            x = np.linspace(tau.min(), tau.max(), 300)
            for k in range(2):
                density = np.exp(-((x - means[k]) ** 2) / (2 * variances[k])) / np.sqrt(2 * np.pi * variances[k])
                axis.plot(x, shares[k] * density, color=GREY if k else GREEN, label=f"Gaussian {k + 1}")
            error = irnet.bayes_error(torch.tensor(tau), torch.tensor(noisy))
            mixture = _balanced_error(low > 0.5, noisy)
            threshold = _balanced_error(tau <= -grid.tau, noisy)
            errors = f"mixture {mixture:.2f}, threshold {threshold:.2f}"
            axis.set_title(f"epoch {epoch}: P(error) {error:.2f}\n{errors}", fontsize=9)
            axis.set_xlabel("tau (Eq. 4)")
        axes[0].set_ylabel("density")
        axes[0].legend(fontsize=7)
        figure.suptitle(
            f"Fig. 3: tau of clean and noisy samples, PiCO without correction; {where(grid)}. P(error): Eq. 6.\n"
            "Below it the detection errors, mean of both kinds, of two Gaussians and of IRNet's threshold",
            fontsize=10,
        )

    draw.size = (14, 7)
    return draw


def _balanced_error(called_noisy: np.ndarray, noisy: np.ndarray) -> float:
    """The mean of missed noisy and wrongly called clean samples, each as a share of its kind."""
    return float(((~called_noisy[noisy]).mean() + called_noisy[~noisy].mean()) / 2)


def fig4(grid):
    """Transductive accuracy over the epochs, with and without IRNet, by q."""
    bases = ("cc", "proden", "pico")
    cells = [(d, q) for d in grid.datasets for q in grid.datasets[d]]
    asked = {(d, q, b, i): grid.ask(d, b, i, q, 0.3) for d, q in cells for b in bases for i in (False, True)}

    def draw(figure):
        axes = np.atleast_1d(figure.subplots(len(grid.datasets), 3, sharey=True)).flatten()
        for axis, (d, q) in zip(axes, cells, strict=True):
            for (b, colour), i in itertools.product(zip(bases, (GREEN, ORANGE, BLUE), strict=True), (False, True)):
                values = curve(asked[d, q, b, i], "transductive")
                name = title(b) + (" w/ IRNet" if i else "")
                x = np.arange(1, 1 + len(values))
                known = ~np.isnan(values)
                axis.plot(x[known], values[known], color=colour, linestyle="-" if i else "--", label=name)
            axis.set(title=f"{d}, q = {q:g}", xlabel="epoch")
        axes[0].set_ylabel("training samples classified right, per cent")
        axes[-1].legend(fontsize=8)
        figure.suptitle("Fig. 4: transductive accuracy, eta = 0.3, mean of the seeds")

    draw.size = (13, 4.2 * len(grid.datasets))
    return draw


def fig5(grid):
    """Noise level of the training data and test accuracy over the epochs, with and without IRNet."""
    dataset, q = middle(grid)
    asked = {i: grid.ask(dataset, "pico", i, q, 0.3) for i in (False, True)}

    def draw(figure):
        axes = figure.subplots(1, 2)
        panels = (("noise_level", "(a) noise level of the training data"), ("test", "(b) test accuracy"))
        for axis, (key, name) in zip(axes, panels, strict=True):
            for i, colour in ((False, ORANGE), (True, BLUE)):
                values = curve(asked[i], key)
                name_of = "PiCO with IRNet" if i else "PiCO"
                axis.plot(np.arange(1, 1 + len(values)), values, color=colour, label=name_of)
            for k, e0 in enumerate({e0 for e0 in summaries(asked[True], "e0") if e0}):
                axis.axvline(e0, color=GREY, linestyle=":", label=None if k else "e0")
            axis.set(title=name, xlabel="epoch", ylabel="per cent")
            axis.legend()
        seeds = f"seed {grid.seeds[0]}" if len(grid.seeds) == 1 else f"mean of {len(grid.seeds)} seeds"
        figure.suptitle(f"Fig. 5: {where(grid)}, {seeds}")

    draw.size = (10, 4)
    return draw


def fig6(grid):
    """Sensitivity to tau_epsilon and to e0."""
    dataset, q = middle(grid)
    auto = grid.ask(dataset, "pico", True, q, 0.3)
    taus = [round(grid.tau * factor, 6) for factor in (0, 0.5, 1, 2, 4, 8)]
    by_tau = {tau: auto if tau == grid.tau else grid.ask(dataset, "pico", True, q, 0.3, tau=tau) for tau in taus}
    by_start = {e: grid.ask(dataset, "pico", True, q, 0.3, e0=e) for e in scaled(grid, FIG6_EPOCHS)}

    def draw(figure):
        axes = figure.subplots(1, 2, sharey=True)
        for axis, asked, name in ((axes[0], by_tau, "tau_epsilon"), (axes[1], by_start, "e0")):
            values = [summaries(folders, "last") for folders in asked.values()]
            mean = [100 * statistics.mean(v) for v in values]
            deviation = [100 * statistics.stdev(v) if len(v) > 1 else 0 for v in values]
            places = range(len(asked))
            axis.errorbar(places, mean, deviation, color=BLUE, marker="o", capsize=3)
            axis.set_xticks(places, [f"{key:g}" for key in asked])
            axis.set(xlabel=name, title=f"({'ab'[name == 'e0']}) {name}")
        last, found = summaries(auto, "last"), ", ".join(str(e0) for e0 in summaries(auto, "e0"))
        axes[1].axhline(100 * statistics.mean(last), color=ORANGE, linestyle="--", label=f"found: {found}")
        axes[1].legend()
        axes[0].set_ylabel("last test accuracy, per cent")
        figure.suptitle(f"Fig. 6: PiCO with IRNet; {where(grid)}; mean and deviation of {len(auto)} seeds")

    draw.size = (10, 4)
    return draw


# ------------------------------------------------------------------ Figs. 7 and 8: t-SNE


def embed(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.manifold import TSNE

    with np.load(path) as file:
        features, labels = file["features"][:2000], file["labels"][:2000]
    return TSNE(random_state=0, init="pca").fit_transform(features), labels


def scatter(axis, path: Path, name: str) -> None:
    points, labels = embed(path)
    axis.scatter(*points.T, c=labels, cmap="tab10", s=6)
    axis.set(title=name, xticks=[], yticks=[])


def fig7(grid):
    """t-SNE of the test features of eight methods at the end."""
    dataset, q = middle(grid)
    methods = [("log", 0), ("rc", 0), ("pico", 0), ("mse", 0), ("sce", 0), ("gce", 0), ("mae", 0), ("pico", 1)]
    last = grid.epochs
    one = dict(seeds=grid.seeds[:1], snapshots=(last,))
    asked = [grid.ask(dataset, base, bool(i), q, 0.3, **one)[0] for base, i in methods]

    def draw(figure):
        axes = figure.subplots(2, 4).flatten()
        for axis, folder, (base, i) in zip(axes, asked, methods, strict=True):
            name = title("irnet" if i else base)
            scatter(axis, folder / f"snapshot-{last:04d}.npz", name)
        figure.suptitle(f"Fig. 7: t-SNE of the test features (colour: true class); {where(grid)}")

    draw.size = (13, 7)
    return draw


def fig8(grid):
    """t-SNE of the test features of IRNet with PiCO as training goes on."""
    dataset, q = middle(grid)
    epochs = sorted({max(1, round(grid.epochs * share)) for share in (0.1, 0.2, 0.5, 0.91)})
    folder = grid.ask(dataset, "pico", True, q, 0.3, seeds=grid.seeds[:1], snapshots=tuple(epochs))[0]

    def draw(figure):
        for axis, epoch in zip(np.atleast_1d(figure.subplots(1, len(epochs))), epochs, strict=True):
            scatter(axis, folder / f"snapshot-{epoch:04d}.npz", f"epoch {epoch}")
        figure.suptitle(f"Fig. 8: t-SNE of the test features (colour: true class), IRNet with PiCO; {where(grid)}")

    draw.size = (13, 3.8)
    return draw


FIGURES = dict(fig2=fig2, fig3=fig3, fig4=fig4, fig5=fig5, fig6=fig6, fig7=fig7, fig8=fig8)
