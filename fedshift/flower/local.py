"""A grid without processes: messages go straight to a client app. For tests and for counting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedshift.flower.records import bytes_of


@dataclass
class Traffic:
    """Bytes of arrays to clients (down) and from them (up), by message type."""

    down: dict[str, int] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)


class LocalGrid(Grid):
    """A Flower grid with all nodes in this process.

    To expose wrong assumptions, replies come in reverse order, and node ids are not client ids.

    partitions  the partition id of each node; 0..n-1 by default
    absent      ids of nodes that are not connected and do not answer
    to_pull     replies that wait to be pulled, by the id that the push returned
    traffic     bytes of arrays in both directions, counted on the messages

    It sets Flower's private task identity, which otherwise only a ServerApp's process has.
    """

    def __init__(
        self, app: ClientApp, clients: int, *, partitions: Mapping[int, int] | None = None
    ) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        # Flower's Message reads these, and only Flower's own processes set them.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.app = app
        client_of = {i: i for i in range(clients)} if partitions is None else partitions
        self.contexts = {
            # No node id is a client id, so that code that mixes them up fails in tests.
            1000 + 7 * node: Context(
                run_id=1,
                node_id=1000 + 7 * node,
                node_config={"partition-id": client, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for node, client in client_of.items()
        }
        self.absent: set[int] = set()
        self.traffic = Traffic()
        self.to_pull: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """All nodes but the absent."""
        return [node for node in self.contexts if node not in self.absent]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Handle the messages now; the replies wait to be pulled."""
        names = []
        for message in messages:
            name = str(len(self.to_pull))
            reply = self._answer(message)
            names.append(name)
            self._count(message, reply)
            self.to_pull[name] = reply
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages, the last first."""
        # Reversed, so that tests fail if a result depends on the order of arrival.
        return [self.to_pull[name] for name in reversed(list(message_ids))]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push and pull; messages to absent nodes are lost."""
        connected = [m for m in messages if m.metadata.dst_node_id not in self.absent]
        replies = list(self.pull_messages(self.push_messages(connected)))
        self.to_pull.clear()
        return replies

    def _answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as e:
            # As in Flower's simulation, a client's exception becomes its answer.
            reason = f"<class 'flwr.clientapp.client_app.ClientAppException'>:<'{e}'>"
            return Message(Error(code=2, reason=reason), reply_to=message)

    def _count(self, message: Message, reply: Message) -> None:
        kind, traffic = message.metadata.message_type, self.traffic
        for counts, counted in ((traffic.down, message), (traffic.up, reply)):
            counts[kind] = counts.get(kind, 0) + bytes_of(counted)
        traffic.messages[kind] = traffic.messages.get(kind, 0) + 1

    # Flower's Grid requires these; they are never used here.

    def set_run(self, run: object) -> None:
        """Nothing to set."""

    @property
    def run(self) -> None:  # type: ignore[override]
        """There is no run."""
        return None

    def create_message(self, *args: object, **kwargs: object) -> Message:
        """Deprecated by Flower; make a Message."""
        raise NotImplementedError("make a flwr.app.Message")
