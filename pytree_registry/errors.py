"""The errors of this package.

::

    TypeError
    └── RegistrationError      a class or an object that cannot be a pytree node
        └── TracedCountError   a traced token count was asked something that only its value can tell
"""


class RegistrationError(TypeError):
    """Error of a class that cannot become a pytree node, or of an object that cannot be split.

    The object is one of a registered class.
    """


class TracedCountError(RegistrationError):
    """A token count that is traced was asked something that only its value can tell."""
