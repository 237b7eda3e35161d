"""The units of a step, which are placed as one, and what each costs."""
