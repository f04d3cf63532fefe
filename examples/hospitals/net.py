"""One hidden layer; `head` is the last one, for methods that treat body and head apart."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """task.input_shape is the shape of one example, task.classes are the labels' names."""

    def __init__(self, task):
        super().__init__()
        inputs = math.prod(task.input_shape)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU())
        self.head = nn.Linear(32, len(task.classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
