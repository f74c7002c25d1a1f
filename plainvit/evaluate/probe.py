"""Probes of features [N, D] with labels: few-shot least squares, nearest neighbors, logistic regression.

    least_squares(features, labels, classes, l2=1024).predict(queries)
    neighbors(features, labels, classes, queries, ks=(1, 20))
    logistic(features, labels, classes, l2=1e-3).predict(queries)

Few-shot is the paper's measure (4.1): l2-regularized least squares onto {-1, 1}, with the constants of big_vision's
`fewshot_lsr`. k-NN votes are weighted by cosine similarity, as in DINO (arXiv 2104.14294). The linear probe is
multinomial logistic regression by L-BFGS. All run on the CPU; least squares and logistic regression in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.evaluate.grid import choose_best
from plainvit.models.inference import check_finite

L2 = 2.0**10  # big_vision's configs/common_fewshot.py
BIAS = 100.0  # the constant feature: large, so that its weight is hardly regularized
STD_EPS = 1e-5
TEMPERATURE = 0.07  # DINO's
KS = (1, 5, 10, 20, 100, 200)
BLOCK_ROWS = 4096  # of features at once
MAX_ITERATIONS = 500  # of the optimizer at most


@dataclass
class LinearClassifier:
    """A linear classifier of standardized features, in float64."""

    mean: Tensor  # [D]
    std: Tensor  # [D]
    weights: Tensor  # [D, K]
    bias: Tensor  # [K]
    converged: bool = True  # False if the optimizer stopped before the minimum

    def scores(self, features: Tensor) -> Tensor:
        """[M, K]."""
        return standardize(features, self.mean, self.std) @ self.weights + self.bias

    def predict(self, features: Tensor) -> Tensor:
        """[M] classes."""
        _check_features(features)
        return torch.cat([self.scores(part).argmax(1) for part in features.split(BLOCK_ROWS)])


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation of each feature, the latter kept above 0."""
    std, mean = torch.std_mean(features.double(), dim=0, correction=0)
    return mean, std + STD_EPS


def standardize(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (features.double() - mean) / std


def _check_features(features: Tensor) -> None:
    """Raises NonFiniteError if any feature is NaN or Inf."""
    check_finite(features, "row {}".format, "features")


# Few-shot -------------------------------------------------------------------------------------------------------------


def draw_shots(labels: np.ndarray, classes: int, shots: Sequence[int], seed: int) -> dict[int, np.ndarray]:
    """Positions of the first `shots` images of each class in one random order: nested subsets.

    A class with fewer images contributes all. Equal to big_vision's draw for the same order of labels.
    """
    generator = np.random.default_rng(seed)
    members = [generator.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    return {count: np.concatenate([positions[:count] for positions in members]) for count in shots}


def least_squares(features: Tensor, labels: Tensor, classes: int, l2: float = L2) -> LinearClassifier:
    """Least squares onto {-1, 1}, penalized by l2 times the squared weights.

    Standardized features are centered, so big_vision's constant feature is orthogonal to them. Its weight is solved
    separately, so that its square, N x 10^4, does not harm the conditioning.
    """
    _check_features(features)
    mean, std = moments(features)
    width = features.shape[1]
    gram = l2 * torch.eye(width, dtype=torch.float64)
    sums = torch.zeros(classes, width, dtype=torch.float64)
    for part, part_labels in zip(features.split(BLOCK_ROWS), labels.split(BLOCK_ROWS), strict=True):
        rows = standardize(part, mean, std)
        gram.addmm_(rows.T, rows)
        sums.index_add_(0, part_labels, rows)
    cross = (2 * sums - sums.sum(0)).T  # X'Y for Y = 2 onehot - 1
    target_sums = 2 * torch.bincount(labels, minlength=classes).double() - len(labels)
    bias = BIAS**2 * target_sums / (BIAS**2 * len(labels) + l2)
    return LinearClassifier(mean, std, torch.linalg.solve(gram, cross), bias)


# Nearest neighbors ----------------------------------------------------------------------------------------------------


def neighbors(features: Tensor, labels: Tensor, classes: int, queries: Tensor, ks: Sequence[int]) -> dict[int, Tensor]:
    """Predicted classes for each k, by cosine similarity: a neighbor has exp(cosine / TEMPERATURE) votes.

    With equal votes the lower class wins. A zero vector has cosine 0 to all images.
    """
    _check_features(features)
    _check_features(queries)
    bank = F.normalize(features, dim=1)
    predicted: dict[int, list[Tensor]] = {k: [] for k in ks}
    size = max(min(2**25 // len(features), 1024), 1)  # 128 MB of fp32 cosines at once
    for part in queries.split(size):
        cosines = F.normalize(part, dim=1) @ bank.T  # [M, N]
        values, positions = cosines.topk(max(ks))
        nearest, weights = labels[positions], ((values - values[:, :1]) / TEMPERATURE).exp()
        for k in predicted:
            votes = torch.zeros(len(nearest), classes, dtype=weights.dtype)
            predicted[k].append(votes.scatter_add_(1, nearest[:, :k], weights[:, :k]).argmax(1))
    return {k: torch.cat(columns) for k, columns in predicted.items()}


# Linear probe ---------------------------------------------------------------------------------------------------------


def logistic(
    features: Tensor,
    labels: Tensor,
    classes: int,
    l2: float,
    *,
    tolerance: float = 1e-6,
    start: LinearClassifier | None = None,
) -> LinearClassifier:
    """Minimizes mean cross-entropy + l2 / 2 |weights|^2, without a penalty on the bias, by full-batch L-BFGS.

    scikit-learn's LogisticRegression with C = 1 / (l2 N) has the same minimum on standardized features.
    `converged`: no element of the gradient exceeds 2 * tolerance.
    """
    _check_features(features)
    mean, std = moments(features)
    weights = start.weights.clone() if start else torch.zeros(features.shape[1], classes, dtype=torch.float64)
    bias = start.bias.clone() if start else torch.zeros(classes, dtype=torch.float64)
    rows = standardize(features, mean, std)

    def objective() -> Tensor:
        loss, weights.grad, bias.grad = _cross_entropy(rows, labels, weights, bias)
        weights.grad += l2 * weights
        return loss + l2 / 2 * weights.square().sum()

    optimizer = torch.optim.LBFGS(
        (weights, bias),
        max_iter=MAX_ITERATIONS,
        max_eval=2 * MAX_ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(objective)  # pyright: ignore[reportArgumentType]
    objective()  # sets the gradients of the last step
    gradient = max(float(parameter.grad.abs().max()) for parameter in (weights, bias) if parameter.grad is not None)
    return LinearClassifier(mean, std, weights.detach(), bias.detach(), gradient <= 2 * tolerance)


def _cross_entropy(rows: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients, in blocks: never a full [N, K] matrix."""
    loss = torch.zeros((), dtype=torch.float64)
    weights_grad, bias_grad = torch.zeros_like(weights), torch.zeros_like(bias)
    for part, part_labels in zip(rows.split(BLOCK_ROWS), labels.split(BLOCK_ROWS), strict=True):
        log_probability = F.log_softmax(torch.addmm(bias, part, weights), 1)
        loss += F.nll_loss(log_probability, part_labels, reduction="sum")
        error = log_probability.exp_()
        error[torch.arange(len(error)), part_labels] -= 1
        weights_grad.addmm_(part.T, error)
        bias_grad += error.sum(0)
    return loss / len(rows), weights_grad / len(rows), bias_grad / len(rows)


def search_logistic(
    features: Tensor, labels: Tensor, classes: int, l2s: Sequence[float]
) -> tuple[LinearClassifier, float, dict[float, float]]:
    """Returns the probe on all images, its l2, and the held-out accuracy of each l2; a single l2 is not evaluated.

    Each fit starts from the fit of the next larger l2. `choose_best` decides between equals.
    """
    if len(l2s) == 1:
        return logistic(features, labels, classes, l2s[0]), l2s[0], {}
    fitted, held_out = _stratified_split(labels.numpy(), classes)
    tried: dict[float, float] = {}
    fits: dict[float, LinearClassifier] = {}
    last: LinearClassifier | None = None
    for l2 in sorted(l2s, reverse=True):
        last = fits[l2] = logistic(features[fitted], labels[fitted], classes, l2, start=last)
        tried[l2] = float((last.predict(features[held_out]) == labels[held_out]).double().mean())
    best = choose_best(tried)
    return logistic(features, labels, classes, best, start=fits[best]), best, tried


def _stratified_split(labels: np.ndarray, classes: int) -> tuple[Tensor, Tensor]:
    """Positions of the rest and of the held-out fifth of each class, at least one image of a class with two."""
    generator, held_out = np.random.default_rng(0), []
    for label in range(classes):
        members = generator.permutation(np.flatnonzero(labels == label))
        held_out.append(members[: min(max(round(0.2 * len(members)), 1), max(len(members) - 1, 0))])
    chosen = np.sort(np.concatenate(held_out))
    if not len(chosen):
        raise ValueError("no class has two training images, so --linear-l2 cannot be chosen: give a single value")
    return torch.from_numpy(np.setdiff1d(np.arange(len(labels)), chosen)), torch.from_numpy(chosen)
