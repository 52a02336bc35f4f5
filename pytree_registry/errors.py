"""The errors of this package.

::

    TypeError
    └── RegistrationError      a class or an object that cannot be a pytree node
        └── TracedCountError   a traced token count was asked something that only its value can tell
"""


class RegistrationError(TypeError):
    """A class that cannot become a pytree node, or an object of a registered class that cannot be taken apart."""


class TracedCountError(RegistrationError):
    """A token count that is traced was asked something that only its value can tell."""
