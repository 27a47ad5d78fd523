"""The closed set of errors a user can meet. All are ValueErrors.

Every message says what is wrong, the offending value, the limit, and the cure.
"""

from __future__ import annotations


class St2iError(ValueError):
    """Base of the set: `except st2i.St2iError` catches every refusal of this package."""


class ComposeError(St2iError):
    """A workflow or ModelFn is put together wrongly; found when composing, before any submit."""


class RegistrationError(St2iError):
    """A workflow cannot be registered, for example because its name is taken."""


class ParameterError(St2iError):
    """A submitted parameter (or tenant) has a wrong name, type or value; nothing was submitted."""


class LimitError(St2iError):
    """A tenant is over its cap of queued requests; nothing was submitted. Try again later."""


class ProducerLostError(St2iError):
    """The task that makes a callback input is gone; consumer and producer run again."""


class AttachError(St2iError):
    """The cluster cannot serve: package missing or of another version on scheduler or workers."""


class LoadError(St2iError):
    """A model cannot be found, read, or held within the worker's budget."""


class OutputError(St2iError):
    """A model produced something that must not pass as a result: NaN, black, undeclared."""


class NotFiniteError(OutputError):
    """A model produced NaN or infinite numbers."""


class PolicyError(St2iError):
    """A scheduling event or operator setting is not legal; the policy's state is unchanged."""


def said(error: BaseException) -> str:
    """On one line what an error says, with its type unless it is ours, and which invocation raised it."""
    text = " ".join(str(error).split())
    if not isinstance(error, St2iError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return " ".join([text, *(f"({note})" for note in getattr(error, "__notes__", ()))])
