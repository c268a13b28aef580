"""HTML pages from the Jinja2 templates beside this module. Every value is escaped."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lookahead.errors import ConfigError
from lookahead.reporting.charts import brief, duration, exact, units

# Control characters, lone surrogates and noncharacters are invalid in HTML. Direction marks would reorder the text
# around them.
_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")


def render(template: str, **values: Any) -> str:
    """Fill a template.

    Args:
        template: File name in `templates/`.
        values: Its variables. Text is escaped; characters that are invalid in HTML become U+FFFD.
    """
    return _INVALID.sub("\ufffd", _environment().get_template(template).render(values))


def check_page(path: Path, option: str) -> None:
    """Refuse a page that cannot be written, before any work is done.

    Raises:
        ConfigError: With the option and the path.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} must be a file in a folder that exists, got {str(path)!r}")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lookahead.reporting"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "brief": brief,
        "duration": duration,
        "exact": exact,
        "count": lambda number: f"{number:,}",
        "percent": lambda share: f"{share:.1%}",
        "units": units,
    }
    return environment
