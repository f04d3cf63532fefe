"""Mistakes in an experiment of user files: file, old text, new text, message, exit code."""

from __future__ import annotations

CASES = (
    ("net.py", "task.input_shape", "task.shape", r'e.toml:8: model.name = ".*/net.py:Net": '
     r".*/net.py, line 8: AttributeError: .* no attribute 'shape'; expected a class or", 2),
    ("net.py", "class Net", "class Nett", r'there is no "Net", it defines Nett, of_shape; ', 2),
    ("mine.py", "return recipes", "recipes", r"e.toml:10: method.name = .*mine.py, line 4\) "
     r"returned nothing \(None\); expected a function \(setting, \*, options\) that", 2),
    ("mine.py", "setting, *", "setting, other, *", r"mine.py, line 4\): expected a function", 2),
    ("net.py", "nn.Linear(8, len(task.classes))", "nn.Linear(7, len(task.classes))",
     r"e.toml:8: model.name = .*net.py, line 13: the model fails on inputs", 2),
    ("net.py", "nn.Linear(8, len(task.classes))", "nn.Linear(8, 5)", r"e.toml:8: model.name = .*"
     r"net.py, line 5: the model gives logits \(2, 5\) for 2 inputs; the task has 2 classes", 2),
    ("net.py", "def of_shape", "Net = nn.Flatten()\ndef of_shape", r"net.py, line \d+\) is one "
     r"network, and each run starts with its own; expected a class or function", 2),
    ("mine.py", "mu=0.1", "nu=0.1", r"e.toml:11: method.mu: make in .* has no such keyword-only "
     r'argument; allowed: name, nu. Did you mean "nu"\?', 2),
    ("m.py", "return float(", "return str(", r"expected a function of \(probabilities", 2),
    ("m.py", "return float(", "return 1 / 0 + float(", r"ZeroDivisionError[^;]*; expected [^;]*$", 2),
    ("m.py", "import numpy as np", "import nump", r'e.toml:13: metrics.extra = ".*m.py, line 1: '
     r"ModuleNotFoundError: No module named 'nump'", 2),
    ("m.py", "def brier", "def round", r'there is no "brier", it defines round', 2),
    ("e.toml", "mu = 0.5", 'ess = "auto"', r"e.toml:11: method.ess: make in .* no such keyword", 2),
    ("e.toml", "net.py:Net", "nets.py:Net", r"e.toml:8: .*nets.py: there is no such file", 2),
    ("e.toml", "net.py:Net", "nett", r"e.toml:8: model.name = \"nett\": allowed are lenet, .*"
     r"FILE.py:NAME", 2),
    ("e.toml", "m.py:brier", "brier", r'e.toml:13: .*"brier": write it as FILE.py:NAME', 2),
    ("e.toml", '"north"', '"nort"', r'e.toml:6: data.target = "nort" is no client; .* Did you '
     r'mean "north"\?', 2),
    ("e.toml", '"north"', "true", r"e.toml:6: data.target = true: must be a client's name", 2),
    ("e.toml", '"hospital"', '"hospitl"', r'has no column "hospitl"; .* mean "hospital"\?', 3),
    ("e.toml", 'client = "hospital"', "", r"data.client is missing: the column of patients", 2),
    ("e.toml", "patients.csv", "patient.csv", r"there is no file .*Did you mean \"patients", 3),
    ("e.toml", "patients.csv", "patients", r"data.source = .* is no folder; a table ends in .csv, ", 2),
    ("e.toml", "patients.csv", "penguins", r"data.source = \"penguins\" .*; give data.name = \"penguins\", ", 2),
    ("e.toml", '"patients.csv"', '"net.py:Net"', r"client is for tables, arrays and folders", 2),
    ("e.toml", 'source = "patients.csv"', "", r"client is for data of your own; give", 2),
    ("e.toml", "[training]", "[server]\nvalidation = 1\n[training]", r"server.validation = 1: .* "
     r"Raise server.validation", 2),
    ("e.toml", "[training]", "[server]\nunlabeled = 159\n[training]",
     r'server.unlabeled = 159 takes every row of client "(east|south)"; give fewer', 2),
    ("e.toml", "[training]", "[shift]\nclients = 3\n[training]", r"e.toml:\d+: \[shift\] deals", 2),
)  # fmt: skip
