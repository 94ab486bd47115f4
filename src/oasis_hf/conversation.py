"""A conversation over one cache: every turn reads its own tokens only.

Each turn writes the whole list of messages with the tokenizer's chat template and gives all of it
to `generate`, with the one cache. The cache compares the ids with those that it was fed, and goes
back to the first difference (see `turns`). Here a difference is no surprise: templates write
earlier answers otherwise than they were generated.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import TextIteratorStreamer

from .cache import OasisCache
from .facts.compat import CACHE_KWARGS, cache_kwarg
from .facts.handle import OasisUnsupportedError
from .facts.wrappers import served_model
from .integration.turns import align
from .layers.ledger import UNKNOWN

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
OURS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", *CACHE_KWARGS)
"""Arguments of `generate` that a conversation gives itself."""


class Conversation:
    """A chat with a model, whose cache is kept from turn to turn.

    ```python
    conversation = Conversation(model, tokenizer, system=document, budget=2048)
    print(conversation.reply("What is this report about?", max_new_tokens=200))
    print(conversation.reply("Who wrote it?", max_new_tokens=200))
    ```

    A turn that fails or is interrupted leaves `messages` as they were; the next one goes on from
    what the cache holds of them.

    Args:
        model: what `generate` is called of: a model with attention "oasis", or what holds one.
        tokenizer: its tokenizer, with a chat template.
        cache: an `OasisCache(model, ...)`, empty or one that was fed the beginning of `messages` (a
            loaded one, a fork); by default a new one.
        system: text of a system message, such as a long document; it comes first.
        messages: messages so far, each with "role" and "content".
        template_options: more arguments of `tokenizer.apply_chat_template`, such as
            `enable_thinking` or `tools`.
        **options: fields of `OasisConfig`, for the new cache.

    Attributes:
        messages: the messages so far, the answers included: plain dictionaries, yours to read, to
            save, and to change between turns.
        cache: the cache. `cache.reset()` gives its memory back; the next turn reads all again.
        tokens_read: tokens that the last turn had to read: those of its text that the cache did not
            hold.

    Raises:
        ValueError: the tokenizer has no chat template, a message cannot be used, or the cache is
            another model's or holds a text without there being messages.
        OasisConfigError: an option of a new cache cannot be used.
        OasisUnsupportedError: the model cannot be served, or its attention is not "oasis".
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: OasisCache | None = None,
        *,
        system: str | None = None,
        messages: Iterable[Message] = (),
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._template_options = dict(template_options or {})
        if not (
            self._template_options.get("chat_template") or getattr(tokenizer, "chat_template", None)
        ):
            raise ValueError(
                f"tokenizer: got {type(tokenizer).__name__} without a chat template, expected one "
                "with a template, as those of instruct models have; use the instruct version of "
                "the model, or set tokenizer.chat_template; for a base model call model.generate "
                "with text of your own"
            )
        self._model, self._served, self._tokenizer = model, served_model(model), tokenizer
        self._first = _checked(messages, "messages")
        if system is not None:
            if self._first and self._first[0]["role"] == "system":
                raise ValueError(
                    "system: got a text, and messages that begin with a system message, expected "
                    "one of them; leave one out"
                )
            self._first[:0] = _checked([{"role": "system", "content": system}], "system")
        self.messages = [dict(message) for message in self._first]
        self.cache = self._usable(cache, options)
        self.tokens_read = 0
        self._left: Tensor | None = None

    def _usable(self, cache: OasisCache | None, options: dict[str, Any]) -> OasisCache:
        """The cache that was given, or a new one of these options."""
        if cache is None:
            return OasisCache(self._model, **options)
        if not isinstance(cache, OasisCache):
            raise ValueError(f"cache: got {type(cache).__name__}, expected an OasisCache")
        if options:
            raise ValueError(
                f"{next(iter(options))}: got an option, and a cache that is made already; pass the "
                "options to OasisCache(model, ...), or leave the cache out"
            )
        if cache.model is not self._served:
            made = "a config" if cache.model is None else "another model"
            raise ValueError(
                f"cache: got one that was built from {made}, expected OasisCache(model, ...) of "
                "this model"
            )
        if cache.get_seq_length() and not self.messages:
            raise ValueError(
                f"cache: holds {cache.get_seq_length()} tokens already, and there are no messages; "
                "pass the messages that it was fed as messages=..., or call cache.reset() first"
            )
        return cache

    def reply(self, message: str | Message | Iterable[Message], **options: Any) -> str:
        """Say something, and get the model's answer; both are added to `messages`.

        Args:
            message: text of a user message; or a message, or several, the last of which is not the
                assistant's.
            **options: what else `model.generate` takes: `max_new_tokens`, `do_sample`, `streamer`,
                `prompt_lookup_num_tokens`, ...

        Returns:
            The answer, without special tokens.

        Raises:
            ValueError: a message or an option that cannot be used, or the cache holds another text;
                nothing is changed.
        """
        new = _asked(message)
        self._check_options(options)
        inputs = self._tokenizer.apply_chat_template(
            [*self.messages, *new],
            **{"add_generation_prompt": True, **self._template_options},
            tokenize=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self._served.device)
        ids = inputs["input_ids"]
        self._go_back(ids)
        self.tokens_read = ids.shape[1] - self.cache.get_seq_length()
        generate: Any = getattr(self._model, "generate", None) or self._served.generate
        try:
            output = generate(
                input_ids=ids,
                attention_mask=inputs["attention_mask"],
                **{cache_kwarg(self._served): self.cache},
                **options,
            )
        finally:
            held = self.cache.ledger.ids()
            self._left = None if held is None else held.clone()
        answer = self._tokenizer.decode(
            getattr(output, "sequences", output)[0, ids.shape[1] :], skip_special_tokens=True
        )
        self.messages += [*new, {"role": "assistant", "content": answer}]
        return answer

    def stream(self, message: str | Message | Iterable[Message], **options: Any) -> Iterator[str]:
        """As `reply`, piece by piece, while the answer is generated in a thread.

        The turn begins with the first piece that is asked for. Where the iteration ends early,
        generation stops with the step in progress, and `messages` stay as they were. Autocast
        around the call does not reach the thread.
        """
        streamer = _Pieces(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        with ThreadPoolExecutor(1, initializer=_on_this_device()) as pool:
            turn = pool.submit(self.reply, message, streamer=streamer, **options)
            # An error ends the pieces too.
            turn.add_done_callback(lambda _: streamer.text_queue.put(streamer.stop_signal))
            try:
                yield from streamer
            finally:
                streamer.closed = True
            turn.result()

    def reset(self) -> None:
        """Begin again with the messages that the conversation began with.

        What the cache holds of these is not read again.
        """
        self.messages[:] = [dict(message) for message in self._first]

    def _go_back(self, ids: Tensor) -> None:
        """Have the cache hold nothing but a beginning of the text `[1, L]`.

        Raises:
            ValueError: somebody else fed the cache most of what it holds; nothing is changed.
        """
        cache, held = self.cache, self.cache.ledger.ids()
        ours = not cache.ledger.columns or (
            self._left is not None and held is not None and torch.equal(held, self._left)
        )
        try:
            cache.settle()
            if not ours:
                self._check_held(ids)
            align(cache, ids, None, expected=True)
        except OasisUnsupportedError as error:
            if not ours:
                raise
            if cache.ledger.columns:
                warnings.warn(
                    f"conversation: the cache cannot go back to what the messages say ({error}); "
                    f"all {ids.shape[1]} tokens of them are read again",
                    stacklevel=3,
                )
            cache.reset()

    def _check_held(self, ids: Tensor) -> None:
        """Refuse a cache that holds another text than the beginning of this one, `[1, L]`."""
        past, told = self.cache.get_seq_length(), self.cache.ledger.ids()
        same = self.cache.ledger.common(ids)
        if told is None or bool((told == UNKNOWN).any()):
            # What nobody told agrees with anything.
            same = 0
        if same < min(past, ids.shape[1]) and 2 * same < ids.shape[1]:
            raise ValueError(
                f"cache: holds {past} tokens, of which only the first {same} are known to be those "
                f"of the messages ({ids.shape[1]} tokens), expected a cache that was fed these "
                "messages; use a cache for each conversation, or call cache.reset() first"
            )

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse options of `generate` that contradict a conversation."""
        if taken := [name for name in OURS if name in options]:
            raise ValueError(
                f"{taken[0]}: the conversation gives it to generate itself, from its messages and "
                "its cache; leave it out"
            )
        config = options.get("generation_config") or getattr(
            self._served, "generation_config", None
        )
        for name in ("num_beams", "num_return_sequences"):
            number = options.get(name) or getattr(config, name, None) or 1
            if number != 1:
                raise ValueError(
                    f"{name}: got {number}, expected 1: a conversation has one answer, and its "
                    "cache holds one sequence; for several, fork conversation.cache"
                )


def _on_this_device() -> Callable[[], None] | None:
    """What a thread does first to use the caller's current GPU, which is its own otherwise."""
    if not torch.cuda.is_initialized():
        return None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


class _Pieces(TextIteratorStreamer):
    """Pieces of text as they are generated, until nobody wants any more."""

    closed = False

    def put(self, value: Tensor) -> None:
        """Take new tokens; ends the generation once it is closed."""
        if self.closed:
            raise InterruptedError("stream: the iteration ended before the answer did")
        super().put(value)


def _asked(message: str | Message | Iterable[Message]) -> list[dict[str, Any]]:
    """What is said in a turn, as messages."""
    if isinstance(message, str):
        message = {"role": "user", "content": message}
    new = _checked([message] if isinstance(message, Mapping) else message, "message")
    if not new:
        raise ValueError("message: got no messages, expected at least one; pass a text")
    if new[-1]["role"] == "assistant":
        raise ValueError(
            "message: got role 'assistant' for the last message, expected 'user' or 'tool', which "
            "the model answers to; add the assistant's to conversation.messages"
        )
    return new


def _checked(messages: Iterable[Message], name: str) -> list[dict[str, Any]]:
    """Copies of messages.

    Raises:
        ValueError: something is no message, or is empty.
    """
    made = []
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f"{name}: got {message!r}, expected a text or {{'role': ..., 'content': ...}}"
            )
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise ValueError(f"{name}: got role {role!r}, expected one of {', '.join(ROLES)}")
        said = content.strip() if isinstance(content, str) else content
        # A tool may have nothing to say, and an assistant may call one without a word.
        if not said and role != "tool" and not message.get("tool_calls"):
            raise ValueError(
                f"{name}: got an empty message of role {role!r}, expected text in 'content'"
            )
        made.append(dict(message))
    return made
