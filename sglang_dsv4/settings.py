"""The user's switches: the only place that reads the environment, once, at start-up."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


class SettingsError(ValueError):
    """A switch that cannot be read: names the variable, the item and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for, as text; `precision.parse` and `backends.choose` read it.

    SGLang has variables of its own that begin with SGLANG_DSV4_, so unknown names with that
    beginning are not ours to refuse.
    """

    precision: str  # SGLANG_DSV4_PRECISION: "component=value,...", empty for the defaults
    ops: str  # SGLANG_DSV4_OPS: "op=provider,...", empty for the best provider of each
    plugins: str = ""  # SGLANG_PLUGINS, which SGLang reads: the plugins to load, empty for all

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        return cls(
            precision=environ.get("SGLANG_DSV4_PRECISION", ""),
            ops=environ.get("SGLANG_DSV4_OPS", ""),
            plugins=environ.get("SGLANG_PLUGINS", ""),
        )


def set_host_environment(
    served_package: str, environ: MutableMapping[str, str] = os.environ
) -> None:
    """What SGLang reads from the environment when its modules are imported; children inherit it.

    The model registry imports `served_package` in the place of its built-in models, and the pool
    keeps HCA state as running vectors, not as the last 128 tokens.
    """
    environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = served_package
    environ["SGLANG_OPT_USE_ONLINE_COMPRESS"] = "1"


def parse_assignments(
    variable: str, text: str, allowed: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Reads "name=value,name=value"; spaces and empty items do not matter.

    `allowed` maps each known name to its known values. Raises SettingsError, which names
    `variable`, the item and what is allowed.
    """
    chosen: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name or not value:
            raise SettingsError(f"{variable}: cannot read {item!r}: write name=value,name=value")
        if name not in allowed:
            raise SettingsError(
                f"{variable}: {name!r} is unknown: must be one of {', '.join(allowed)}"
            )
        if value not in allowed[name]:
            values = " or ".join(allowed[name])
            raise SettingsError(f"{variable}: {name}={value!r} is refused: must be {values}")
        if chosen.get(name, value) != value:
            raise SettingsError(
                f"{variable}: {name} is given twice, {chosen[name]!r} and {value!r}"
            )
        chosen[name] = value
    return chosen
