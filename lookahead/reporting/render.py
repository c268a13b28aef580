"""HTML pages from the Jinja2 templates beside this module. Every value is escaped."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lookahead.reporting.charts import brief, duration, exact, units

# Control characters, lone surrogates and noncharacters are invalid in HTML. Direction marks would reorder the text
# around them.
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")


def render(template: str, **values: Any) -> str:
    """Fill a template, for example `report.html.j2`.

    Args:
        template: File name in `templates/`.
        values: Its variables. All text is escaped; characters that no page may hold become U+FFFD.
    """
    return _UNFIT.sub("\ufffd", _environment().get_template(template).render(values))


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
