# SPDX-License-Identifier: Apache-2.0
"""The domain: frozen records without I/O. Import the modules below by name."""
