"""Generates text. `generate` decodes one sequence at a time with a KV cache, greedily unless the caller sets a
temperature. `continuations` decodes several prompts together, greedily, also with a model that is partitioned over
ranks.

Legend: B rows, S positions, H hidden, V vocabulary.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from optimus.comm import Group
from optimus.data.chat import Answering, ChatTemplate
from optimus.data.tokenizer import encoder
from optimus.errors import UserError
from optimus.evaluation.score import Scored, evaluating
from optimus.model import KVCache, Transformer


def generate(
    model: Transformer,
    tokenizer: Any,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | None = None,
    context: int | None = None,
) -> str:
    """Generates the text that continues `prompt`, without the prompt itself. The text ends before an end-of-text token
    or after `max_tokens` tokens.

    `tokenizer` is a `tokenizers.Tokenizer`. An empty prompt starts a new document after end-of-text. If `context` is
    set, a prompt of more than `context - max_tokens` tokens loses its first tokens. Raises `UserError` for options out
    of range.
    """
    prompt_ids = encoder(tokenizer)(prompt)
    if not prompt_ids:
        if eos_id is None:
            raise UserError("the prompt is empty and no end-of-text token is known to start from: give a prompt")
        prompt_ids = [eos_id]
    new_ids = generate_tokens(
        model,
        prompt_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stops=() if eos_id is None else (eos_id,),
        context=context,
    )
    return decode(tokenizer, prompt_ids, list(new_ids))


def answer(
    model: Transformer,
    template: ChatTemplate,
    as_tokens: Any,
    as_text: Any,
    said: str,
    *,
    eos_id: int | None = None,
    **how: Any,
) -> str:
    """Generates the assistant's answer to a user's message `said`, in the format of `template`. The answer ends at the
    end of the assistant's turn.

    `as_tokens` and `as_text` are `tokenizers.Tokenizer` objects: the first parses special tokens, the second encodes
    their spelling as ordinary text. `how` contains further options of `generate`. Raises `UserError` like `generate`,
    and if the template cannot render the message.
    """
    asked = Answering.to(template, said, as_tokens)
    prompt_ids, _ = asked.prompt.encoded(as_tokens, as_text)
    new_ids = list(
        generate_tokens(model, prompt_ids, stops=(*asked.stops, *([] if eos_id is None else [eos_id])), **how)
    )
    text = decode(as_tokens, prompt_ids, new_ids)
    return text.partition(asked.end_text)[0] if asked.end_text else text


def generate_tokens(
    model: Transformer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stops: Collection[int] = (),
    context: int | None = None,
) -> Iterator[int]:
    """Yields the tokens that continue `prompt_ids` (at least one token), one by one. The sequence ends before the first
    token of `stops`.

    Temperature 0 takes the most probable token. Other temperatures draw a token from the softmax of logits /
    temperature, restricted to the fewest tokens whose probability is at least `top_p` together (nucleus sampling,
    Holtzman et al. 2020, section 3.1). The same `seed` draws the same tokens. Raises `UserError` for options out of range.
    """
    if max_tokens < 1:
        raise UserError(f"`max_tokens` is {max_tokens}: ask for at least one token")
    if context is not None and max_tokens >= context:
        raise UserError(f"`max_tokens` is {max_tokens}, but the model's context is {context}: ask for fewer tokens")
    if not 0 <= temperature < math.inf:
        raise UserError(f"`temperature` is {temperature}: it must be 0 (the most probable token) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"`top_p` is {top_p}: it must be above 0 and at most 1")
    given = prompt_ids if context is None else prompt_ids[-(context - max_tokens) :]

    def found() -> Iterator[int]:
        random = torch.Generator().manual_seed(seed)
        cache = KVCache(model.config.layers)
        new = list(given)
        for _ in range(max_tokens):
            with evaluating(model):  # not around the loop: the caller may use the model between two tokens
                hidden_BSH = model.hidden_states(torch.tensor([new], device=model.embedding.weight.device), cache)
                logits_V = model.head(hidden_BSH[:, -1])[0].float().cpu()
            token = _choose(logits_V, temperature, top_p, random)
            if token in stops:
                return
            yield token
            new = [token]

    return found()


def continuations(
    model: Scored, prompts: Sequence[Sequence[int]], *, max_tokens: int, eos_id: int, group: Group | None = None
) -> list[list[int]]:
    """Generates the most probable tokens after each prompt (of at least one token), at most `max_tokens`.
    A continuation ends before the first end-of-text token.

    If the model is partitioned over ranks, all ranks of `group` must call this function together. All ranks continue
    with the tokens that the group's first rank finds. A partitioned model has no KV cache, so every forward pass
    computes the whole rows. The function pads all rows to the longest possible length from the beginning, so that every
    forward pass has the same shape.
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
        ).float()  # fp32 represents every token id exactly; `at_tokens` expects two columns

    with evaluating(model):
        for _ in range(max_tokens):
            at = [row * tokens_BS.shape[1] + len(tokens) - 1 for row, tokens in enumerate(rows)]
            found_B2 = model.at_tokens(tokens_BS.to(device), torch.tensor(at, device=device), most_probable)
            found: list[int] = found_B2[:, 0].long().tolist()
            if group is not None:  # other ranks may round differently if two tokens are equally probable
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
    """Decodes the text that `new_ids` add after the prompt.

    Decodes the new ids together with the last prompt token, because some decoders drop the space before the first word
    of a text.
    """
    last = [*prompt_ids[-1:]]
    before = tokenizer.decode(last, skip_special_tokens=False)
    text = tokenizer.decode([*last, *new_ids], skip_special_tokens=False)
    if text.startswith(before):
        return str(text[len(before) :])
    return str(tokenizer.decode(list(new_ids), skip_special_tokens=False))  # `new_ids` complete a prompt character


def _choose(logits_V: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    p_V, order_V = torch.softmax(logits_V.double() / temperature, -1).sort(descending=True, stable=True)
    before_V = p_V.cumsum(0) - p_V  # total probability of the tokens that are more probable than each token
    p_V[before_V >= top_p] = 0
    return int(order_V[torch.multinomial(p_V, 1, generator=random)])
