"""What is placed as one: the units of a step, and what each costs."""
