"""Who keeps which part of an optimizer's slots."""
