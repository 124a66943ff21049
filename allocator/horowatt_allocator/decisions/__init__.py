# SPDX-License-Identifier: Apache-2.0
"""Decisions as pure functions: no I/O, no clock, no randomness; time is an argument.

Order of the data: :mod:`estimates` -> :mod:`columns` -> :mod:`program` -> :mod:`placement`, driven by
:mod:`controller`. :mod:`admission` stands before it, :mod:`ledger` beside it.

The one exception is behind the ``solve`` argument of ``controller.step``: ``program.solve`` runs a solver
as a child process, with temporary files and a time limit.
"""
