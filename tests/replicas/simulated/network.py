"""A model of the links between replicas: ordered while they live, and cut, delayed or silenced as the seed says."""

import random
from typing import TYPE_CHECKING

from fairshare.replicas.messages import OnLink
from replicas.simulated.timeline import Timeline

if TYPE_CHECKING:
    from replicas.simulated.node import Node

SILENCE_SECONDS = 2.0
"""After it a side takes the link for dead, as `fairshare.replicas.link` does."""


class Link:
    """One connection between two processes. Each side finds out by itself that it is dead."""

    def __init__(self, network: "Network", first: "Node", second: "Node") -> None:
        self.network = network
        self.sides = (first, second)
        self.up = [True, True]
        """Whether each side believes in it."""
        self.carries = True
        self._arrives_at = [0.0, 0.0]

    def other(self, node: "Node") -> "Node":
        return self.sides[1] if node is self.sides[0] else self.sides[0]

    def send(self, node: "Node", message: OnLink) -> None:
        side = self.sides.index(node)
        network = self.network
        if not self.up[side] or not self.carries or network.is_apart(*self.sides):
            return
        # Ordered, as in a stream; whatever follows a late message is late too.
        at = max(self._arrives_at[side], network.timeline.now + network.delay_seconds())
        self._arrives_at[side] = at
        network.timeline.at(at, lambda: self._arrive(1 - side, message))

    def _arrive(self, side: int, message: OnLink) -> None:
        if not self.carries or self.network.is_apart(*self.sides):
            self.cut()  # bytes are missing: nothing after them may arrive
            return
        node, sender = self.sides[side], self.sides[1 - side]
        node.does(lambda: node.heard(self, sender.name, message) if self.up[side] else None)

    def cut(self) -> None:
        """It carries nothing from now on; both sides notice within the time of silence, each by itself."""
        if not self.carries:
            return
        self.carries = False
        for side in (0, 1):
            self.network.timeline.after(
                self.network.rng.choice((0.0, self.network.rng.uniform(0.0, SILENCE_SECONDS))),
                lambda side=side: self.notice(side),
            )

    def notice(self, side: int) -> None:
        node = self.sides[side]

        def lost() -> None:
            if self.up[side]:
                self.up[side] = False
                node.unlinked(self, self.sides[1 - side].name)

        node.does(lost)


class Network:
    """Keeps a link between every two processes that can reach each other; now and then there is a second one."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline = timeline
        self.rng = rng
        self.latest_seconds = 0.003
        self.apart: set[frozenset[int]] = set()
        """Pairs of places between which nothing passes."""
        self.links: list[Link] = []

    def delay_seconds(self) -> float:
        return self.rng.uniform(0.0, self.latest_seconds)

    def is_apart(self, first: "Node", second: "Node") -> bool:
        return bool(self.apart) and frozenset((first.place, second.place)) in self.apart

    def separate(self, first: int, second: int) -> None:
        self.apart.add(frozenset((first, second)))
        for link in self.links:
            if {side.place for side in link.sides} == {first, second}:
                link.cut()

    def dial(self, nodes: "list[Node]") -> None:
        """Link whoever is not linked and can be."""
        # A side that died or has noticed everything keeps nothing.
        self.links = [link for link in self.links if self._lives(link)]
        # Both may dial each other, and who has noticed that a link is dead dials again at once.
        linked = {
            frozenset((link.sides[0].name, link.sides[1].name))
            for link in self.links
            if (link.carries or all(link.up)) and self.rng.random() < 0.98
        }
        for index, first in enumerate(nodes):
            for second in nodes[index + 1 :]:
                if frozenset((first.name, second.name)) in linked or self.is_apart(first, second):
                    continue
                if first.is_paused or second.is_paused:
                    continue  # it does not answer
                link = Link(self, first, second)
                self.links.append(link)
                first.linked(link, second.name)
                second.linked(link, first.name)

    @staticmethod
    def _lives(link: Link) -> bool:
        return any(up and node.is_alive for up, node in zip(link.up, link.sides, strict=True))
