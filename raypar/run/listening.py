"""The driver hears the broker's news, and Tune how many trials may run at a time."""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.tune.search import BasicVariantGenerator

from raypar.run.events import ClusterChanged, Event, Listener


class Slots:
    """How many trials Tune lets run at a time; more where machines join. A listener that passes on what it hears."""

    def __init__(self, count: int, listener: Listener) -> None:
        self.count, self._listener = count, listener
        self._generator: BasicVariantGenerator | None = None

    def follow(self, generator: BasicVariantGenerator) -> None:
        """From now on this one is told."""
        self._generator = generator
        generator.max_concurrent = self.count

    def __call__(self, event: Event) -> None:
        if isinstance(event, ClusterChanged):
            self.count = event.num_slots
            if self._generator is not None:
                self._generator.max_concurrent = self.count
        self._listener(event)


class Ears:
    """Listens to the broker's news in a thread; what it tells comes one event at a time."""

    def __init__(self, broker: Any, listener: Listener) -> None:
        self._broker, self._listener = broker, listener
        self._lock = threading.Lock()
        self._closed = False
        self._num_heard = 0
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def tell(self, event: Any) -> None:
        with self._lock:
            self._listener(event)

    def catch_up(self, num_news: int) -> None:
        """Wait until so many news have been told, so that what came before a trial's end is told before it."""
        with self._heard:
            while self._num_heard < num_news and self._thread.is_alive():
                self._heard.wait(1.0)

    def close(self) -> None:
        self._closed = True

    def _listen(self) -> None:
        while not self._closed:
            try:
                events = ray.get(self._broker.news.remote())
            except Exception:  # the broker is gone, and with it the news
                return
            for event in events:
                self.tell(event)
            with self._heard:
                self._num_heard += len(events)
                self._heard.notify_all()
