"""Names the wheel by the platform of its libraries: they use no interface of Python."""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class LibrariesOfC(Distribution):
    """A distribution with shared libraries, which no compiler of setuptools has made."""

    def has_ext_modules(self) -> bool:
        """Returns True: the wheel is of one platform."""
        return True


class AnyPython(bdist_wheel):
    """A wheel for every Python 3 of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tag, with the platform that `build.py` names."""
        return "py3", "none", os.environ["KERNELS_PLATFORM"]


setup(distclass=LibrariesOfC, cmdclass={"bdist_wheel": AnyPython})
