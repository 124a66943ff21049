# SPDX-License-Identifier: Apache-2.0
"""The command line. ``main`` is the entry point; every command is a module that loads when used.

A command prints its result to stdout and everything else to stderr. With ``--json`` stdout holds
one JSON object with ``schema_version`` and nothing else.
"""
