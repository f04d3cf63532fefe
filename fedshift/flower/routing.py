"""Fit a router by messages: what each client sends, and the server's side of the exchange.

After the rounds the server asks for sums over examples that stay at the clients: moments of client
features, sums of gradients, sums over held-out examples (`router.parts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Condition
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedshift.algorithms.method import Method
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.flower.records import fields_of, to_parts, to_record
from fedshift.router.moments import Moments
from fedshift.router.parts import HeldOutSums, Here, OriginSums, What
from fedshift.router.parts import Question as Question
from fedshift.router.score import ClientHead
from fedshift.router.sight import Sight
from fedshift.tree import Params, Parts

# Names of records; those that end with a dot are prefixes.
ASK, MODEL, HEADS, ANSWER = "ask", "model.", "heads.", "answer."
SENT: dict[What, Any] = {
    "moments": Moments, "origin_sums": OriginSums, "held_out_sums": HeldOutSums,
}  # fmt: skip
Item = TypeVar("Item")
Given = TypeVar("Given")


Send = Callable[[Sequence[Question]], Mapping[int, list[Params]]]


def questions_in(
    questions: Sequence[Question], present: Sequence[int], seed: int
) -> dict[str, ArrayRecord | ConfigRecord]:
    """The records of a message. present [N]: 1 for clients that took part."""
    fields = ConfigRecord({
        "what": [str(one.what) for one in questions],
        "fold": [one.fold for one in questions],
        "held_out": [int(one.held_out) for one in questions],
        "heads": [len(one.heads) for one in questions],
        "present": list(present),
        "seed": seed,
    })  # fmt: skip
    heads = {
        f"{HEADS}{k}": to_record(
            {f"{name}{i}": v for i, head in enumerate(one.heads) for name, v in vars(head).items()}
        )
        for k, one in enumerate(questions)
    }
    return {ASK: fields, **heads}


def answers_to(
    content: RecordDict, stage: Method, pair: tuple[Params, Params], data: ClientData
) -> dict[str, ArrayRecord]:
    """A client's answers. pair: a whole model, with the server's values for all shared tensors."""
    fields = fields_of(content, ASK)
    heads = to_parts(content.array_records, HEADS)
    client, mask = int(data.id), torch.tensor(fields["present"], dtype=torch.float64)
    # `Here` computes for all clients. Here the others have no examples, and add exactly 0 to sums.
    inputs = [data.x[:0]] * len(mask)
    inputs[client] = data.x[data.w != 0]
    outputs = Sight(stage.model, pair, None, mask).of_clients(inputs, "an example")
    here = Here(*outputs, int(fields["seed"]))
    rows = zip(*(fields[name] for name in ("what", "fold", "held_out", "heads")), strict=True)
    answers = (
        _answer(here, what, int(fold), bool(held_out), _heads(heads[str(k)], int(n)), client)
        for k, (what, fold, held_out, n) in enumerate(rows)
    )
    return {f"{ANSWER}{k}": to_record(answer) for k, answer in enumerate(answers)}


def _heads(tree: Params, n: int) -> list[ClientHead]:
    return [ClientHead(tree[f"gamma{i}"], tree[f"xi{i}"]) for i in range(n)]


def _answer(
    here: Here, what: str, fold: int, held_out: bool, heads: Sequence[ClientHead], client: int
) -> Params:
    if what not in SENT:
        raise InputError(f'the question "{what}"; is the server of the same version?')
    sent = here.ask(Question(what, fold, held_out, tuple(heads)))
    # Of held-out sums there are this client's alone, or none if the fold holds none of its out.
    mine = sent[:1] if what == "held_out_sums" else sent[client : client + 1]
    return next((one._asdict() for one in mine), {})


def answers_in(parts: Parts, questions: Sequence[Question], client: int) -> list[Params]:
    """The inverse of `answers_to`. Raises InputError for answers that do not fit the questions."""
    answers = [parts.get(f"{ANSWER}{k}", {}) for k in range(len(questions))]
    for one, answer in zip(questions, answers, strict=True):
        names = SENT[one.what]._fields
        may_be_empty = one.what == "held_out_sums" and not answer
        if not may_be_empty and tuple(answer) != names:
            raise InputError(f"client {client} sent {list(answer)}, not {list(names)}")
        if not all(v.dtype == torch.float64 and bool(v.isfinite().all()) for v in answer.values()):
            raise InputError(f"client {client} sent sums that are not finite, or not of 64 bits")
        if answer and not possible(one, answer):
            raise InputError(f"client {client} sent {one.what} that no examples have")
    return answers


def possible(question: Question, answer: Params) -> bool:
    """Whether some examples could have these sums."""
    if question.what == "origin_sums":
        head = question.heads[0]
        right = answer["gamma"].shape == head.gamma.shape and answer["xi"].shape == head.xi.shape
        return right and not answer["loss"].dim() and bool(answer["loss"] >= 0)
    n = answer["n"]
    if n.dim() or not (n >= 0 and n == n.round()):
        return False
    if question.what == "held_out_sums":
        candidates = (max(len(question.heads), 1),)
        right = all(answer[name].shape == candidates for name in ("loss", "square"))
        right = right and answer["gaps"].shape[:1] == candidates
        return right and bool((answer["loss"] >= 0).all() and (answer["square"] >= 0).all())
    total, square = answer["sum"], answer["square"]
    if total.dim() != 1 or square.shape != (len(total), len(total)):
        return False
    # sum_b (h_b - mean)(h_b - mean)^T must be symmetric without negative eigenvalues, up to
    # rounding.
    spread = square - torch.outer(total, total) / n.clamp(min=1.0)
    rounding = 1e-9 * (1.0 + square.diagonal().abs().sum())
    if not spread.isfinite().all() or (spread - spread.T).abs().max() > rounding:
        return False
    return bool(torch.linalg.eigvalsh(spread).min() >= -rounding)


class RemoteClients:
    """All clients of a fit, each at its site (`router.parts.Clients`).

    send: sends questions to the clients that took part, and returns each one's answers. `each` runs
    several fits in threads, so that one message can carry the questions of all.
    """

    def __init__(self, send: Send, clients: int) -> None:
        self.send, self.clients = send, clients
        # A question gets a number, waits in `_waiting`, and finds its result in `_answers`.
        self._lock, self._numbers = Condition(), count()
        # Threads of `each` that are not done; an error of `send`, which all of them must raise.
        self._working, self._failure = 0, list[BaseException]()
        self._waiting: dict[int, Question] = {}
        self._answers: dict[int, list[Params]] = {}
        self._cached: dict[Question, list[Params]] = {}

    def each(self, work: Callable[[Item], Given], items: Sequence[Item]) -> list[Given]:
        """Call `work` for each item, in one thread each; all threads share the messages."""
        if not items:
            return []
        self._working, self._failure = len(items), []
        with ThreadPoolExecutor(len(items)) as pool:
            futures = [pool.submit(self._work, work, item) for item in items]
        self._working = 0
        return [future.result() for future in futures]

    def ask(self, question: Question) -> list[Any]:
        """As `router.parts.Clients`. Raises InputError if a client does not answer."""
        sent = [SENT[question.what](**one) for one in self._asked(question) if one]
        return [s for s in sent if s.n > 0] if question.what == "held_out_sums" else sent

    def _asked(self, question: Question) -> list[Params]:
        # Answers to questions without heads never change: ask them once.
        if not question.heads and question in self._cached:
            return self._cached[question]
        with self._lock:
            if not self._working:  # outside of `each` this is the only thread
                self._failure.clear()
            number = next(self._numbers)
            self._waiting[number] = question
            self._exchange()
            self._lock.wait_for(lambda: number in self._answers or self._failure)
            if self._failure:
                raise self._failure[0]
            answers = self._answers.pop(number)
        if not question.heads:
            self._cached[question] = answers
        return answers

    def _work(self, work: Callable[[Item], Given], item: Item) -> Given:
        try:
            return work(item)
        finally:
            with self._lock:
                self._working -= 1
                # The others may have waited only for this thread.
                self._exchange()

    def _exchange(self) -> None:
        """Send all waiting questions once every running thread waits; call with the lock held."""
        if not self._waiting or len(self._waiting) < self._working:
            return
        waiting, self._waiting = self._waiting, {}
        # Several fits may ask for the same moments.
        questions = list(dict.fromkeys(waiting.values()))
        try:
            received = self.send(questions)
            for k, question in enumerate(questions):
                answers = self._in_order({i: one[k] for i, one in received.items()})
                self._answers |= {number: answers for number, q in waiting.items() if q == question}
        except BaseException as e:
            # Kept for all threads: raising it here would leave the others waiting for ever.
            self._failure.append(e)
        self._lock.notify_all()

    def _in_order(self, answers: Mapping[int, Params]) -> list[Params]:
        """Answers of clients 0..N-1; zeros for clients without examples, which were not asked."""
        forms = {i: tuple(v.shape for v in one.values()) for i, one in answers.items() if one}
        # Compare with the most frequent form: the error must name the client that differs.
        ((form, _),) = Counter(forms.values()).most_common(1) or [((), 0)]
        for i, other in forms.items():
            if other != form:
                raise InputError(f"client {i} sent sums of another form than the others")
        first = next((one for one in answers.values() if one), {})
        nothing = {k: torch.zeros_like(v) for k, v in first.items()}
        return [answers.get(i, nothing) for i in range(self.clients)]
