"""A grid in this process: nodes run their ClientApp when their reply is pulled. For testing apps without any server.

Messages carry what they would carry on the wire, as Flower's own objects; faults can be switched on per node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

LOST = 5  # the code of Flower's answer for a node that is gone


@dataclass
class MemoryGrid(Grid):
    """nodes: node id → its app and node config    offline, silent: nodes that are gone, and that never answer

    uploading: whoever pulls the answer of such a node waits until it has arrived
    """

    nodes: Mapping[int, tuple[ClientApp, Mapping[str, Any]]]
    offline: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    uploading: dict[int, threading.Event] = field(default_factory=dict)
    _waiting: dict[str, Message] = field(default_factory=dict)
    _count: int = 0
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # Outside Flower's own processes nobody has said which task sends the messages.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        """Runs do not matter here."""

    @property
    def run(self) -> Any:
        """There is none."""
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Flower's older way to make a message."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Those that are online."""
        return [node for node in self.nodes if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep them until they are asked for."""
        identities = []
        for message in messages:
            self._count += 1
            identity = f"message-{self._count}"
            message.metadata.__dict__["_message_id"] = identity
            self._waiting[identity] = message
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the apps of those that were asked, and take their replies."""
        wanted = [identity for identity in message_ids if identity in self._waiting]
        for identity in wanted:
            if (arrived := self.uploading.get(self._waiting[identity].metadata.dst_node_id)) is not None:
                arrived.wait()
        with self._one_at_a_time:
            return [self._run(self._waiting.pop(identity)) for identity in wanted if self._answers(identity)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Flower's simple way: everybody that answers."""
        return self.pull_messages(self.push_messages(messages))

    def _answers(self, identity: str) -> bool:
        return self._waiting[identity].metadata.dst_node_id not in self.silent | self.offline

    def _run(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node in self.lost:
            reply = Message(Error(LOST, "the node is gone"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1  # it comes from the SuperLink
            return reply
        app, config = self.nodes[node]
        context = Context(run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config={})
        try:
            return app(message, context)
        except Exception as error:  # what Flower's own runtime does: an app that raises becomes an error reply
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
