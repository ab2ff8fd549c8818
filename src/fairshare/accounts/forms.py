"""How reports are written. Light, for the command line to import."""

from enum import StrEnum


class Form(StrEnum):
    """How a report is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    PARSABLE2 = "parsable2"
    """As `sreport --parsable2 cluster AccountUtilizationByUser` writes it."""
