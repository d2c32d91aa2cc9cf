"""Adapts models to lm-eval."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from optimus.data.tokenizer import encoder
from optimus.errors import UserError
from optimus.evaluation.generation import Request, generation, texts
from optimus.evaluation.score import TOKENS_PER_BATCH, Score, Scored, Window, split_long
from optimus.evaluation.score import score as score_windows
from optimus.model import CausalModel
from optimus.model.ensemble import Ensemble

# Maximum number of requests between two reports of progress.
_SCORED_AT_ONCE = 512
_GENERATED_AT_ONCE = 256

_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "seed"}  # options that `generate_until` obeys
# Values of other options that change nothing, and those options that change draws only.
_MOOT: dict[str, float] = {"num_beams": 1, "repetition_penalty": 1, "top_k": 0, "min_p": 0, "typical_p": 1}
_OF_DRAWS = {"top_k", "min_p", "typical_p"}


class HarnessModel(TemplateLM):
    """A `model` with its `tokenizer` (a `tokenizers.Tokenizer`), for inputs of at most `context` tokens.

    `progress` takes (requests done, total requests). `score` takes (windows, tokens per batch), and replaces
    `optimus.evaluation.score.score`.
    """

    def __init__(
        self,
        model: Scored,
        tokenizer: Any,
        *,
        eos_id: int,
        context: int,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        progress: Callable[[int, int], None] | None = None,
        score: Callable[[Sequence[Window], int], list[Score]] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self._score_windows = score or partial(score_windows, model)
        self._eos, self._context = eos_id, context
        self._tokens_per_batch = tokens_per_batch
        self._report = progress or (lambda done, total: None)
        self._encode = encoder(tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self._eos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return list(self._encode(string))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, True if greedy decoding gives the continuation) for each request."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each whole text, computed in lm-eval's rolling windows."""
        windows = []
        for request in requests:
            (text,) = request.args
            rolling = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._context, 1)
            windows.append([Window(*make_disjoint_window(pair)) for pair in rolling])
        return [log_likelihood for log_likelihood, _ in self._score(windows)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates text up to the first stop string, the end-of-text token or `max_gen_toks` tokens.

        Raises `UserError` for an ensemble, and for an option that generation cannot obey.
        """
        if isinstance(self.model, Ensemble):
            raise UserError("tasks that generate text cannot be run with an ensemble: evaluate its members one by one")
        model = cast(CausalModel, self.model)
        found: list[str] = []
        for start in range(0, len(requests), _GENERATED_AT_ONCE):
            part = requests[start : start + _GENERATED_AT_ONCE]
            options = [normalize_gen_kwargs(each.args[1]) for each in part]
            asked = [self._request(each.args[0], given, each.task_name) for each, given in zip(part, options)]
            ends = [[end for end in handle_stop_sequences(given["until"], eos=None) if end] for given in options]
            found += texts(generation(model, asked, context=self._context), self.tokenizer, asked, ends)
            self._report(len(found), len(requests))
        return found

    def _request(self, prompt: str, options: Any, task: str | None) -> Request:
        temperature = options.get("temperature", 0.0) if options["do_sample"] else 0.0
        moot = _OPTIONS if temperature else _OPTIONS | _OF_DRAWS
        wrong = [f"{name}: {value}" for name, value in options.items() if name not in moot and value != _MOOT.get(name)]
        if wrong:
            raise UserError(
                f"task {task}: generation_kwargs has {', '.join(wrong)}: remove them, because generation has the options "
                f"{', '.join(sorted(_OPTIONS))} only"
            )
        return Request(
            self.tok_encode(prompt) or [self._eos],
            max_tokens=options["max_gen_toks"],
            temperature=temperature,
            top_p=options.get("top_p", 1.0),
            seed=options.get("seed", 0),
            stops=(self._eos,),
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for (context, continuation), context_ids, continuation_ids in requests:
            if not continuation_ids:
                raise UserError(
                    f"{continuation!r} has no tokens of its own after {context[-40:]!r}: the tokenizer merges the two, so "
                    "this task cannot be run with this tokenizer"
                )
            # `_encode_pair` moves a context of white space to the continuation, so `context_ids` can be empty.
            windows.append(split_long(context_ids or [self.prefix_token_id], continuation_ids, self._context))
        return self._score(windows)

    def _score(self, windows_per_request: list[list[Window]]) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, True if greedy decoding gives all continuations) over each request's windows."""
        # The longest requests come first. Requests of similar length share a batch, so batches need little padding.
        order = sorted(range(len(windows_per_request)), key=lambda i: -_inputs(windows_per_request[i]))
        results: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), _SCORED_AT_ONCE):
            part = order[start : start + _SCORED_AT_ONCE]
            windows = [window for index in part for window in windows_per_request[index]]
            scores = iter(self._score_windows(windows, self._tokens_per_batch))
            for index in part:
                found = [next(scores) for _ in windows_per_request[index]]
                results[index] = sum(s.log_likelihood for s in found), all(s.greedy for s in found)
            self._report(len(results), len(order))
        if any(math.isnan(log_likelihood) for log_likelihood, _ in results.values()):
            raise UserError("the model's output is not a number (NaN): it has diverged; evaluate an earlier checkpoint")
        return [results[index] for index in range(len(windows_per_request))]


def _inputs(windows: list[Window]) -> int:
    return max((len(window.context) + len(window.continuation) for window in windows), default=0)
