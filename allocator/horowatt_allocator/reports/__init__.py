# SPDX-License-Identifier: Apache-2.0
"""Energy reports as files: HTML to read and print, CSV for spreadsheets, JSON for programs.

All three say the same, are a pure function of one ``EnergyReport`` (same report, same bytes) and
mark every figure that comes from a simulated device.
"""
