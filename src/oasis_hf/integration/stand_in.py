"""What stands in front of a method of one model, for as long as a cache needs it there.

Two methods are stood in for: `forward`, whose steps graphs replay, and `generate`, whose text is
compared with what the cache holds.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

_registry = threading.RLock()
"""Held while a model's method is replaced or put back."""


class StandIn(ABC):
    """Called in place of a model's method; keeps its signature.

    However many caches a model serves, there is one of each kind; it goes with the last of them.

    Attributes:
        method: name of the method.
        served: what each cache brought, by cache.
    """

    method: ClassVar[str]

    def __init__(self, model: Any) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._was_instance = self.method in vars(model)
        self._original: Any = getattr(model, self.method)
        self.served: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # The signature too: Transformers asks for it.
        functools.update_wrapper(self, self._original)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's method."""

    @classmethod
    def in_front_of(cls, model: Any) -> Self:
        """The one of this kind that a model has, put there if need be."""
        with _registry:
            found = vars(model).get(cls.method)
            if not isinstance(found, cls):
                found = cls(model)
                setattr(model, cls.method, found)
            return found

    def serve(self, cache: Any, brought: Any) -> None:
        """Stay as long as `cache` lives."""
        with _registry:
            self.served[cache] = brought
            weakref.finalize(cache, self._leave_if_idle)

    def _leave_if_idle(self) -> None:
        """Put the model's own method back once no cache is left."""
        with _registry:
            model = self._model()
            # A weak dictionary still counts what is about to leave it.
            if model is None or any(True for _ in self.served):
                return
            if vars(model).get(self.method) is not self:
                return
            if self._was_instance:
                setattr(model, self.method, self._original)
            else:
                delattr(model, self.method)

    def __reduce__(self) -> Any:
        """A copied or pickled model has no cache: it calls its own method on its own weights."""
        return as_original(self._original)


def as_original(original: Any) -> tuple[Any, tuple[Any, ...]]:
    """How something that stands in a model's place of a method is copied and pickled: as the
    method, which in a copied model is the copy's own.

    Returns:
        What `__reduce__` has to.
    """
    return operator.itemgetter(0), ((original,),)
