"""Local SGD on chains of linear layers without autograd. Its one door is `train`."""

from fedshift.engine.dense.phase import train as train
