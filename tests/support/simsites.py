"""Clients of a simulation, which its worker processes build from this module by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.engine.run import Federation
from fedshift.flower import Site, client_app
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import TARGET, make_federation
from support.routing import routed_model


@cache
def build(name: str) -> tuple[Method, Federation]:
    """The method of a row of the contract, and the small federation."""
    model = routed_model()
    algorithm = MAKE[name](Setting(model, TARGET, Local(lr=0.1, epochs=1, batch=16)))
    return algorithm, make_federation(model)


def site(name: str, client: int) -> Site:
    """The site of a client."""
    algorithm, federation = build(name)
    first = (federation.params, federation.buffers)
    return Site(algorithm, federation.clients[client], federation.seeds.batch, first=first)


NAMED = "method"
app = ClientApp()
app_of = cache(lambda name: client_app(partial(site, name), open_states=True))


def answer(message: Message, context: Context) -> Message:
    """The reply of the method's app; a run begins with nothing kept of the run before."""
    name = str(message.content.pop(NAMED)["name"])
    if message.metadata.message_type == "query.register":
        context.state = RecordDict()
    reply: Message = app_of(name)(message, context)
    return reply


app.query("register")(answer)
app.query("state")(answer)
app.train()(answer)
app.evaluate()(answer)


class Naming:
    """A simulation's grid whose messages name the method that is to answer."""

    def __init__(self, grid: Any, name: str) -> None:
        self.grid, self.name = grid, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.grid, attribute)

    def send_and_receive(self, messages: Iterable[Message], **given: Any) -> Iterable[Message]:
        """The replies, as of the grid."""
        sent = list(messages)
        for message in sent:
            message.content[NAMED] = ConfigRecord({"name": self.name})
        replies: Iterable[Message] = self.grid.send_and_receive(sent, **given)
        return replies
