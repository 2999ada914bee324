"""One exception type a boundary; each message names the argument, the value received and the remedy."""


class CoPEError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigError(CoPEError, ValueError):
    """A setting is out of range or two settings contradict each other."""


class DataError(CoPEError, ValueError):
    """A dataset lacks a column, or a row cannot be used."""


class TemplateError(CoPEError, ValueError):
    """A chat template cannot be used for multi-turn training."""


class RolloutError(CoPEError, RuntimeError):
    """No usable episode was left in a step."""
