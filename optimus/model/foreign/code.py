"""Imports classes of models and configurations from the model's folder (`auto_map` in config.json)."""

import hashlib
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

from optimus.errors import UserError, said
from optimus.plugins import code_files, code_folders

CAUSAL = "AutoModelForCausalLM"  # the key of a causal model's class in `auto_map`
_PACKAGE = "optimus_code_of_folder_{}"


def code_class(config: Mapping[str, Any], kind: str) -> Any:
    """Returns the class that config.json's `auto_map` names for the auto class `kind`, or None without such an entry.

    Imports the module from a folder that the user has named as a plugin: `_name_or_path`, or otherwise the only such
    folder with the module. The modules are not copied, so ranks do not race for a cache.

    Raises `UserError` without such a folder, and for code that cannot be imported.
    """
    reference = (config.get("auto_map") or {}).get(kind)
    if reference is None:
        return None
    folder, module, name = _found(config, reference, kind)
    try:
        found = getattr(_imported(folder, module), name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"model.transformers: {reference} cannot be imported from {folder} ({said(error)}): mend the code, install what "
            "it imports, or set model.trust_remote_code to false"
        ) from error
    base, method = ("PreTrainedModel", "_from_config") if kind == CAUSAL else ("PreTrainedConfig", "from_dict")
    if not hasattr(found, method):
        raise UserError(
            f"model.transformers: auto_map names {reference} of {folder} for {kind}, which is no class for it: name a "
            f"subclass of {base} of `transformers`"
        )
    return found


def copy_code(config: Mapping[str, Any], target: Path) -> None:
    """Copies all Python files of the model's folder to the folder `target`, if the model has code there."""
    if (reference := (config.get("auto_map") or {}).get(CAUSAL)) is None:
        return
    folder, _, _ = _found(config, reference, CAUSAL)
    for file in code_files(folder):
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _found(config: Mapping[str, Any], reference: Any, kind: str) -> tuple[Path, str, str]:
    """Returns the folder, the module and the name of the class of a `reference` in `auto_map`."""
    module, _, name = reference.rpartition(".") if isinstance(reference, str) else ("", "", "")
    if not all((*module.split("."), name)) or "--" in module or "/" in module:
        repository = module.partition("--")[0] if "--" in module else "the model"
        raise UserError(
            f"model.transformers: auto_map names {reference!r} for {kind}, which is no code in the model's folder: copy "
            f"the code of {repository} into the folder, and write auto_map as MODULE.CLASS"
        )
    return _folder(str(config.get("_name_or_path") or ""), module), module, name


def _folder(recorded: str, module: str) -> Path:
    """Returns the plugin folder `recorded` if it is loaded, otherwise the only plugin folder that has `module`."""
    file = f"{module.replace('.', '/')}.py"
    same = [folder for folder in code_folders() if str(folder) == recorded]
    if same and not (same[0] / file).is_file():
        raise UserError(f"model.transformers: auto_map names {module}, but {recorded} has no {file}: correct auto_map")
    loaded = [folder for folder in code_folders() if (folder / file).is_file()]
    if len(found := same or loaded) != 1:
        where = recorded or "a folder"
        raise UserError(
            f"model.transformers: the code of the model, {file} in {where}, runs only if you name its folder as a "
            f"plugin: --plugin {quote(recorded) if recorded else 'FOLDER'}, or plugins in Python and in a configuration"
        )
    return found[0]


def _imported(folder: Path, module: str) -> ModuleType:
    package = _PACKAGE.format(hashlib.sha256(str(folder).encode()).hexdigest()[:16])
    if package not in sys.modules:
        made = sys.modules[package] = ModuleType(package)
        made.__path__ = [str(folder)]
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no bytecode in the user's folder
    try:
        return import_module(f"{package}.{module}")
    finally:
        sys.dont_write_bytecode = writes


def model_class(config: Any) -> Any:
    """Returns the class that a `transformers` configuration's `auto_map` names for causal models; see `code_class`."""
    auto_map = getattr(config, "auto_map", None)
    return code_class({"auto_map": auto_map, "_name_or_path": config.name_or_path}, CAUSAL)
