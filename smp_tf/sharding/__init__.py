"""Decides who keeps which part of an optimizer's slots."""
