# SPDX-License-Identifier: Apache-2.0
"""Horowatt on the head node: decisions, ledger, service, reports and the command line."""
