"""What a shell completes: keys of the configuration, presets. It asks anew at each press of Tab: imports wait until then."""

from contextlib import suppress


def complete_key(incomplete: str) -> list[str]:
    """Keys of the configuration that begin so, each with its equals sign."""
    from optimus.config import RunConfig
    from optimus.config.load import keys_of_section

    *section, last = incomplete.split(".")
    found = []
    with suppress(LookupError):  # no such section
        for key in keys_of_section(section, RunConfig) if "=" not in incomplete else ():
            if key.startswith(last):
                inner = list(keys_of_section([*section, key], RunConfig))
                found.append(".".join([*section, key]) + ("." if inner else "="))
    return found


def complete_preset(incomplete: str) -> list[str]:
    """Presets that begin so."""
    from optimus.config.load import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]
