"""Exceptions, grouped by who must act. A refusal is a value (see `fairshare.core.decisions`), not an exception."""


class FairshareError(Exception):
    """Base of every error that fairshare raises on purpose."""


class CallerError(FairshareError):
    """The request is wrong. The caller must change it; retrying cannot help."""


class TryElsewhere(FairshareError):
    """Nothing is wrong with the request. Another replica, or a later try, can serve it."""


class OperatorError(FairshareError):
    """The deployment is wrong. A person who runs fairshare must act."""
