"""Fifty wrong inputs, each with its exit code and its message.

A case with `toml` runs `fedshift run`, one with `counts` and `target` runs
`fedshift diagnose`; `args` are added at the end. `{methods}` stands for all methods' names.
"""

from __future__ import annotations

from dataclasses import dataclass

GOOD = """\
name = "good"
[data]
name = "fashion-mnist-mini"
[shift]
kind = "sparsity"
labels_per_client = 3
[method]
name = "fedavg"
[training]
rounds = 1
"""
COUNTS = "client,cat,dog,owl\na,10,20,0\nb,0,5,5\n"
TARGET = "cat,dog,owl\n0.2,0.6,0.2\n"


@dataclass(frozen=True)
class Broken:
    """One wrong input."""

    name: str
    code: int
    message: str
    toml: str | None = None
    counts: str | bytes = COUNTS
    target: str = TARGET
    args: tuple[str, ...] = ()


def config(name: str, old: str, new: str, message: str, code: int = 2) -> Broken:
    """GOOD with one piece replaced."""
    assert old in GOOD
    return Broken(name, code, message, toml=GOOD.replace(old, new))


def option(name: str, setting: str, message: str, code: int = 2) -> Broken:
    """GOOD with one `-c` option."""
    return Broken(name, code, message, toml=GOOD, args=("-c", setting))


CASES = (
    config(
        "unknown section",
        "[training]",
        "[trainig]",
        'f.toml:9: unknown key "trainig"; allowed: data, method, metrics, model, name, seeds, selection, server, shift, training. Did you mean "training"?',
    ),
    config(
        "key of another network",
        "[training]",
        '[model]\nname = "lenet"\nhidden = [8]\n[training]',
        'f.toml:11: model: hidden is for "mlp", "mlp-moon" and "mlp-projected", not for "lenet"',
    ),
    config(
        "unknown key",
        "rounds = 1",
        "ruonds = 1",
        'f.toml:10: unknown key "training.ruonds"; allowed: batch, cohort, deadline, decay, epochs, evaluate_every, evaluate_last, keep, lr, max_gap, max_norm, max_reply, max_weight, min_clients, momentum, on_bad_reply, optimizer, patience, precision, prior, retries, rounds, schedule, server_lr, server_momentum, steps, threads. Did you mean "rounds"?',
    ),
    config(
        "text for a number",
        "rounds = 1",
        'rounds = "one"',
        'f.toml:10: training.rounds = "one": must be a whole number',
    ),
    config(
        "half a round",
        "rounds = 1",
        "rounds = 1.5",
        "f.toml:10: training.rounds = 1.5: must be a whole number",
    ),
    config(
        "no rounds",
        "rounds = 1",
        "rounds = 0",
        "f.toml:10: training.rounds = 0: must be at least 1",
    ),
    config(
        "negative rate",
        "rounds = 1",
        "rounds = 1\nlr = -0.1",
        "f.toml:11: training.lr = -0.1: must be more than 0.0",
    ),
    config(
        "infinite rate",
        "rounds = 1",
        "rounds = 1\nlr = inf",
        "f.toml:11: training.lr = inf: must be a finite number",
    ),
    config(
        "momentum of one",
        "rounds = 1",
        "rounds = 1\nmomentum = 1.0",
        "f.toml:11: training.momentum = 1.0: must be less than 1.0",
    ),
    config(
        "epochs and steps",
        "rounds = 1",
        "rounds = 1\nepochs = 1\nsteps = 2",
        "f.toml:11: training: give epochs or steps, not both",
    ),
    config(
        "true for a number",
        "rounds = 1",
        "rounds = true",
        "f.toml:10: training.rounds = true: must be a whole number",
    ),
    config(
        "unknown shift",
        'kind = "sparsity"',
        'kind = "sparsty"',
        'f.toml:5: shift.kind = "sparsty": allowed are sparsity, dirichlet-per-client, dirichlet-per-class, shards, iid, quantity, label-sets, writers, natural. Did you mean "sparsity"?',
    ),
    config(
        "no beta",
        'kind = "sparsity"\nlabels_per_client = 3\n',
        'kind = "dirichlet-per-class"\n',
        'f.toml:5: shift: kind "dirichlet-per-class" needs beta',
    ),
    config(
        "more labels than exist",
        "labels_per_client = 3",
        "labels_per_client = 11",
        "f.toml:6: shift.labels_per_client = 11; allowed: 1 to 10, the number of labels in the data. Lower labels_per_client.",
    ),
    config(
        "no label",
        "labels_per_client = 3",
        "labels_per_client = 0",
        "f.toml:6: shift.labels_per_client = 0: must be at least 1",
    ),
    config(
        "foreign option",
        "labels_per_client = 3",
        "labels_per_client = 3\nbeta = 0.5",
        'f.toml:7: shift: "beta" is not an option of kind "sparsity" (labels_per_client)',
    ),
    config(
        "no clients",
        "labels_per_client = 3",
        "labels_per_client = 3\nclients = 0",
        "f.toml:7: shift.clients = 0: must be at least 1",
    ),
    config(
        "too many clients",
        "labels_per_client = 3",
        "labels_per_client = 3\nclients = 9000",
        "f.toml:7: [shift]: clients=9001; allowed: a whole number from 1 to 7000. Each client needs at least one sample. They are shift.clients = 9000 and the target, drawn as one.",
    ),
    config(
        "negative beta",
        'kind = "sparsity"\nlabels_per_client = 3',
        'kind = "dirichlet-per-class"\nbeta = -1.0',
        "f.toml:6: shift.beta = -1.0: must be more than 0.0",
    ),
    config(
        "minimum out of reach",
        'kind = "sparsity"\nlabels_per_client = 3',
        'kind = "dirichlet-per-class"\nbeta = 0.1\nmin_size = 1000',
        "f.toml:7: shift.min_size = 1000 for 10 clients needs 10000 samples; there are 7000. Lower min_size to at most 700, or ask for fewer clients. They are shift.clients = 9 and the target, drawn as one.",
    ),
    config(
        "short target",
        "labels_per_client = 3",
        "labels_per_client = 3\ntarget = [0.5, 0.5]",
        "f.toml:7: shift.target has 2 numbers; allowed: one for each of 10 classes.",
    ),
    config(
        "target off one",
        "labels_per_client = 3",
        "labels_per_client = 3\ntarget = [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0, 0, 0, 0]",
        "f.toml:7: shift.target sums to 1.2; allowed: 1 within 1e-6. Divide counts by their sum. Or set shift.normalise_target = true.",
    ),
    config(
        "negative target",
        "labels_per_client = 3",
        "labels_per_client = 3\ntarget = [1.5, -0.5, 0, 0, 0, 0, 0, 0, 0, 0]",
        "f.toml:7: shift.target[1]=-0.5; allowed: finite numbers >= 0 that sum to 1.",
    ),
    config(
        "unknown target",
        "labels_per_client = 3",
        'labels_per_client = 3\ntarget = "unifrom"',
        'f.toml:7: shift.target = "unifrom": allowed are drawn, uniform, union, test, clients. Did you mean "uniform"?; or shift.target = "unifrom": must be a list',
    ),
    config(
        "unknown data",
        '"fashion-mnist-mini"',
        '"fashion-mnst"',
        'f.toml:3: data.name: unknown data set "fashion-mnst"; allowed: binary-world, cifar-10, cifar-100, cifar-20, emnist-digits, fashion-mnist, fashion-mnist-mini, femnist-digits, gaussian-world, gaussians, heart-disease, iwildcam, looks-world, mnist, mnist-writers, pacs, retina. Did you mean "fashion-mnist"?',
    ),
    config(
        "all for validation",
        'name = "fashion-mnist-mini"',
        'name = "fashion-mnist-mini"\nvalidation = 1.0',
        "f.toml:4: data.validation = 1.0: must be less than 1.0",
    ),
    config("number as data", '"fashion-mnist-mini"', "7", "f.toml:3: data.name = 7: must be text"),
    config(
        "unknown method",
        '"fedavg"',
        '"fedpal"',
        'f.toml:8: unknown method "fedpal"; allowed: {methods}. Did you mean "fedpals"?',
    ),
    config(
        "option of another method",
        '"fedavg"',
        '"fedavg"\nmu = 0.1',
        'f.toml:9: unknown key "method.mu" for fedavg; allowed: name.',
    ),
    config(
        "lam and ess",
        '"fedavg"',
        '"fedpals"\nlam = 1.0\ness = 0.5',
        "f.toml:9: give exactly one of lam and ess; got both (method.lam = 1.0, method.ess = 0.5)",
    ),
    config(
        "neither lam nor ess",
        '"fedavg"',
        '"fedpals"',
        "f.toml:7: [method]: give exactly one of lam and ess; got neither",
    ),
    config(
        "ess above one",
        '"fedavg"',
        '"fedpals"\ness = 50',
        "f.toml:9: method.ess is a fraction of the examples, 0 < ess <= 1; got 50",
    ),
    config(
        "negative lam",
        '"fedavg"',
        '"fedpals"\nlam = -1.0',
        "f.toml:9: method.lam must be a number >= 0, inf allowed; got -1.0",
    ),
    config(
        "cap out of reach",
        '"fedavg"',
        '"fedpals"\ness = 0.5\ncap = 0.05',
        "f.toml:10: method.cap = 0.05 cannot be met: 9 clients with examples could carry 0.45 in all, the weights must sum to 1; use cap >= 0.111111",
    ),
    config(
        "unknown fidelity",
        '"fedavg"',
        '"fedpals"\ness = 0.5\nfidelity = "nrom"',
        'f.toml:10: method.fidelity = "nrom": allowed are squared, norm. Did you mean "norm"?',
    ),
    config(
        "neither a number nor a word",
        '"fedavg"',
        '"fedala"\nlayers = "some"',
        "f.toml:9: method.layers = \"some\": must be a whole number or 'all'",
    ),
    config(
        "negative mu",
        '"fedavg"',
        '"fedprox"\nmu = -0.1',
        "f.toml:9: method.mu must be 0 or more, got -0.1",
    ),
    config(
        "text for mu",
        '"fedavg"',
        '"fedprox"\nmu = "big"',
        'f.toml:9: method.mu = "big": must be a number',
    ),
    config(
        "auto and lam",
        '"fedavg"',
        '"fedpals"\ness = "auto"\nlam = 1.0',
        'f.toml:10: method.lam and method.ess = "auto" are both given; drop one',
    ),
    config(
        "network for vectors",
        '"fashion-mnist-mini"',
        '"gaussians"',
        "f.toml:4: [shift]: label 2 is drawn by 10 of 10 clients but has 9 samples; each holder needs at least one. Ask for fewer clients or fewer labels_per_client (given 3), or use more data. They are shift.clients = 9 and the target, drawn as one.",
    ),
    config(
        "not TOML",
        "rounds = 1",
        "rounds = = 1",
        "f.toml: not valid TOML: Invalid value (at line 10, column 10)",
    ),
    config(
        "section as value",
        "[training]\nrounds = 1\n",
        "training = 1\n",
        'f.toml:9: unknown key "method.training" for fedavg; allowed: name.',
    ),
    config(
        "bad name",
        '"good"',
        '"../../etc"',
        'f.toml:1: name = "../../etc": may hold letters, digits, spaces and . _ + = - only, '
        "and not only dots and spaces",
    ),
    config(
        "diverging",
        "rounds = 1",
        "rounds = 1\nlr = 1e9",
        'client 0 sent non-finite numbers in "delta/body.0.weight": its training diverged. Lower the learning rate, or look at this client\'s data',
        code=4,
    ),
    config(
        "cohort",
        "rounds = 1",
        "rounds = 1\ncohort = 12",
        "f.toml:11: training.cohort = 12: a cohort of 12 clients from 9; give 1 to 9",
    ),
    config(
        "empty grid",
        "[training]",
        "[selection]\ngrid = []\n[training]",
        "f.toml:10: selection: grid needs at least one ESS fraction",
    ),
    config(
        "seed",
        "[training]",
        "[seeds]\nrun = -3\n[training]",
        "f.toml:10: seeds.run = -3: must be at least 0",
    ),
    option(
        "option without value",
        "training.rounds",
        '-c "training.rounds": write it as section.key=value, as in training.rounds=50',
    ),
    option("option into a value", "name.x=1", '-c "name.x=1": "name" is a value, not a section'),
    option(
        "option unknown",
        "training.batchsize=3",
        '-c training.batchsize: unknown key "training.batchsize"; allowed: batch, cohort, deadline, decay, epochs, evaluate_every, evaluate_last, keep, lr, max_gap, max_norm, max_reply, max_weight, min_clients, momentum, on_bad_reply, optimizer, patience, precision, prior, retries, rounds, schedule, server_lr, server_momentum, steps, threads. Did you mean "batch"?',
    ),
    Broken(
        "retries in one process",
        2,
        "f.toml:11: training.retries = 2 is for Flower, whose clients may be late or fail; leave it out here",
        toml=GOOD.replace("rounds = 1", "rounds = 1\nretries = 2"),
        args=("--backend", "loop"),
    ),
    Broken(
        "option of another meaning",
        2,
        "-c method.name=moon: method.mu = 0.1 is the pull towards the model received in fedprox, and the strength of the contrastive term in moon; set it as well with -c method.mu=VALUE, or leave it out with -c method.mu=",
        toml=GOOD.replace('"fedavg"', '"fedprox"\nmu = 0.1'),
        args=("-c", "method.name=moon"),
    ),
    config(
        "under a header with a comment",
        "[training]\nrounds = 1",
        '[training]  # local work\nrounds = "two"',
        'f.toml:10: training.rounds = "two": must be a whole number',
    ),
    config(
        "in an inline table",
        'name = "good"',
        'name = "good"\nserver = { validation = 1, unlabeled = -1 }',
        "f.toml:2: server.unlabeled = -1: must be at least 0",
    ),
    config(
        "router alone",
        'labels_per_client = 3\n[method]\nname = "fedavg"\n[training]',
        'labels_per_client = 3\ntarget = "clients"\n[model]\nname = "lenet-gn-small"\n'
        '[method]\nname = "feddrm"\n[training]\ncohort = 1',
        "f.toml:13: training.cohort = 1: a cohort of 1 client of 9 trains no router: it learns to tell a round's clients apart; "
        "give 2 or more, or a method without a router, as fedper",
    ),
    config(
        "tables for a section",
        "[training]",
        "[[training]]",
        "f.toml:9: training = [{rounds = 1}]: must be a section, written [training]",
    ),
    Broken(
        "an empty folder",
        2,
        "--out is given an empty text; give it a value, or leave it out",
        toml=GOOD,
        args=("--out", ""),
    ),
    Broken(
        "an empty page",
        2,
        "--report is given an empty text; give it a value, or leave it out",
        args=("--report=",),
    ),
    Broken(
        "a client given twice",
        3,
        'c.csv, lines 2, 4: client "a" is given 2 times; give each once',
        counts=f"{COUNTS}a,1,1,1\n",
    ),
    config(
        "names for shares",
        "labels_per_client = 3",
        'labels_per_client = 3\ntarget = ["cat"]',
        'f.toml:7: shift.target.0 = "cat": must be a number',
    ),
    config(
        "cap out of reach of candidates",
        '"fedavg"',
        '"fedpals"\ness = "auto"\ncap = 0.05',
        "f.toml:10: method.cap = 0.05 cannot be met: 9 clients with examples could carry 0.45 in all, the weights must sum to 1; use cap >= 0.111111",
    ),
)
