"""Shell completion of configuration keys and presets."""

from contextlib import suppress


def complete_key(incomplete: str) -> list[str]:
    """Returns the configuration keys that begin with `incomplete`, each with an equals sign, or a dot for a section."""
    from optimus.config import RunConfig
    from optimus.config.load import keys_of_section

    *section, last = incomplete.split(".")
    found = []
    with suppress(LookupError):  # the section does not exist
        for key in keys_of_section(section, RunConfig) if "=" not in incomplete else ():
            if key.startswith(last):
                inner = list(keys_of_section([*section, key], RunConfig))
                found.append(".".join([*section, key]) + ("." if inner else "="))
    return found


def complete_preset(incomplete: str) -> list[str]:
    """Returns the presets that begin with `incomplete`."""
    from optimus.config.load import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]
