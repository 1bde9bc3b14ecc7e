"""Networks with a Neural ODE inside: for images, for time series, and flows."""

from __future__ import annotations

from ocnopt.lab.models.ode.flow import Flow, FlowField, ffjord
from ocnopt.lab.models.ode.images import conv_ode
from ocnopt.lab.models.ode.series import ODERNN, ode_rnn

__all__ = ["ODERNN", "Flow", "FlowField", "conv_ode", "ffjord", "ode_rnn"]
