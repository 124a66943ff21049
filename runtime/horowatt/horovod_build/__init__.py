# SPDX-License-Identifier: Apache-2.0
"""Builds, keeps and installs a Horovod for the torch of the running interpreter.

Horovod's published sources do not compile against today's torch, so ``pip install horovod`` is no
way to get it. ``run`` downloads them, applies a few named patches (``patches``), compiles, tries the
result, keeps the wheel in a cache outside any clone (``cache``) and installs it.
"""

from horowatt.horovod_build.build import BuildResult, import_horovod, run
from horowatt.horovod_build.recipe import HOROVOD_VERSION

__all__ = ["HOROVOD_VERSION", "BuildResult", "import_horovod", "run"]
