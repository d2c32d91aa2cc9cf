"""Renders a template of a machine file."""

import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from optimus.plan.machine import Machine, load_machine

_EXAMPLE = "dgx-h100"
_HEAD = f"""A machine for `optimus plan --machine FILE`, key by key. Units are bytes, seconds and FLOP/s;
3.0e+12 is 3,000,000,000,000. The values are those of {_EXAMPLE}: replace them with those of your machine. Keys in comments
are optional and show their defaults. If your machine resembles a machine that comes with the library, change the latter
instead: `optimus plan MODEL --machine {_EXAMPLE} --what-if memory=128e9`. `optimus bench machine` measures the machine on
which it runs."""
_OWN = {"name": "my-machine", "source": "source of the figures: a data sheet, a measurement"}
_WIDTH = 118


def machine_template() -> str:
    """Returns the commented YAML of a complete machine file."""
    example = load_machine(_EXAMPLE).model_dump(exclude_unset=True) | _OWN
    return "\n".join([*_comment(_HEAD, ""), "", *_section(Machine, example, "")]) + "\n"


def _section(kind: type[BaseModel], example: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield from _comment(field.description or _about(field), indent)
        inner, value = _model_in(field), example.get(name)
        if not field.is_required() and (value is None or inner is None):
            yield f"{indent}# {name}: {_written(field.get_default(call_default_factory=True))}"
        elif inner is not None and isinstance(value, Mapping) and not _is_mapping(field):
            yield f"{indent}{name}:"
            yield from _section(inner, value, f"{indent}  ")
        elif inner is not None and isinstance(value, Mapping):  # a mapping from names to sections
            for each, more in inner.model_fields.items():
                yield from _comment(f"{each}: {more.description or _about(more)}", f"{indent}  ")
            yield f"{indent}{name}:"
            yield from (f"{indent}  {key}: {_written(each)}" for key, each in value.items())
        else:
            yield f"{indent}{name}: {_written(value)}"


def _about(field: FieldInfo) -> str:
    inner = _model_in(field)
    text = (inner.__doc__ or "") if inner is not None else ""
    return " ".join(text.split("\n\n")[0].split())


def _comment(text: str, indent: str) -> Iterator[str]:
    if text:
        wrapped = textwrap.wrap(" ".join(text.split()), _WIDTH - len(indent), break_on_hyphens=False)
        yield from (f"{indent}# {line}" for line in wrapped)


def _model_in(field: FieldInfo) -> type[BaseModel] | None:
    def found(annotation: Any) -> type[BaseModel] | None:
        if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
            return annotation if issubclass(annotation, BaseModel) else None
        return next(filter(None, map(found, typing.get_args(annotation))), None)

    return found(field.annotation)


def _is_mapping(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict


def _written(value: Any) -> str:
    plain = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
    return (
        yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6)
        .removesuffix("...\n")
        .strip()
    )


class _Dumper(yaml.SafeDumper):
    """Writes YAML with floats rounded to six significant digits, such as 8.5e+10."""


def _number(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    text = f"{value:g}"
    mantissa, e, exponent = text.partition("e")
    return dumper.represent_scalar(
        "tag:yaml.org,2002:float", f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"
    )


_Dumper.add_representer(float, _number)
