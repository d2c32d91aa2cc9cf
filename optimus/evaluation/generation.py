"""Generates text.

Legend: B rows, S positions, H hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.comm import Group
from optimus.data.chat import Answering, ChatTemplate
from optimus.data.tokenizer import encoder
from optimus.errors import UserError
from optimus.evaluation.score import Scored, evaluating
from optimus.model import CausalModel, KVCache, Transformer

ROWS = 64  # default of the maximum number of sequences that `Generation` decodes together
_CACHE_BYTES = 4 << 30  # maximum bytes of `Generation._cache`, unless one sequence needs more
_PREFILL_TOKENS = 8192  # maximum tokens of a forward pass over several prompts, padding included
_PADDED = 1.15  # maximum ratio of the tokens of a forward pass, padding included, to the tokens of the prompts
_MOST_HELD = 64  # number of tokens after which `TextStream` no longer waits for a complete character


class Request(NamedTuple):
    """A prompt and the options of its continuation. `Generation` needs at least one token in `prompt`.

    The continuation ends after `max_tokens` tokens, or before a token that is in `stops`. Temperature 0 takes the most
    probable token. Other temperatures draw from the softmax of logits / temperature. The draw is among the most
    probable tokens, as few as have a total probability of at least `top_p` (nucleus sampling, Holtzman et al. 2020,
    section 3.1).
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stops: Collection[int] = ()

    def fitted(self, context: int | None) -> "Request":
        """Returns the request without the first tokens of the prompt, as far as the prompt and `max_tokens` new tokens
        exceed `context` (None: no limit). Raises `UserError` for an invalid option, and if `max_tokens` alone fills
        the context."""
        if type(self.max_tokens) is not int or type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UserError(
                f"`max_tokens` is {self.max_tokens!r} and `seed` {self.seed!r}: give whole numbers, the seed from 0 to "
                "2^63 - 1"
            )
        if self.max_tokens < 1:
            raise UserError(f"`max_tokens` is {self.max_tokens}: ask for at least one token")
        if context is not None and self.max_tokens >= context:
            raise UserError(
                f"`max_tokens` is {self.max_tokens}, but the model's context is {context}: ask for fewer tokens"
            )
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"`temperature` is {self.temperature}: it must be 0 (the most probable token) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"`top_p` is {self.top_p}: it must be above 0 and at most 1")
        return self if context is None else self._replace(prompt=self.prompt[-(context - self.max_tokens) :])


@dataclass
class _Row:
    number: int  # index of the request in the argument `requests` of `Generation`
    request: Request
    random: torch.Generator
    left: int  # tokens that the sequence may still get
    token: int = -1  # the newest token


class Generation:
    """Decodes the continuations of requests, at most `rows` at a time.

    Iterating yields (index of the request in `requests`, token), without tokens of `Request.stops`.
    """

    def __init__(
        self, model: CausalModel, requests: Sequence[Request], *, context: int | None = None, rows: int = ROWS
    ) -> None:
        self._model: Any = model
        self._device = model.embedding.weight.device
        requests = [request.fitted(context) for request in requests]
        # `_waiting` ends with the longest prompt, which starts first.
        order = sorted(range(len(requests)), key=lambda number: len(requests[number].prompt))
        self._waiting = [
            _Row(number, request, torch.Generator().manual_seed(request.seed), request.max_tokens)
            for number, request in ((number, requests[number]) for number in order)
        ]
        self._rows: list[_Row] = []
        self._stopped: set[int] = set()
        self._slots = self._make_cache(requests, min(rows, len(requests)))

    def _make_cache(self, requests: Sequence[Request], rows: int) -> int:
        """Makes the cache, and returns the number of rows that can be decoded at once."""
        capacity = max((len(request.prompt) + request.max_tokens for request in requests), default=1)
        slots = max(1, min(rows, _CACHE_BYTES // (capacity * _cache_bytes(self._model))))
        self._cache = KVCache(self._model.config.layers, rows=slots, capacity=capacity)
        return slots

    def stop(self, number: int) -> None:
        """Ends the continuation of the request with the index `number`."""
        self._stopped.add(number)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while True:
            # The block does not enclose `yield`, because the caller may use the model between two tokens.
            with evaluating(self._model), torch.inference_mode():
                self._drop_ended()
                if not self._rows and not self._waiting:
                    return
                new = self._start() if self._can_start() else self._step()
            for row in new:
                row.left -= 1
                if row.number in self._stopped or row.token in row.request.stops:
                    row.left = 0
                else:
                    yield row.number, row.token

    def _drop_ended(self) -> None:
        for at in reversed(range(len(self._rows))):
            if self._rows[at].left == 0 or self._rows[at].number in self._stopped:
                self._remove(at)
                self._rows[at] = self._rows[-1]
                self._rows.pop()

    def _remove(self, at: int) -> None:
        """Removes row `at` from the cache, and moves the last row to `at`."""
        self._cache.remove(at)

    def _can_start(self) -> bool:
        return bool(self._waiting) and 4 * (self._slots - len(self._rows)) >= self._slots

    def _start(self) -> list[_Row]:
        """Reads the prompts of waiting requests into free rows, finds the first tokens, and returns the new rows."""
        started = len(self._rows)
        while self._waiting and len(self._rows) < self._slots:
            self._read(self._next_group())
        return self._rows[started:]

    def _next_group(self) -> list[_Row]:
        """Removes rows with prompts of similar lengths from `_waiting`, and returns these rows."""
        group: list[_Row] = []
        longest, tokens = len(self._waiting[-1].request.prompt), 0
        while self._waiting and len(self._rows) + len(group) < self._slots:
            tokens += len(self._waiting[-1].request.prompt)
            padded = longest * (len(group) + 1)
            if group and (padded > _PREFILL_TOKENS or padded > _PADDED * tokens):
                break
            group.append(self._waiting.pop())
        return group

    def _read(self, new: list[_Row]) -> None:
        """Reads the prompts of `new` in one forward pass, and adds these rows with their first tokens."""
        lengths = [len(row.request.prompt) for row in new]
        # Padding is at the end of a row, so a causal model's predictions for the prompt do not depend on the padding.
        tokens_BS = torch.zeros(len(new), max(lengths), dtype=torch.long)
        for tokens_S, row, length in zip(tokens_BS, new, lengths, strict=True):
            tokens_S[:length] = torch.tensor(row.request.prompt)
        cache = KVCache(self._model.config.layers, rows=len(new), capacity=max(lengths))
        hidden_BSH = self._model.hidden_states(tokens_BS.to(self._device), cache)
        cache.keep(lengths)
        self._cache.extend(cache)
        self._rows += new
        last_B = torch.tensor(lengths, device=self._device) - 1
        self._sample(hidden_BSH[torch.arange(len(new), device=self._device), last_B], new)

    def _step(self) -> list[_Row]:
        """Finds the next token of every row, and returns the rows."""
        tokens_B1 = torch.tensor([[row.token] for row in self._rows], device=self._device)
        self._sample(self._model.hidden_states(tokens_B1, self._cache)[:, 0], self._rows)
        return list(self._rows)

    def _sample(self, hidden_BH: Tensor, rows: Sequence[_Row]) -> None:
        requests, logits_BV = [row.request for row in rows], self._model.head(hidden_BH)
        if all(request.temperature == 0 for request in requests):
            tokens = logits_BV.argmax(-1).tolist()
        else:
            tokens = sampled(logits_BV, requests, [row.random for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            row.token = token


class GenerationByRow(Generation):
    """A `Generation` for models that make their own caches."""

    def _make_cache(self, requests: Sequence[Request], rows: int) -> int:
        self._caches: list[Any] = []
        return rows

    def _remove(self, at: int) -> None:
        self._caches[at] = self._caches[-1]
        self._caches.pop()

    def _read(self, new: list[_Row]) -> None:
        for row in new:
            self._caches.append(None)
            self._rows.append(row)
            self._extend(len(self._rows) - 1, row.request.prompt)

    def _step(self) -> list[_Row]:
        for at, row in enumerate(self._rows):
            self._extend(at, [row.token])
        return list(self._rows)

    def _extend(self, at: int, tokens: Sequence[int]) -> None:
        """Reads the next `tokens` of row `at`, and finds the following token."""
        row = self._rows[at]
        self._model.check_length(len(row.request.prompt) + row.request.max_tokens - row.left)
        tokens_1S = torch.tensor([tokens], device=self._device)
        hidden_1SH, self._caches[at] = self._model.continued(tokens_1S, self._caches[at])
        self._sample(hidden_1SH[:, -1], [row])


def generation(model: CausalModel, requests: Sequence[Request], *, context: int | None = None) -> Generation:
    """Returns a `Generation`, or a `GenerationByRow` if the model makes its own caches."""
    return (Generation if model.shares_cache else GenerationByRow)(model, requests, context=context)


def _cache_bytes(model: Transformer) -> int:
    """Returns the bytes of one position in the KV cache, over all layers."""
    config = model.config
    latent, heads = config.latent, 2 * config.kv_heads * config.head_size
    numbers = heads if latent is None else latent.keys + latent.rotary
    return numbers * config.layers * model.embedding.weight.element_size()


def sampled(logits_BV: Tensor, requests: Sequence[Request], randoms: Sequence[torch.Generator]) -> list[int]:
    """Chooses a token for each row of logits by the options of the row's request."""
    greedy_B = torch.tensor([request.temperature == 0 for request in requests])
    temperature_B = torch.tensor([request.temperature or 1.0 for request in requests], dtype=torch.float64)
    top_p_B = torch.tensor([request.top_p for request in requests], dtype=torch.float64)
    drawn_B = torch.cat([torch.rand(1, generator=random, dtype=torch.float64) for random in randoms])
    logits_BV = logits_BV.float().cpu()
    below_BV = logits_BV.double() - logits_BV.amax(-1, keepdim=True)  # at most 0, so that no quotient is plus infinity
    p_BV, order_BV = torch.softmax(below_BV / temperature_B[:, None], -1).sort(descending=True, stable=True)
    before_BV = p_BV.cumsum(-1) - p_BV  # for each token, the total probability of the tokens before it in `order_BV`
    p_BV[before_BV >= top_p_B[:, None]] = 0
    upto_BV = p_BV.cumsum(-1)
    at_B1 = torch.searchsorted(upto_BV, (drawn_B * upto_BV[:, -1])[:, None], right=True)
    found_B = order_BV.gather(1, at_B1.clamp(max=p_BV.shape[1] - 1))[:, 0]
    return torch.where(greedy_B, logits_BV.argmax(-1), found_B).tolist()


def generate(
    model: CausalModel,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    eos_id: int | None = None,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    **options: Any,
) -> list[str]:
    """Generates the texts that continue `prompts`.

    `options` are fields of `Request` other than `prompt` and `stops`, the same for all prompts.
    """
    check_prompts(prompts)
    encode = encoder(tokenizer)
    start = [] if eos_id is None else [eos_id]
    prompt_ids = _begun([encode(prompt) for prompt in prompts], start)
    requests = [Request(ids, stops=start, **options) for ids in prompt_ids]
    return texts(generation(model, requests, context=context), tokenizer, requests, on_text=on_text)


def _begun(prompt_ids: Sequence[Sequence[int]], start: Sequence[int]) -> list[Sequence[int]]:
    """Replaces each empty prompt by `start`. Raises `UserError` if a prompt and `start` are both empty."""
    for number, ids in enumerate(prompt_ids):
        if not (ids or start):
            which = "the prompt" if len(prompt_ids) == 1 else f"prompt {number}"
            raise UserError(f"{which} is empty and no end-of-text token is known to start from: give a prompt")
    return [ids or start for ids in prompt_ids]


def check_prompts(prompts: Sequence[Any]) -> None:
    """Raises `UserError` for a prompt that is not a string, or that UTF-8 cannot encode."""
    for prompt in prompts:
        try:
            prompt.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UserError(f"the prompt {prompt!r} is not a text in UTF-8: give one") from None


def answer(
    model: CausalModel,
    template: ChatTemplate,
    as_tokens: Any,
    as_text: Any,
    messages: Sequence[str],
    *,
    eos_id: int | None = None,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    **options: Any,
) -> list[str]:
    """Generates the assistant's answers to users' `messages`, in the format of `template`. Each message is a separate
    conversation.

    `as_tokens` and `as_text` are `tokenizers.Tokenizer` objects: `as_tokens` parses special tokens, and `as_text` does
    not. `options` are fields of `Request` other than `prompt` and `stops`.
    """
    check_prompts(messages)
    asked = [Answering.to(template, message, as_tokens) for message in messages]
    ends = () if eos_id is None else (eos_id,)
    prompt_ids = _begun([each.prompt.encoded(as_tokens, as_text)[0] for each in asked], ends)
    requests = [Request(ids, stops=(*each.stops, *ends), **options) for ids, each in zip(prompt_ids, asked)]
    until = [[each.end_text] if each.end_text else [] for each in asked]
    return texts(generation(model, requests, context=context), as_tokens, requests, until, on_text)


def texts(
    generation: Generation,
    tokenizer: Any,
    requests: Sequence[Request],
    until: Sequence[Sequence[str]] | None = None,
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Decodes the continuation of each request. The text ends before the first occurrence of a string of `until[i]`,
    where i is the index of the request.

    Calls `on_text` with this index and each new piece of text.
    """
    streams = [
        TextStream(tokenizer, request.prompt, () if until is None else until[number])
        for number, request in enumerate(requests)
    ]
    report = on_text or (lambda number, piece: None)
    for number, token in generation:
        if piece := streams[number].add(token):
            report(number, piece)
        if streams[number].ended:
            generation.stop(number)
    for number, stream in enumerate(streams):
        if piece := stream.finish():
            report(number, piece)
    return [stream.text for stream in streams]


class TextStream:
    """The text that follows a prompt, decoded token by token, up to the first occurrence of a string of `until`."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], until: Sequence[str] = ()) -> None:
        self._tokenizer, self._until = tokenizer, tuple(until)
        self._before, self._new = list(prompt_ids[-1:]), list[int]()
        self._held = ""  # text that may begin a string of `until`
        self.text, self.ended = "", False

    def add(self, token: int) -> str:
        """Adds a token, and returns the newly known text, which may be empty."""
        self._new.append(token)
        text = _decode_after(self._tokenizer, self._before, self._new)
        if text.endswith("\ufffd") and len(self._new) < _MOST_HELD:
            return ""
        self._before, self._new = self._new, []
        return self._released(text)

    def finish(self) -> str:
        """Ends the text, and returns the text that `add` has held back."""
        if self.ended:
            return ""
        piece = self._released(_decode_after(self._tokenizer, self._before, self._new)) if self._new else ""
        held, self._held = ("" if self.ended else self._held), ""
        self.text += held
        return piece + held

    def _released(self, text: str) -> str:
        """Returns the new text up to a string of `until`; holds back an end that may begin such a string."""
        text = self._held + text
        ends = [text.index(end) for end in self._until if end in text]
        if ends:
            self.ended = True
            at = min(ends)
        else:
            begun = (n for end in self._until for n in range(1, len(end)) if text.endswith(end[:n]))
            at = len(text) - max(begun, default=0)
        self._held = "" if self.ended else text[at:]
        self.text += text[:at]
        return text[:at]


def continuations(
    model: Scored, prompts: Sequence[Sequence[int]], *, max_tokens: int, eos_id: int, group: Group | None = None
) -> list[list[int]]:
    """Generates at most `max_tokens` tokens after each prompt by greedy decoding; ends before end-of-text.

    All ranks of `group` must call this function together.
    """
    device = next(model.parameters()).device
    rows, new = [list(prompt) for prompt in prompts], [list[int]() for _ in prompts]
    tokens_BS = torch.zeros(len(rows), max(map(len, rows)) + max_tokens, dtype=torch.long)
    for row, tokens in enumerate(rows):
        tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
    ended = [False] * len(rows)

    def most_probable(hidden_BH: Tensor) -> Tensor:
        tokens_B = model.head(hidden_BH).float().argmax(-1)
        return torch.stack(
            [tokens_B, tokens_B], 1
        ).float()  # fp32 is exact for token ids below 2^24; `at_tokens` expects two columns

    with evaluating(model):
        for _ in range(max_tokens):
            at = [row * tokens_BS.shape[1] + len(tokens) - 1 for row, tokens in enumerate(rows)]
            found_B2 = model.at_tokens(tokens_BS.to(device), torch.tensor(at, device=device), most_probable)
            found: list[int] = found_B2[:, 0].long().tolist()
            # Ranks may round differently, and so choose different tokens.
            if group is not None:
                found = group.broadcast_object(found)
            for row, token in enumerate(found):
                ended[row] |= token == eos_id
                if not ended[row]:
                    tokens_BS[row, len(rows[row])] = token
                    rows[row].append(token)
                    new[row].append(token)
            if all(ended):
                break
    return new


def decode(tokenizer: Any, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """Decodes the text that `new_ids` add after the prompt."""
    return _decode_after(tokenizer, [*prompt_ids[-1:]], list(new_ids))


def _decode_after(tokenizer: Any, before_ids: list[int], new_ids: list[int]) -> str:
    before = tokenizer.decode(before_ids, skip_special_tokens=False)
    text = tokenizer.decode(before_ids + new_ids, skip_special_tokens=False)
    if text.startswith(before):
        return str(text[len(before) :])
    # `new_ids` may complete a character of `before_ids`.
    return str(tokenizer.decode(new_ids, skip_special_tokens=False))
