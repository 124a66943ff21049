# SPDX-License-Identifier: Apache-2.0
"""The service: one core that decides, stores and acts; HTTP around it; the process that runs both."""
