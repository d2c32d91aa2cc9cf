"""The library's tables, such as the table of update rules, and the plugins that add rows to these tables."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticKnownError, core_schema

from optimus.errors import UserError, nearest, said

GROUP = "optimus.plugins"
"""Group of entry points that give plugins short names."""

T = TypeVar("T")


class Imported(Mapping[str, T]):
    """Rows that are imported on first use. `homes` maps each name to `module:attribute`."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._homes[name].partition(":")
        row: T = getattr(import_module(module), attribute)
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


class Row(Protocol):
    """A row of a `Table`, such as an update rule or a model family."""

    @property
    def name(self) -> str:
        """The row's key in its table."""


R = TypeVar("R", bound=Row)


class Table(Mapping[str, R]):
    """Rows by name: the library's own rows, and added rows.

    `what` names a row in messages ("update rule"). `kind` is the class of the rows. `find` returns the library's own
    rows. `check` raises `ValueError` for an invalid row of a plugin.
    """

    def __init__(
        self, what: str, kind: type[R], find: Callable[[], Mapping[str, R]], check: Callable[[R], None] | None = None
    ) -> None:
        self.what, self.kind, self.check, self._find = what, kind, check, cache(find)
        self._added: dict[str, R] = {}
        _TABLES.append(self)

    def __getitem__(self, name: str) -> R:
        return self._added[name] if name in self._added else self._find()[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._find()
        yield from self._added

    def __len__(self) -> int:
        return len(self._find()) + len(self._added)

    def named(self, name: str) -> R:
        """Returns the row `name`. Raises `UserError` for an unknown name."""
        if name not in self:
            raise UserError(f"{self.what} '{name}' does not exist; {nearest(name, self)}")
        return self[name]

    def extend(self, rows: Mapping[str, R]) -> None:
        """Adds rows by name, and replaces added rows of the same name."""
        self._added.update(rows)


_TABLES: list[Table[Any]] = []


@dataclass(frozen=True, eq=False)
class NameIn:
    """Restricts a string of the configuration to the names of a table."""

    table: Mapping[str, Any]
    object_of: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, name: str) -> str:
        if name not in self.table:
            *most, last = map(repr, self.table)
            expected = f"{', '.join(most)} or {last}" if most else last
            if self.object_of is not None and "." in name:
                expected += f", or the rule that is the argument `{self.object_of}` of `optimus.train`"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return name


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin, or a Hugging Face folder whose code may run."""

    name: str  # an entry point, a module or the path of a folder
    module: str  # the module's name, or the name of a folder without its path
    version: str | None  # version of the installed package that contains the module
    sha256: str  # hash of the module's file, or of all Python files of a package or folder

    @property
    def is_folder(self) -> bool:
        """True for a Hugging Face folder."""
        return os.sep in self.name

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.version else self.name


_LOADED: dict[str, Plugin] = {}


def loaded_plugins() -> list[Plugin]:
    """Returns the plugins that this process has loaded, in the order of loading."""
    return [*_LOADED.values()]


def code_folders() -> list[Path]:
    """Returns the Hugging Face folders among the loaded plugins. The code in these folders may run."""
    return [Path(plugin.name) for plugin in loaded_plugins() if plugin.is_folder]


def code_files(folder: Path) -> list[Path]:
    """Returns the Python files of a folder and its subfolders, sorted."""
    return sorted(file for file in folder.rglob("*.py") if file.is_file())


def load_plugins(names: Sequence[str] | None, where: str = "plugins") -> list[Plugin]:
    """Loads the named plugins, and adds the rows of new plugins to the tables.

    A name is an entry point in the group `optimus.plugins`, or a module in the current folder, on PYTHONPATH or
    installed. A path (with a slash) is a Hugging Face folder whose code may run (`model.trust_remote_code`). `where` is
    the origin of the names, for messages.

    Raises `UserError` unless `names` is None or a sequence of strings. Raises `UserError` for a module that cannot be
    imported or has no valid `ROWS`, for entry points with one name and different modules, and for a folder without
    config.json.
    """
    names = () if names is None else names
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where} is {names!r}: give a list of modules or entry points, such as [my_package.models]")
    return [_LOADED.get(name) or _load(name, f"{where}: {name}") for name in names]


def imported(module: str, where: str, cure: str) -> Any:
    """Imports `module` from the current folder, PYTHONPATH or the installed packages.

    Raises `UserError` if the import fails.
    """
    if os.getcwd() not in sys.path:  # the search path of a command lacks the current folder
        sys.path.append(os.getcwd())
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{where} cannot be imported ({said(error)}): {cure}, of a module in {os.getcwd()}, on PYTHONPATH or installed"
        ) from error


def naming_missing_plugins(error: UserError, recorded: Sequence[str]) -> UserError:
    """Returns `error` with the names of the `recorded` plugins that are not loaded."""
    missing = [name for name in recorded if name not in {*_LOADED, *_modules()}]
    if not missing:
        return error
    names = " and ".join(missing)
    return UserError(
        f"{error} (written with the plugin {names}, which is loaded only if named: add `plugins={missing[0]}`)"
    )


def changed_plugins(recorded: Iterable[Mapping[str, Any]], where: str) -> list[str]:
    """Returns a line for each loaded plugin whose files differ from the `recorded` files."""
    recorded, lines = [*recorded], []
    for each in recorded:
        plugin = _now(each, {other.get("sha256") for other in recorded})
        if plugin is not None and plugin.sha256 != each.get("sha256"):
            versions = (
                "" if each.get("version") == plugin.version else f" ({each.get('version')}, now {plugin.version})"
            )
            lines.append(f"the plugin {plugin.name} has changed since {where} was written{versions}")
    return [*dict.fromkeys(lines)]


def _now(recorded: Mapping[str, Any], known: Set[Any]) -> Plugin | None:
    """Returns the loaded plugin that is `recorded`. For a folder that is not loaded, returns a loaded folder whose hash
    is not in `known`, the hashes of all recorded plugins."""
    name = str(recorded.get("name"))
    if os.sep not in name:
        return _modules().get(str(recorded.get("module")))
    folders = [plugin for plugin in loaded_plugins() if plugin.is_folder]
    found = [plugin for plugin in folders if plugin.name == name] or [
        plugin for plugin in folders if plugin.sha256 not in known
    ]
    return found[0] if found else None


def note_changed_plugins(recorded: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Prints `changed_plugins` of the checkpoint `path` on standard error."""
    for line in changed_plugins(recorded, str(path)):
        print(line, file=sys.stderr)


def _load(name: str, where: str) -> Plugin:
    if os.sep in name:
        return _load_folder(Path(name).expanduser().resolve(), where)
    module_name = _module_of(name, where)
    if module_name in (modules := _modules()):  # loaded by another name
        return modules[module_name]
    module = imported(module_name, where, "name an entry point of the group optimus.plugins, or a module")
    rows = getattr(module, "ROWS", None)
    if not isinstance(rows, list | tuple):
        raise UserError(f"{where}: {module_name} has no list `ROWS`: a plugin lists the rows that it adds there")
    added: dict[str, dict[str, Any]] = {}
    for row in rows:
        table = _table_of(row, where)
        if not isinstance(row.name, str) or not row.name:
            raise UserError(f"{where}: {table.what}: its name is {row.name!r}: give a text")
        if row.name in table or row.name in added.setdefault(table.what, {}):
            raise UserError(f"{where}: there is a {table.what} '{row.name}' already: give this one another name")
        _check(table, row, where)
        added[table.what][row.name] = row
    for table in _TABLES:
        table.extend(added.get(table.what, {}))
    plugin = _LOADED[name] = Plugin(name, module_name, _version(module_name), _digest_of(module))
    return plugin


def _modules() -> dict[str, Plugin]:
    """Returns the loaded plugins that are modules, by module."""
    return {plugin.module: plugin for plugin in loaded_plugins() if not plugin.is_folder}


def _load_folder(folder: Path, where: str) -> Plugin:
    """Notes that the code of a folder may run. Does not import the code."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{where}: {folder} has no config.json: name a Hugging Face folder with code, or a module")
    name = str(folder)
    return _LOADED.setdefault(name, Plugin(name, folder.name, None, _digest(folder, code_files(folder))))


def _module_of(name: str, where: str) -> str:
    """Returns the module of the entry point `name`; `name` itself without such an entry point.

    Raises `UserError` if entry points with this name have different modules.
    """
    packages = {entry.module: entry.dist for entry in metadata.entry_points(group=GROUP, name=name)}
    if len(packages) > 1:
        both = " and ".join(
            f"{module}{f' of {package.name}' if package else ''}" for module, package in packages.items()
        )
        raise UserError(f"{where}: the entry points {both} have this name: name the module, or uninstall a package")
    return next(iter(packages), name)


def _check(table: Table[Any], row: Any, where: str) -> None:
    if table.check is None:
        return
    try:
        table.check(row)
    except ValueError as error:
        raise UserError(f"{where}: {table.what}: {' '.join(str(error).split())}") from None
    except Exception as error:
        raise UserError(f"{where}: {table.what} '{row.name}': {said(error)}") from error


def _table_of(row: object, where: str) -> Table[Any]:
    for table in _TABLES:
        if isinstance(row, table.kind):
            return table
    raise UserError(f"{where}: {row!r} in `ROWS` is no row of a table: list rows of the classes in `optimus.extend`")


def _version(module: str) -> str | None:
    packages = metadata.packages_distributions().get(module.partition(".")[0], ())
    return metadata.version(packages[0]) if packages else None


def _digest_of(module: Any) -> str:
    """Hashes the name and content of a module's file, or of all Python files of a package (SHA-256)."""
    file = Path(module.__file__)
    return _digest(file.parent, code_files(file.parent) if file.name == "__init__.py" else [file])


def _digest(folder: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for each in sorted(files):
        digest.update(each.relative_to(folder).as_posix().encode() + b"\0" + each.read_bytes() + b"\0")
    return digest.hexdigest()
