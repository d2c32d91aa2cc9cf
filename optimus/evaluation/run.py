"""Evaluates checkpoints, and generates text with a checkpoint."""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimus.checkpoint.copying import local_checkpoint
from optimus.checkpoint.folder import DESCRIPTION, Description, read_description
from optimus.checkpoint.store import load_model
from optimus.data.chat import ChatTemplate
from optimus.data.tokenizer import file_sha256, inspect, load
from optimus.disk import printable, user_path, write_json
from optimus.errors import UserError
from optimus.evaluation.generation import answer, generate
from optimus.evaluation.names import TASKS
from optimus.evaluation.tasks import check_lm_eval, load_tasks, run_hub_tasks, run_tasks
from optimus.evaluation.text import bits_per_byte, check_text
from optimus.model import CausalModel
from optimus.model.ensemble import Ensemble
from optimus.observe.machine import use_device, versions
from optimus.observe.progress import ProgressBar
from optimus.plugins import load_plugins, note_changed_plugins

_NEW_TOKENS = 128  # of a continuation, where no number is asked for


@dataclass(frozen=True)
class _Loaded:
    description: Description
    model: CausalModel | Ensemble
    tokenizer: Any
    eos_id: int


def evaluate(
    checkpoint: str | Path | Sequence[str | Path],
    *,
    tasks: Sequence[str] = (),
    task_data: str | Path | None = None,
    hub: bool = False,
    text: str | Path | None = None,
    output: str | Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    max_bytes: int | None = None,
    parse_special: bool = False,
    device: str = "auto",
    plugins: Sequence[str] = (),
) -> dict[str, Any]:
    """Scores a checkpoint (or the newest of a run) on `tasks`, whose data is in the folder `task_data`, and on `text`.

    Returns `{"tasks": {name: {"acc", "acc_norm", "bits_per_byte", "margin", "n"}}, "bits_per_byte": float or None}`
    with facts such as settings and versions, and writes the result to the JSON file `output` if given. With `hub`,
    `tasks` names tasks, groups or tags of lm-eval, with lm-eval's metrics and data sets.

    For a task on local data, `bits_per_byte` is the mean bits per byte of the right answers. `margin` is the mean of
    the best wrong answer's bits per byte minus the right answer's. Several checkpoints form an ensemble, whose logits
    are the mean of the members' logits. `limit` is the maximum number of documents per task or subject. `fewshot` is
    the number of examples in each prompt. `max_bytes` is the maximum number of bytes of text. With `parse_special`, the
    tokenizer encodes the spelling of a special token as the special token. `plugins` names the plugins that the
    checkpoint's model or the tasks need.

    Example:
        optimus.evaluate("runs/first", text="held-out/")["bits_per_byte"]
        optimus.evaluate(["runs/a", "runs/b"], text="held-out/")["bits_per_byte"]
        optimus.evaluate("runs/first", tasks=["sciq"], task_data="tasks/")["tasks"]["sciq"]["acc"]
    """
    load_plugins(plugins)
    target = _check_output(output)
    check_request(tasks, task_data, hub, text, limit, fewshot, max_bytes)
    paths = [local_checkpoint(each) for each in ([checkpoint] if isinstance(checkpoint, str | Path) else checkpoint)]
    if not paths:
        raise UserError("no checkpoint to evaluate: name one, or several as an ensemble")
    path = paths[0]
    local_tasks = load_tasks(tasks, user_path(task_data), fewshot or 0) if tasks and task_data is not None else []
    loaded = _load_together(paths, device, parse_special)
    results: dict[str, Any] = {"tasks": {}, "bits_per_byte": None}
    with ProgressBar() as progress:
        if tasks:
            from optimus.evaluation.harness import HarnessModel

            model = HarnessModel(
                loaded.model,
                loaded.tokenizer,
                eos_id=loaded.eos_id,
                context=loaded.description.context,
                progress=lambda done, total: progress.update("tasks", done, total, "requests"),
            )
            if hub:
                results["tasks"] = run_hub_tasks(tasks, model, fewshot=fewshot, limit=limit)
            else:
                results["tasks"] = run_tasks(local_tasks, model, fewshot=fewshot or 0, limit=limit)
        if text is not None:
            found = bits_per_byte(
                loaded.model,
                loaded.tokenizer,
                text,
                eos_id=loaded.eos_id,
                context=loaded.description.context,
                max_bytes=max_bytes,
                progress=lambda done: progress.update("text measured", done, None, "bytes"),
            )
            bits = results["bits_per_byte"] = found["bits_per_byte"]
            if not math.isfinite(bits):
                raise UserError(f"{path} has diverged (bits per byte {bits}): use an earlier checkpoint")
            results["text"] = {"path": printable(str(text)), "bytes": found["bytes"], "tokens": found["tokens"]}
    results["splits"] = {task.name: task.split for task in local_tasks}
    results["settings"] = {
        "fewshot": fewshot if hub else fewshot or 0,
        "limit": limit,
        "max_bytes": max_bytes,
        "parse_special": parse_special,
    }
    results["checkpoint"] = {
        "path": printable(str(path)),
        "sha256": file_sha256(path / DESCRIPTION),
        "step": loaded.description.step,
        "context": loaded.description.context,
    }
    if len(paths) > 1:
        results["checkpoint"]["ensemble"] = [printable(str(each)) for each in paths]
    results["model"] = loaded.description.model.model_dump()
    results["versions"] = versions("tokenizers", *(["lm-eval", "datasets"] if tasks else []))
    if target is not None:
        write_json(target, results)
    return results


def generate_text(
    checkpoint: str | Path,
    prompt: str | Sequence[str],
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    parse_special: bool = False,
    chat: bool = False,
    device: str = "auto",
    on_text: Callable[[int, str], None] | None = None,
    plugins: Sequence[str] = (),
) -> str | list[str]:
    """Generates text after `prompt` with a checkpoint (or the newest of a run), greedily with `temperature` 0.

    `max_tokens` is 128 by default, or half of the model's context if that is less.
    For a sequence of prompts, returns a list of texts. The function calls `on_text`, if given, with (index of the
    prompt, new piece of generated text). With `chat`, the checkpoint's chat template formats each prompt as a user's
    message.

    With `parse_special`, the tokenizer encodes the spelling of a special token as the special token. `plugins` names
    the plugins that the checkpoint's model needs.

    Example:
        optimus.generate("runs/first", "Once upon a time", max_tokens=40, temperature=0.8, seed=1)
        optimus.generate("runs/first", ["def f(", "class A"], on_text=lambda number, piece: print(piece, end=""))
    """
    load_plugins(plugins)
    path = local_checkpoint(checkpoint)
    loaded = _load(path, device, parse_special or chat)
    assert isinstance(loaded.model, CausalModel)
    context = loaded.description.context
    if max_tokens is None:
        max_tokens = _NEW_TOKENS if context is None else max(1, min(_NEW_TOKENS, context // 2))
    how: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    how |= {"eos_id": loaded.eos_id, "context": context, "on_text": on_text}
    several, tokens = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes), loaded.tokenizer
    prompts: list[Any] = list(prompt) if several else [prompt]
    if chat:
        template = _chat_template(path, loaded)
        assert loaded.description.tokenizer is not None
        as_text = tokens if parse_special else load(loaded.description.tokenizer)
        found = answer(loaded.model, template, tokens, as_text, prompts, **how)
    else:
        found = generate(loaded.model, tokens, prompts, **how)
    return found if several else found[0]


def _chat_template(path: Path, loaded: _Loaded) -> ChatTemplate:
    """Returns the chat template of the checkpoint, or of the published model that its training started from."""
    if loaded.description.chat:
        return ChatTemplate.read(loaded.description.chat)
    eos = loaded.tokenizer.id_to_token(loaded.eos_id) or ""
    found = ChatTemplate.from_files(loaded.description.published, eos, str(path))
    if found is None:
        raise UserError(
            f"checkpoint {path} has no chat template: it was not trained on conversations (`text_field=chat:messages`), "
            "and the model that its training started from has none either. Leave `chat=True` out"
        )
    return found


def check_request(
    tasks: Sequence[str] = (),
    task_data: str | Path | None = None,
    hub: bool = False,
    text: str | Path | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    max_bytes: int | None = None,
) -> None:
    """Raises `UserError` for arguments of `evaluate` that are invalid for all checkpoints."""
    if not tasks and text is None:
        raise UserError(
            f"nothing to evaluate: name `tasks` ({', '.join(TASKS)}) and the folder of their data, `task_data`, or "
            "`text`, a file or folder, for bits per byte"
        )
    if tasks:
        if hub and task_data is not None:
            raise UserError("`hub` takes lm-eval's own data: leave `task_data` out, or `hub` for local data")
        if not hub and task_data is None:
            raise UserError(
                "tasks run on local data: name the folder of the data, `task_data`, or set `hub` for lm-eval's own data"
            )
        check_lm_eval()
    for name, value, least in (("limit", limit, 1), ("fewshot", fewshot, 0), ("max_bytes", max_bytes, 1)):
        if value is not None and value < least:
            raise UserError(f"`{name}` is {value}: it must be at least {least}")
    if text is not None:
        check_text(text, max_bytes)


def _check_output(output: str | Path | None) -> Path | None:
    """Returns the path of the file `output` after creating its folder; None without `output`. Raises `UserError` if the
    file cannot be written."""
    if output is None:
        return None
    path = user_path(output)
    if path.is_dir():
        raise UserError(f"`output` {path} is a folder: name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"output {path} cannot be written: {error.strerror or error}") from error
    return path


def _load_together(paths: Sequence[Path], device: str, parse_special: bool) -> _Loaded:
    """Loads a checkpoint, or several as an ensemble."""
    first, *others = [_load(path, device, parse_special) for path in paths]
    for path, other in zip(paths[1:], others):
        same = first.tokenizer.to_str() == other.tokenizer.to_str()
        if not same or first.description.model.vocab != other.description.model.vocab:
            raise UserError(
                f"{path} has another {'vocabulary' if same else 'tokenizer'} than {paths[0]}: they cannot form an ensemble"
            )
    if not others:
        return first
    context = min(each.description.context for each in (first, *others))
    model = Ensemble([each.model for each in (first, *others) if isinstance(each.model, CausalModel)])
    return replace(first, description=replace(first.description, context=context), model=model)


def _load(path: Path, device: str, parse_special: bool) -> _Loaded:
    description = read_description(path)
    note_changed_plugins(description.plugins, path)
    if description.tokenizer is None:
        raise UserError(
            f"checkpoint {path} has no tokenizer, so it cannot read text: import the model again, from a folder with "
            "tokenizer.json"
        )
    tokenizer = load(description.tokenizer, parse_special=parse_special)
    eos_id = description.eos_id if description.eos_id is not None else inspect(description.tokenizer).eos_id
    if (largest := max(tokenizer.get_vocab().values())) >= description.model.vocab:
        raise UserError(
            f"{description.tokenizer} has token {largest}, but the model of {path} has a vocabulary of "
            f"{description.model.vocab}: it is the tokenizer of another model"
        )
    model = load_model(path, device=use_device(device, "device"))
    return _Loaded(description, model, tokenizer, eos_id)
