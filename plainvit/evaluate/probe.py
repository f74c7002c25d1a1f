"""What features [N, D] with labels are worth: few-shot least squares, nearest neighbours, a linear probe.

    solved = solve(features, labels, classes)           closed form; every l2 after it costs one product
    solved.predict(others, l2=1024)
    neighbours(features, labels, classes, others, ks=(1, 20))
    logistic(features, labels, classes, l2=1e-3).predict(others)

Few-shot is the paper's measure (4.1): l2-regularised least squares onto {-1, 1}, with the constants of big_vision's
`fewshot_lsr`. k-NN by cosine, weighted as in DINO (arXiv 2104.14294). The linear probe is multinomial logistic
regression by L-BFGS. Everything runs on the CPU in float64 unless said otherwise, in parts of bounded memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.evaluate.grid import choose_best
from plainvit.models.inference import check_finite

SHOTS, SEEDS, L2 = (1, 5, 10, 25), 3, 2.0**10  # big_vision's configs/common_fewshot.py
L2_SWEEP = tuple(2.0**power for power in range(-10, 20))  # of big_vision's earlier version
BIAS = 100.0  # the constant feature: so large that its weight is hardly regularised
STD_EPS = 1e-5
TEMPERATURE = 0.07  # DINO's
KS = (1, 5, 10, 20, 100, 200)
LINEAR_L2 = tuple(10.0**power for power in range(-6, 3))  # of the mean loss; tried on held-out training images
ROWS, QUICK = 4096, 1024  # of features at once; of scores, which then stay in the processor's cache


def parts(count: int, size: int = ROWS) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


# Few-shot -------------------------------------------------------------------------------------------------------------


def draw_shots(labels: np.ndarray, classes: int, shots: Sequence[int], seed: int) -> dict[int, np.ndarray]:
    """Places of the first `shots` images of each class in one random order, so that more shots include fewer.

    A class with fewer images gives all that it has, as in big_vision, whose draw this is for the same order of labels.
    """
    generator = np.random.default_rng(seed)
    members = [generator.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    return {count: np.concatenate([places[:count] for places in members]) for count in shots}


@dataclass
class LeastSquares:
    """The solutions for every l2: weights = left diag(1 / (eigenvalues + l2)) right on standardised features.

    Standardised features are centred, so big_vision's constant feature is orthogonal to them: its weight is solved
    apart, and its square, N x 10^4, does not spoil the conditioning of the rest.
    """

    mean: Tensor  # [D]
    std: Tensor  # [D]
    eigenvalues: Tensor  # [R], R the smaller of N and D
    left: Tensor  # [D, R]
    right: Tensor  # [R, K]
    target_sums: Tensor  # [K], of the {-1, 1} targets
    count: int

    def weights(self, l2: float) -> tuple[Tensor, Tensor]:
        """(weights [D, K] of the standardised features, bias [K])."""
        return self.left @ (self.right / (self.eigenvalues + l2).unsqueeze(1)), self.bias(l2)

    def bias(self, l2: float) -> Tensor:
        return BIAS**2 * self.target_sums / (BIAS**2 * self.count + l2)

    def scores(self, features: Tensor, l2: float) -> Tensor:
        """[M, K] in float64."""
        weights, bias = self.weights(l2)
        return standardised(features, self.mean, self.std) @ weights + bias

    def predict(self, features: Tensor, l2: float = L2) -> Tensor:
        """[M] classes."""
        return self.sweep(features, (l2,))[l2]

    def sweep(self, features: Tensor, l2s: Sequence[float] = L2_SWEEP) -> dict[float, Tensor]:
        """The classes for each l2, as float64 has them; see _Answers for how most are found sooner."""
        _check_features(features)
        found = {l2: torch.empty(len(features), dtype=torch.long) for l2 in l2s}
        weights = {l2: (self.right / (self.eigenvalues + l2).unsqueeze(1), self.bias(l2)) for l2 in sorted(l2s)}
        for block in parts(len(features), 16 * QUICK):
            answers = _Answers(standardised(features[block], self.mean, self.std) @ self.left)  # [M, R]
            for l2, (matrix, bias) in weights.items():
                found[l2][block] = answers.to(matrix, bias)
        return found


class _Answers:
    """argmax(rows weights + bias) for one weights after the other, each as float64 has it.

    Scores are computed in float32, and again in float64 where the best two are closer than its errors. Where they are
    further apart than weights that changed little can move them, the last answer stands.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.quick, self.norms = rows, rows.float(), rows.norm(dim=1)
        self.last: tuple[Tensor, Tensor] | None = None  # weights and bias of what follows
        self.guesses, self.margins = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows))

    def to(self, weights: Tensor, bias: Tensor) -> Tensor:
        everyone = torch.arange(len(self.rows))
        rows = everyone
        if self.last is not None:
            drift = (weights - self.last[0]).norm(dim=0).max(), (bias - self.last[1]).abs().max()
            rows = everyone[self.margins <= 2 * (self.norms * drift[0] + drift[1])]
        if 2 * len(rows) > len(everyone) or self.last is None:
            self.guesses, self.margins = self._compute(everyone, weights, bias)
            self.last = weights, bias
            return self.guesses
        found = self.guesses.clone()
        found[rows] = self._compute(rows, weights, bias)[0]
        return found

    def _compute(self, rows: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """(classes, by how much the best at least leads) of some rows."""
        found, margins = torch.empty(len(rows), dtype=torch.long), torch.zeros(len(rows), dtype=torch.float64)
        if len(bias) == 1:
            return found.zero_(), margins
        quick_weights, quick_bias = weights.float(), bias.float()
        # float32's error in a product of R terms grows as the root of R, and with both norms; 8: room to spare
        noise = 8 * math.sqrt(len(weights)) * torch.finfo(torch.float32).eps
        noises = noise * (self.norms[rows] * weights.norm(dim=0).max() + bias.abs().max())
        for part in parts(len(rows), QUICK):
            two = torch.addmm(quick_bias, self.quick[rows[part]], quick_weights).topk(2)
            found[part], margins[part] = two.indices[:, 0], two.values[:, 0].double() - two.values[:, 1] - noises[part]
        unsure = torch.nonzero(margins <= 0).squeeze(1)
        for part in parts(len(unsure), QUICK):
            found[unsure[part]] = (self.rows[rows[unsure[part]]] @ weights + bias).argmax(1)
        return found, margins


def solve(features: Tensor, labels: Tensor, classes: int) -> LeastSquares:
    """Least squares onto {-1, 1} for every l2 at once, by the features' Gram matrix or the images', the smaller one."""
    _check(features, labels, classes)
    mean, std = moments(features)
    std = std + STD_EPS
    counts = torch.bincount(labels, minlength=classes).double()
    sums = 2 * counts - len(labels)
    if len(features) >= features.shape[1]:
        gram, products = _normal_equations(features, labels, mean, std, classes)
        eigenvalues, turn = torch.linalg.eigh(gram)
        left, right = turn, turn.T @ products
    else:
        rows = standardised(features, mean, std)
        eigenvalues, turn = torch.linalg.eigh(rows @ rows.T)
        left, right = rows.T @ turn, turn.T @ (2 * F.one_hot(labels, classes).double() - 1)
    return LeastSquares(mean, std, eigenvalues.clamp(min=0), left, right, sums, len(labels))


def _normal_equations(
    features: Tensor, labels: Tensor, mean: Tensor, std: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """X'X [D, D] and X'Y [D, K]. As Y is 2 onehot - 1, X'Y is twice the sums of each class less the sum of all."""
    width = features.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64)
    sums = torch.zeros(classes, width, dtype=torch.float64)
    for part in parts(len(features)):
        rows = standardised(features[part], mean, std)
        gram.addmm_(rows.T, rows)
        sums.index_add_(0, labels[part], rows)
    return gram, (2 * sums - sums.sum(0)).T


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature (that of the population) in float64."""
    mean = sum((features[part].double().sum(0) for part in parts(len(features))), torch.zeros(())) / len(features)
    squares = ((features[part].double() - mean).square().sum(0) for part in parts(len(features)))
    return mean, (sum(squares, torch.zeros(())) / len(features)).sqrt()


def standardised(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (features.double() - mean) / std


def choose_l2(accuracies: Mapping[str, Mapping[float, float]]) -> dict[str, float]:
    """For each data set the l2 with the best mean rank on all the others: its own test images have no say.

    This is the choice of big_vision's earlier version ("leave-self-out"); the present one fixes l2 at 2^10. Of equals
    the smallest l2 is taken. A set that stands alone has no others, and gets none.
    """
    ranks = {name: _ranks(list(of.values())) for name, of in accuracies.items()}
    found: dict[str, float] = {}
    for name, of in accuracies.items():
        others = [rank for other, rank in ranks.items() if other != name]
        if others:
            found[name] = list(of)[int(np.mean(others, axis=0).argmax())]
    return found


def _ranks(values: list[float]) -> np.ndarray:
    """From 0 for the lowest; equals share their mean rank."""
    order = np.asarray(values)
    below, same = (order[None] < order[:, None]).sum(1), (order[None] == order[:, None]).sum(1)
    return below + (same - 1) / 2


# Nearest neighbours ---------------------------------------------------------------------------------------------------


@dataclass
class Neighbours:
    """The classes that k neighbours vote for: one vote each, or exp(cosine / temperature) each."""

    majority: dict[int, Tensor]
    weighted: dict[int, Tensor]


def neighbours(
    features: Tensor,
    labels: Tensor,
    classes: int,
    others: Tensor,
    ks: Sequence[int] = KS,
    temperature: float = TEMPERATURE,
) -> Neighbours:
    """k-NN by cosine. Of equally near images the earlier one counts; of classes with equal votes the lower number wins.

    In the features' own precision. A vector of zeros is at cosine 0 of all others.
    """
    _check(features, labels, classes)
    _check_features(others)
    if not ks or min(ks) < 1 or max(ks) > len(features):
        raise ValueError(f"k is between 1 and the {len(features):,} training images, got {', '.join(map(str, ks))}")
    if temperature <= 0:
        raise ValueError(f"the temperature is above 0, got {temperature:g}")
    bank = F.normalize(features, dim=1)
    found = Neighbours(*({k: torch.empty(len(others), dtype=torch.long) for k in ks} for _ in range(2)))
    size = max(min(2**25 // len(features), 1024), 1)  # 256 MB of float64 cosines at once
    for part in parts(len(others), size):
        cosines = F.normalize(others[part], dim=1) @ bank.T  # [M, N]
        values, places = _nearest(cosines, max(ks))
        votes, weights = labels[places], (values / temperature - values[:, :1] / temperature).exp()
        for k in ks:
            for kind, weight in ((found.majority, torch.ones_like(weights)), (found.weighted, weights)):
                counts = torch.zeros(len(votes), classes, dtype=weights.dtype)
                kind[k][part] = counts.scatter_add_(1, votes[:, :k], weight[:, :k]).argmax(1)
    return found


def _nearest(cosines: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of each row [M, k], in order, equals by their place. topk orders equals as it likes."""
    values, places = cosines.topk(k)
    tied = (cosines >= values[:, -1:]).sum(1) > k  # which of some equals came in is topk's choice
    tied |= (values[:, 1:] == values[:, :-1]).any(1)
    if tied.any():
        order = cosines[tied].sort(dim=1, descending=True, stable=True)
        values[tied], places[tied] = order.values[:, :k], order.indices[:, :k]
    return values, places


# Linear probe ---------------------------------------------------------------------------------------------------------


@dataclass
class Logistic:
    """A softmax on standardised features."""

    mean: Tensor  # [D]
    std: Tensor  # [D]
    weights: Tensor  # [D, K]
    bias: Tensor  # [K]
    loss: float  # the objective that was reached
    converged: bool

    def scores(self, features: Tensor) -> Tensor:
        return standardised(features, self.mean, self.std) @ self.weights + self.bias

    def predict(self, features: Tensor) -> Tensor:
        _check_features(features)
        found = [self.scores(features[part]).argmax(1) for part in parts(len(features))]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)


def logistic(
    features: Tensor,
    labels: Tensor,
    classes: int,
    l2: float,
    *,
    steps: int = 500,
    tolerance: float = 1e-6,
    start: Logistic | None = None,
) -> Logistic:
    """Minimises mean cross-entropy + l2 / 2 |weights|^2, the bias free, by full-batch L-BFGS in float64.

    scikit-learn's LogisticRegression has the same minimum for C = 1 / (l2 N) on features standardised beforehand. It
    has converged where no part of the gradient is above the tolerance.
    """
    _check(features, labels, classes)
    if l2 < 0:
        raise ValueError(f"l2 is at least 0, got {l2:g}")
    mean, std = moments(features)
    std = std + STD_EPS
    weights = start.weights.clone() if start else torch.zeros(features.shape[1], classes, dtype=torch.float64)
    bias = start.bias.clone() if start else torch.zeros(classes, dtype=torch.float64)
    rows = standardised(features, mean, std)

    def objective() -> Tensor:
        loss, weights.grad, bias.grad = _cross_entropy(rows, labels, weights, bias)
        weights.grad += l2 * weights
        return loss + l2 / 2 * weights.square().sum()

    loss, steepest = _minimise(objective, (weights, bias), steps, tolerance)
    return Logistic(mean, std, weights.detach(), bias.detach(), loss, steepest <= 2 * tolerance)


def _minimise(
    objective: Callable[[], Tensor], over: Sequence[Tensor], steps: int, tolerance: float
) -> tuple[float, float]:
    """(what the objective, which fills in the gradients, has come to; the steepest part of its gradient there)."""
    optimiser = torch.optim.LBFGS(
        over,
        max_iter=steps,
        max_eval=2 * steps,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimiser.step(objective)  # pyright: ignore[reportArgumentType]
    loss = float(objective())
    return loss, max(float(one.grad.abs().max()) for one in over if one.grad is not None)


def _cross_entropy(rows: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients; part by part, so that no [N, K] is ever held."""
    loss = torch.zeros((), dtype=torch.float64)
    by_weights, by_bias = torch.zeros_like(weights), torch.zeros_like(bias)
    for part in parts(len(rows)):
        log_probability = F.log_softmax(torch.addmm(bias, rows[part], weights), 1)
        loss += F.nll_loss(log_probability, labels[part], reduction="sum")
        error = log_probability.exp_()
        error[torch.arange(len(error)), labels[part]] -= 1
        by_weights.addmm_(rows[part].T, error)
        by_bias += error.sum(0)
    return loss / len(rows), by_weights / len(rows), by_bias / len(rows)


def search_logistic(
    features: Tensor, labels: Tensor, classes: int, l2s: Sequence[float] = LINEAR_L2
) -> tuple[Logistic, float, dict[float, float]]:
    """(the probe on all images, its l2, what each l2 gave on a held-out part of the training images).

    Each fit starts from that of the next greater l2. Of equal ones the middle is taken (`choose_best`).
    """
    inside, outside = _hold_out(labels.numpy(), classes)
    tried: dict[float, float] = {}
    fits: dict[float, Logistic] = {}
    last: Logistic | None = None
    for l2 in sorted(l2s, reverse=True):
        last = fits[l2] = logistic(features[inside], labels[inside], classes, l2, start=last)
        tried[l2] = float((last.predict(features[outside]) == labels[outside]).double().mean())
    best = choose_best(tried)
    return logistic(features, labels, classes, best, start=fits[best]), best, tried


def _hold_out(labels: np.ndarray, classes: int) -> tuple[Tensor, Tensor]:
    """(rest, held out): a fifth of each class, at least one image of it where it has two."""
    generator, held = np.random.default_rng(0), []
    for label in range(classes):
        members = generator.permutation(np.flatnonzero(labels == label))
        held.append(members[: max(min(max(round(0.2 * len(members)), 1), len(members) - 1), 0)])
    chosen = np.sort(np.concatenate(held))
    if not len(chosen):
        raise ValueError("no class has two training images: none can be held out to choose l2; give one l2 alone")
    return torch.from_numpy(np.setdiff1d(np.arange(len(labels)), chosen)), torch.from_numpy(chosen)


def _check(features: Tensor, labels: Tensor, classes: int) -> None:
    if features.ndim != 2 or len(features) != len(labels) or not len(features):
        raise ValueError(f"features are [N, D] with N labels, got {tuple(features.shape)} and {len(labels)} labels")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"labels are from 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}")
    _check_features(features)


def _check_features(features: Tensor) -> None:
    check_finite(features, lambda at: f"row {at}", "features")
