"""Statistics of a client's features by class, and terms that pull features towards class means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.arguments import Positive
from fedshift.client.objectives import Checked, Term, View, batch_mean
from fedshift.data import ClientData, Plan, take
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params


class Moments(NamedTuple):
    """By class: number of examples n [K], mean feature [K, d], mean of ||f||^2 [K]; all float64.

    A class without examples has zeros.
    """

    n: Tensor
    mean: Tensor
    square: Tensor


def features_of(out: Params) -> Tensor:
    """The "features" that a model returned, [B, d]. Raises InputError if it returned none."""
    if "features" not in out:
        raise InputError(
            f'this method looks at "features", and the model returns {sorted(out)}; let its '
            'forward return {"features": z, "logits": ...}, z being what the head is given, as '
            '"mlp" and "lenet" do'
        )
    return out["features"].flatten(1)


def trunk_of(out: Params) -> Tensor:
    """A model's "trunk" (features before their projection) if it returns one; else its features."""
    return out["trunk"].flatten(1) if "trunk" in out else features_of(out)


def head_shape(model: Model, head: tuple[str, ...]) -> tuple[int, int]:
    """(K, d): the outputs of the head's last matrix and the inputs of its first.

    `head` has prefixes of parameter names; first and last are in the order in which the network
    declares them. Raises InputError if no such parameter is a matrix.
    """
    named = model.net.named_parameters()
    # Biases and normalisation layers do not show the width.
    matrices = [p for name, p in named if name.startswith(head) and p.ndim == 2]
    if not matrices:
        raise InputError(
            f"no parameter that starts with {list(head)} is a matrix, so the width of the features "
            "is unknown; name the last linear layer's parameters by Setting(head=...)"
        )
    return int(matrices[-1].shape[0]), int(matrices[0].shape[1])


def check_features(
    model: Model, head: tuple[str, ...], params: Params, buffers: Params, data: ClientData
) -> None:
    """Raise InputError unless the model returns features that fit its head, tried on one input."""
    if not len(data.y):
        return  # nothing to try it on
    with torch.no_grad():
        returned = features_of(model(params, buffers, data.x[:1])).shape[1]
    width = head_shape(model, head)[1]
    if returned != width:
        raise InputError(
            f'the model returns {returned} "features" for an input, and its head takes {width}; '
            "return what the head is given"
        )


def class_moments(
    model: Model,
    params: Params,
    buffers: Params,
    data: ClientData,
    plan: Plan,
    shape: tuple[int, int],
) -> Moments:
    """The `Moments` over the rows of a plan that goes once over the data; shape is (K, d).

        mean_k = (1/n_k) sum_{y = k} f(x),    square_k = (1/n_k) sum_{y = k} ||f(x)||^2

    In evaluation mode, without gradient; every example counts 1, whatever its importance.
    """
    # float64, because variances will be computed as differences of these sums.
    classes, width = shape
    n = torch.zeros(classes, dtype=torch.float64, device=data.w.device)
    total, square = n.new_zeros(classes, width), torch.zeros_like(n)
    with torch.no_grad():
        for s in range(plan.steps):
            batch = take(data, plan, s)
            counts = (batch.w != 0).double()  # 0 for padding
            f = features_of(model(params, buffers, batch.x)).double()
            n = n.index_add(0, batch.y, counts)
            total = total.index_add(0, batch.y, f * counts[:, None])
            square = square.index_add(0, batch.y, (f * f).sum(1) * counts)
    counts = n.clamp(min=1.0)
    return Moments(n, total / counts[:, None], square / counts)


def class_products(
    model: Model,
    params: Params,
    buffers: Params,
    data: ClientData,
    plan: Plan,
    shape: tuple[int, int],
) -> tuple[Params, Tensor]:
    """Means over the client's examples, "share" [K], "total" [K, d], "square" [K, d, d]; the loss.

        share_k = E[1{y = k}],   total_k = E[1{y = k} f],   square_k = E[1{y = k} f f^T]

    In float64; 0 without examples. Rows, evaluation mode and weights are as for `class_moments`.
    The loss [] is the mean cross-entropy.
    """
    classes, width = shape
    share = torch.zeros(classes, dtype=torch.float64, device=data.w.device)
    total, square = share.new_zeros(classes, width), share.new_zeros(classes, width, width)
    loss = share.new_zeros(())
    with torch.no_grad():
        for s in range(plan.steps):
            batch = take(data, plan, s)
            onehot = (batch.y[:, None] == torch.arange(classes, device=share.device)).double()
            onehot = onehot * (batch.w != 0)[:, None]  # [B, K], 0 for padding
            out = model(params, buffers, batch.x)
            f = features_of(out).double()
            share, total = share + onehot.sum(0), total + onehot.T @ f
            loss = loss - (onehot * out["logits"].double().log_softmax(1)).sum()
            # Class by class: one product for all would need K times the memory of the features.
            square = square + torch.stack([(f * of[:, None]).T @ f for of in onehot.unbind(1)])
    n = share.sum().clamp(min=1.0)
    return {"share": share / n, "total": total / n, "square": square / n}, loss / n


def statistics(moments: Moments) -> tuple[Tensor, Tensor]:
    """FedPAC's (V [], H [K, d]) of a client, float64; both 0 without examples.

        V = (1/n) sum_k (p_k S_k - p_k^2 ||mu_k||^2),    H_k = p_k mu_k

    with n the client's examples and, for each class k, p_k its share of them, mu_k the mean of its
    features and S_k the mean of their squared norm. Xu, Tong and Huang 2023 (FedPAC), arXiv
    2306.11867.
    """
    n = moments.n.sum().clamp(min=1.0)
    p = moments.n / n
    means = p[:, None] * moments.mean
    # Divided by n, because V is the variance of the client's mean features, not of one example's.
    return (p @ moments.square - means.square().sum()) / n, means


def to_prototypes(view: View) -> Tensor:
    """(1/d) ||f(x_b) - c_{y_b}||^2 for each example whose class has a prototype, else 0, [B].

    `context["prototypes"]` has c as "mean" [K, d]; "held" [K] is 0 for classes without one.
    """
    has_prototype = view.context["prototypes"]["held"][view.batch.y] > 0
    goal = view.context["prototypes"]["mean"][view.batch.y]
    distance = (features_of(view.out) - goal).square().mean(1)
    return torch.where(has_prototype, distance, torch.zeros_like(distance))


@dataclass(frozen=True)
class ToPrototypes(Checked):
    """lam/(B d) sum_b w_b ||f(x_b) - c_{y_b}||^2, over the classes whose prototype c is known.

    Xu, Tong and Huang 2023 (FedPAC), arXiv 2306.11867, with the mean over batch and dimensions of
    the authors' code. Raises InputError unless lam > 0: leave the term out for 0.
    """

    lam: Positive = 1.0

    def __call__(self, view: View) -> Tensor:
        return self.lam * batch_mean(to_prototypes(view), view.batch)


@dataclass(frozen=True)
class ToClassMeans(Term):
    """sum_k 1/(B_k d) sum_{b: y_b = k} w_b ||f(x_b) - c_k||^2, over the classes k of the batch.

    B_k is the number of examples of class k in the batch, so that every class counts alike. Yang,
    Huang and Ye 2024 (FedAS), authors' code, clientas.py.
    """

    def __call__(self, view: View) -> Tensor:
        batch = view.batch
        has_prototype = view.context["prototypes"]["held"]
        # Not F.one_hot: it checks the labels' values, which vmap does not allow.
        present = (
            batch.y[:, None] == torch.arange(len(has_prototype), device=has_prototype.device)
        ).to(has_prototype.dtype)
        rows = (present * (batch.w != 0)[:, None]).sum(0)  # of each class in the batch
        return (batch.w * to_prototypes(view) / rows[batch.y].clamp(min=1.0)).sum()


@dataclass(frozen=True)
class ToPrevious(Term):
    """1/(B d) sum_b w_b ||f(x_b) - f_p(x_b)||^2, p being the client's model after its last round.

    f [d] is the model's "trunk" if it returns one, else its "features": the FedDRM authors' code,
    algorithms/fedas.py, matches the 512 features of the backbone, before their projection.
    `context["previous"]` and "previous_buffers" are p, in evaluation mode and without gradient.
    """

    def __call__(self, view: View) -> Tensor:
        with torch.no_grad():
            params, buffers = view.context["previous"], view.context["previous_buffers"]
            goal = trunk_of(view.model(params, buffers, view.batch.x))
        return batch_mean((trunk_of(view.out) - goal).square().mean(1), view.batch)
